"""The wheel as users get it: installed without extras into an empty environment, where every trace
can be read.

Real pip and uv, real environments, the versions that requirements/ pins. Where no package index can
be reached, or another Python is missing, the tests are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from mismatch_cli import __version__
from mismatch_cli.app.cli import COMMANDS
from mismatch_cli.base import registry
from mismatch_cli.base.extras import EXTRAS
from mismatch_cli.base.places import bundled
from tests.paths import DOCS, ROOT
from tests.tiers import cpu_seconds_of_children

pytestmark = pytest.mark.slow

MOST_MEGABYTES = 450
ABSENT = ("vllm", *EXTRAS["hf"])
TRACKERS = ("trackio", "wandb", "tensorboard", "mlflow")
TINY = "array-api-compat"  # a core dependency that is quick to fetch
MASK = """
import torch
from mismatch_cli import Decision


def trust_region(compared, advantage_T, *, limit: float = 1.5):
    return Decision(compared.ratio_T <= limit, compared.ratio_less_1_T)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def core(wheel, tmp_path_factory) -> Path:
    """The `bin` of an environment with nothing but the core."""
    folder = tmp_path_factory.mktemp("core")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python, pins = folder / "bin" / "python", pinned(folder)
    done = pip(
        "--python", str(python), "install", "--no-compile", "--constraint", str(pins), str(wheel)
    )
    if done.returncode:
        tiny = pip("download", "--no-deps", "--dest", str(folder), "--constraint", str(pins), TINY)
        if tiny.returncode:
            pytest.skip(f"No package index can be reached: {why(tiny.stderr)}")
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def pinned(folder: Path) -> Path:
    """The versions of requirements/cpu.lock, as constraints."""
    lock = (ROOT / "requirements" / "cpu.lock").read_text(encoding="utf-8")
    pins = folder / "pins.txt"
    pins.write_text("\n".join(re.findall(r"^[\w.-]+==[\w.]+", lock, re.MULTILINE)))
    return pins


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--retries",
        "1",
        *arguments,
    ]
    return subprocess.run(
        line, env=without_python_path(), capture_output=True, text=True, check=False
    )


def why(said: str) -> str:
    """The first error of pip."""
    return next((line for line in said.splitlines() if line.startswith("ERROR")), said[-200:])


def without_python_path() -> dict[str, str]:
    """An environment in which nothing of the checkout can be found."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@pytest.fixture
def typed(core, tmp_path):
    """Run a command in a folder of its own; return exit code, stdout and stderr.

    Prints its CPU time.
    """

    def typed(*words: str) -> tuple[int, str, str]:
        line, before = [core / "mismatch-cli", *words], cpu_seconds_of_children()
        done = subprocess.run(
            line,
            cwd=tmp_path,
            env=without_python_path(),
            capture_output=True,
            text=True,
            check=False,
        )
        print(f"{cpu_seconds_of_children() - before:5.1f} CPU s  mismatch-cli {' '.join(words)}")
        assert "Traceback" not in done.stderr and "This is a bug" not in done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr

    return typed


def test_the_metadata_of_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"mismatch_cli-{__version__}.dist-info"
        metadata: Message = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        entries = archive.read(f"{info}/entry_points.txt").decode().split("\n")
    assert "mismatch-cli = mismatch_cli.__main__:main" in entries
    assert {"mismatch_cli/py.typed", "mismatch_cli/sample_data/model/model.safetensors"} <= names
    assert {Path(name).parts[0] for name in names} == {"mismatch_cli", info}
    guide, docs = "mismatch_cli/guide/", DOCS
    shipped = {name.removeprefix(guide) for name in names if name.startswith(guide)}
    assert shipped == {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert len({line.split(",")[0] for line in metadata.get_all("Project-URL")} - {"Source"}) == 4
    assert metadata["Requires-Python"] == ">=3.11" and metadata["License-Expression"] == "MIT"
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/THIRD_PARTY.md"} <= names
    assert set(metadata.get_all("Provides-Extra")) == {
        "hf",
        "cpu",
        "vllm",
        "ray",
        "dev",
        "night",
        *TRACKERS,
    }
    classifiers = metadata.get_all("Classifier")
    assert {
        "Typing :: Typed",
        *(f"Programming Language :: Python :: 3.{n}" for n in (11, 12, 13)),
    } <= set(classifiers)
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(needed) == 9 and not any(line.startswith(ABSENT) for line in needed)


def test_the_core_is_small_and_contains_no_extra(core):
    lines = (
        "import importlib.util, sys; print([m for m in sys.argv[1:] if "
        "importlib.util.find_spec(m)])"
    )
    done = subprocess.run(
        [core / "python", "-c", lines, *ABSENT],
        env=without_python_path(),
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[]", done.stderr
    packages = next(core.parent.glob("lib/python*/site-packages"))
    size = {
        folder.name: sum(file.lstat().st_blocks * 512 for file in folder.rglob("*")) / 1e6
        for folder in packages.iterdir()
        if not folder.name.startswith(("pip", "setuptools", "pkg_resources", "_distutils"))
    }
    largest = sorted(size.items(), key=lambda item: -item[1])[:8]
    print(
        f"{sum(size.values()):.0f} MB:",
        ", ".join(f"{name} {megabytes:.0f}" for name, megabytes in largest),
    )
    assert sum(size.values()) < MOST_MEGABYTES


def test_every_command_explains_itself(core):
    lines = (
        "import sys; from mismatch_cli.app.cli import run\n"
        "print(sum(run([name, '--help']) for name in sys.argv[1:]), 'torch' in sys.modules)"
    )
    names = registry.names(COMMANDS)
    done = subprocess.run(
        [core / "python", "-c", lines, *names],
        env=without_python_path(),
        capture_output=True,
        text=True,
    )
    assert len(names) == 15 and done.stdout.splitlines()[-1] == "0 False", done.stderr


def test_numbers_of_a_trace(typed):
    for words in (
        ("algorithms",),
        ("report", "--as", "all"),
        ("import", "--schema"),
        ("import", "--formats"),
        ("gate", str(bundled("traces") / "float32"), "--limits", "prime-rl"),
        ("guide", "gate"),
        ("train", "--show-config"),
    ):
        code, out, err = typed(*words)
        assert code == 0 and out, err


@pytest.mark.parametrize(
    "words",
    [
        ("report", "--export", "parquet", "--worst", "5"),
        ("clipstats", "-a", "grpo-clip-higher", "-a", "dppo-topk-tv", "--theory"),
        ("compare", str(bundled("traces") / "float32"), str(bundled("traces") / "fp8-kv")),
        ("diagnose",),
    ],
    ids=lambda words: words[0],
)
def test_a_report_with_its_pictures(typed, tmp_path, words):
    code, out, err = typed(*words, "--plots", "png", "--output", "out")
    assert code == 0 and out, err
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"report.html", "summary.json", "plots"} <= written
    assert any((tmp_path / "out" / "plots").iterdir())
    assert ("tokens.parquet" in written) == ("parquet" in words)


def test_the_library_has_its_frames(core, tmp_path):
    lines = (
        "import mismatch_cli\n"
        "run = mismatch_cli.open()\n"
        "print(run.gate('verl').passed, 'BLOCKED' in str(run.clip('ppo')), len(run.tokens) > 99)"
    )
    done = subprocess.run(
        [core / "python", "-c", lines],
        cwd=tmp_path,
        env=without_python_path(),
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["True True True"], done.stderr


def test_a_dump_is_imported_and_read(typed, tmp_path):
    assert typed("import")[0] == 0
    assert typed("report", "import-dumps", "--export", "jsonl")[0] == 0
    assert typed("import", "import-dumps/responses.jsonl", "--output", "again")[0] == 0
    code, out, _ = typed("diagnose", "again")
    assert code == 0 and "747 tokens" in out


def test_a_training_run_is_reported(typed, trained):
    code, out, err = typed("report", str(trained), "--plots", "png")
    assert code == 0 and "reward" in out, err
    assert any((trained / "plots").iterdir())


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    from mismatch_cli.app.cli import run
    from tests.train.commands.test_train import TRAIN

    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run([*TRAIN, "-o", str(folder), "--quiet"]) == 0
    return folder


HF, VLLM = (
    "pip install 'mismatch-cli[hf]'",
    "pip install 'mismatch-cli[cpu]' (no GPU) or pip install 'mismatch-cli[vllm]'",
)
LACKING = {
    "probe": VLLM,
    "curate": VLLM,
    "train": VLLM,
    "probe --engine hf": HF,
    "probe --engine server --engine-url http://localhost:1": HF,
    "rescore": HF,
    "diagnose --trainer-model MODEL": HF,
    "import dump.pt": HF,
    "import dump.jsonl --tokenizer MODEL": HF,
    "clipstats -a mask.py": HF,
}


@pytest.mark.parametrize("line", LACKING)
def test_commands_that_need_an_extra_say_so_and_leave_nothing(typed, tmp_path, line):
    (tmp_path / "mask.py").write_text(MASK)
    (tmp_path / "dump.pt").write_bytes(b"PK")  # an archive, which needs torch
    (tmp_path / "dump.jsonl").touch()
    before = sorted(tmp_path.rglob("*"))
    code, out, err = typed(*line.replace("MODEL", str(bundled("model"))).split())
    assert code in (1, 2) and not out
    assert f"which is not installed. Install it with: {LACKING[line]}" in err
    assert [
        path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts
    ] == before


def test_types_are_seen_from_outside(core, tmp_path):
    theirs = tmp_path / "theirs.py"
    theirs.write_text("from mismatch_cli.base.errors import suggest\n\nsuggest('report') + 1\n")
    line = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-executable",
        core / "python",
        "--cache-dir",
        tmp_path,
        theirs,
    ]
    done = subprocess.run(
        line, cwd=tmp_path, env=without_python_path(), capture_output=True, text=True, check=False
    )
    assert 'Unsupported operand types for + ("str" and "int")' in done.stdout
    assert "Found 1 error" in done.stdout, done.stdout


def uv(*arguments: str | Path, **variables: Path) -> str:
    """Run uv; what it said.

    Skipped where it is not installed, or where no package index answers.
    """
    program = shutil.which(
        "uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if program is None:
        pytest.skip("uv is not installed: make setup installs it.")
    environment = without_python_path() | {name: str(path) for name, path in variables.items()}
    done = subprocess.run(
        [program, "--no-progress", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and re.search(
        r"error sending request|dns error|Failed to fetch", done.stderr
    ):
        pytest.skip(f"No package index can be reached: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def interpreter(version: str) -> Path:
    """A Python of that version, from the PATH or from pyenv, whose shims run one version alone;
    skipped without.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for program in (shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python")):
        if program and subprocess.run([program, "--version"], capture_output=True).returncode == 0:
            return Path(program)
    pytest.skip(f"There is no python{version} here.")


RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHERS = sorted({"3.11", "3.12", "3.13"} - {RUNNING})
READING = (
    ("report", "--worst", "3", "--plots", "png", "--output", "report"),
    ("clipstats", "-a", "dppo-binary-tv", "--no-plots", "--output", "clipped"),
    ("import", "--quiet"),
    ("diagnose", "import-dumps", "--no-plots", "--output", "diagnosed"),
    ("gate", str(bundled("traces") / "float32"), "--limits", "verl"),
)


@pytest.mark.parametrize("version", OTHERS)
def test_the_core_reads_on_other_pythons(wheel, tmp_path, version):
    uv("venv", "--quiet", "--python", interpreter(version), tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    uv("pip", "install", "--quiet", "--python", python, "--constraint", pinned(tmp_path), wheel)
    lines = (
        "import sys, warnings; warnings.simplefilter('error', SyntaxWarning)\n"
        "from mismatch_cli.app.cli import run\n"
        "print([run(line.split('|')) for line in sys.argv[1:]], '%d.%d' % sys.version_info[:2])"
    )
    line = [
        python,
        "-W",
        "error::DeprecationWarning:mismatch_cli",
        "-c",
        lines,
        *map("|".join, READING),
    ]
    done = subprocess.run(
        line, cwd=tmp_path, env=without_python_path(), capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == [f"{[0] * len(READING)} {version}"], done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert any((tmp_path / "report" / "plots").iterdir())


def test_uv_installs_it_as_a_tool(wheel, tmp_path):
    """As README.md says, and in folders of its own."""
    here = {"UV_TOOL_DIR": tmp_path / "tools", "UV_TOOL_BIN_DIR": tmp_path / "bin"}
    said = uv(
        "tool",
        "install",
        "--python",
        sys.executable,
        "--constraints",
        pinned(tmp_path),
        wheel,
        **here,
    )
    assert "Installed 1 executable: mismatch-cli" in said
    program = tmp_path / "bin" / "mismatch-cli"
    for words in (("--version",), ("report", "--no-plots")):
        done = subprocess.run(
            [program, *words],
            cwd=tmp_path,
            env=without_python_path(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 and (__version__ in done.stdout or "SmolLM2" in done.stdout), (
            done.stderr
        )
