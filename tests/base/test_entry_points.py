"""Entry points of a package that pip has installed work like files in our own folders, in the
commands that use them.

Its modules are the examples of docs/extending.md, unchanged: what is written in a checkout moves as
it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_cli.app.cli import COMMANDS, run
from mismatch_cli.base import entry_points, registry
from tests import pictures
from tests.docs.pages import DOCS, additions, steps
from tests.folders import write_files

PAGE = DOCS / "extending.md"
OFFERED = {  # group: name, and its file on the page
    "importers": ("toy", "frameworks/toy/importer.py"),
    "engines": ("coarse", "models/engines/coarse.py"),
    "trust_regions": ("two-sided-tv", "rules/trust_regions/two_sided_tv.py"),
    "weights": ("bell", "rules/weights/bell.py"),
    "checks": ("few-decimals", "diagnosis/checks/few_decimals.py"),
    "dialects": ("toy", "frameworks/toy/metrics.py"),
}
EQUAL = "two-sided-tv:max_fall=0.15,max_rise=0.15"
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "mismatch-toy"
version = "0.3"
[tool.hatch.build.targets.wheel]
packages = ["mismatch_toy"]
"""


def installed(folder: Path, points: dict[str, dict[str, str]], modules: dict[str, str]) -> Path:
    """The folder into which pip has installed a package with these entry points and modules."""
    tables = (
        f'[project.entry-points."mismatch_cli.{group}"]\n'
        + "".join(f'"{k}" = "{v}"\n' for k, v in named.items())
        for group, named in points.items()
    )
    files = {f"mismatch_toy/{name}": text for name, text in modules.items()}
    files |= {"mismatch_toy/__init__.py": "", "pyproject.toml": PYPROJECT + "".join(tables)}
    line = "-m pip install --quiet --disable-pip-version-check --no-deps --no-index"
    line += " --no-build-isolation --target"
    source, target = write_files(folder / "source", files), folder / "site"
    subprocess.run([sys.executable, *line.split(), target, source], check=True)
    return target


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    texts = {file.name.removeprefix("mismatch_cli/"): file.text for file in additions(PAGE)}
    modules = {
        f"{group}_{name}.py".replace("-", "_"): texts[path]
        for group, (name, path) in OFFERED.items()
    }
    points = {
        group: {name: f"mismatch_toy.{group}_{name}".replace("-", "_")}
        for group, (name, _) in OFFERED.items()
    }
    # We have that name
    points["trust_regions"]["binary-tv"] = "mismatch_toy.trust_regions_two_sided_tv"
    points["trust_regions"]["broken"] = "mismatch_toy.broken"
    points["weights"]["empty"] = "mismatch_toy"
    points["weights"]["raises"] = "mismatch_toy.raises"
    points["dialects"]["Not A Name"] = "mismatch_toy.nowhere"
    modules["broken.py"] = "print('imported')\nimport a_library_that_nobody_has\n"
    modules["raises.py"] = (
        "FORMULA = 'r'\ndef weight(compared, level, advantage_T):\n    return 1 / 0\n"
    )
    return installed(tmp_path_factory.mktemp("toy"), points, modules)


@pytest.fixture
def here(site, tmp_path, monkeypatch):
    """A working folder, in a Python with the package on its path."""
    forget()
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    pictures.leave_blank(monkeypatch)
    yield tmp_path
    forget()


def forget() -> None:
    entry_points.points_of_group.cache_clear()
    entry_points.metadata_folders.cache_clear()
    registry.installed.cache_clear()
    entry_points.ignored_points.clear()


def typed(capfd, line: str) -> tuple[int, str, str]:
    capfd.readouterr()
    code = run(line.split())
    return code, *capfd.readouterr()


def test_names_are_listed_and_nothing_of_the_package_is_imported(here):
    for package, group in entry_points.GROUPS.items():
        name, _ = OFFERED[group.removeprefix("mismatch_cli.")]
        assert name in registry.names(package) and name in registry.installed(package)
    assert not [name for name in sys.modules if name.startswith("mismatch_toy")]
    assert "mismatch_toy" not in str(registry.names(COMMANDS))


def test_each_is_used_by_the_command_that_it_is_for(here, capfd):
    code, out, _ = typed(capfd, f"clipstats -a {EQUAL} -a dppo-binary-tv -a bell --json")
    rows = {row["name"]: row["blocked"] for row in json.loads(out)["algorithms"]}
    assert code == 0
    assert rows[EQUAL] == rows["dppo-binary-tv"] != rows["bell"]

    script = next(step.text for step in steps(PAGE) if getattr(step, "name", "") == "write_toy.py")
    exec(script, {})  # the page's own program, which writes toy.jsonl
    code, out, _ = typed(capfd, "import toy.jsonl")
    assert code == 0 and "39 responses of 2 steps from toy trainer" in out
    code, out, _ = typed(capfd, "report import-toy --as toy")
    assert code == 0 and "gap/mean" in out
    code, out, _ = typed(capfd, "diagnose import-toy")
    assert code == 0 and "All 780 log μ are multiples of 0.01 nats." in " ".join(out.split())

    few = "--num-prompts 2 --samples-per-prompt 1 --max-tokens 4 --noise-responses 0 --no-plots"
    code, _, err = typed(
        capfd, f"probe --engine coarse --engine-arg bits=4 {few} --output coarse --quiet"
    )
    assert code == 0, err
    rollout = json.loads(Path("coarse/trace/manifest.json").read_text(encoding="utf-8"))["rollout"]
    assert (rollout["engine"], rollout["mantissa_bits"]) == ("coarse", 4)


def test_an_unknown_name_answers_with_the_nearest_of_all(here, capfd):
    for line, near in (
        ("clipstats -a two-sidedtv", "two-sided-tv"),
        ("clipstats -a bel", "bell"),
        ("import --format toi x.jsonl", "toy"),
        ("report --as toi", "toy"),
        ("probe --engine coars", "coarse"),
    ):
        code, _, err = typed(capfd, line)
        assert code == 2 and f"Did you mean {near}" in err, err


def test_a_name_of_ours_stays_ours_and_the_clash_is_reported(here, capfd):
    code, out, err = typed(capfd, "clipstats -a binary-tv --json")
    assert code == 0 and json.loads(out)["algorithms"][0]["name"] == "binary-tv"
    assert (
        "mismatch_cli.trust_regions: 'binary-tv' of the package mismatch-toy 0.3 is ignored: "
        "mismatch-cli itself has that name." in err
    )
    assert typed(capfd, "clipstats -a binary-tv --json --quiet")[2] == ""
    _, _, err = typed(capfd, "report --as nemo-rl --json")
    assert (
        "'Not A Name' of the package mismatch-toy 0.3 is ignored: a name has lower-case letters"
        in err
    )


def test_a_package_that_does_not_work_is_named(here, capfd):
    code, out, err = typed(capfd, "clipstats -a broken --json")
    assert (code, out) == (1, "imported\n") or "imported" in err
    assert (
        "The trust region 'broken' of the package mismatch-toy 0.3 cannot be imported "
        "(ModuleNotFoundError" in err
    )
    assert "pip uninstall mismatch-toy" in err
    code, _, err = typed(capfd, "clipstats -a empty")
    assert (
        code == 1
        and "'empty' of the package mismatch-toy 0.3 lacks weight: mismatch_toy must define" in err
    )
    code, _, err = typed(capfd, "clipstats -a raises")
    assert code == 1 and "in the package mismatch-toy 0.3. Report it to its author" in err


def test_another_process_finds_them_too(site, tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(DOCS.parent), str(site)])}
    done = subprocess.run(
        [sys.executable, "-m", "mismatch_cli", "import", "--formats"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "toy trainer" in done.stdout
