"""The arrows of the house: who may import whom, how light the start is, and how long things may grow."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mismatch_cli"
FILES = sorted(PACKAGE.rglob("*.py"))

# Each floor may import the floors below it, and its own room.
FLOORS = [
    {"__main__"},
    {"cli"},
    {"commands"},
    {"report"},
    {"studies", "rl", "importers", "recording"},
    {"diagnosis", "dialects"},
    {"verdict"},
    {"engines", "scoring", "tasks", "metrics"},
    {"trace"},
    {"algorithms"},
    {"trust_regions"},
    {"policies"},
    {"divergences"},
    {"models", "adapters"},
    {"sampling", "batch", "text", "numbers", "registry", "torch_settings", "compat", "bundled", "memory", "attention"},
    {"custom_code", "suggest", "places"},
    {"errors", "papers", ""},
    {"subprocess_site"},
]
HEAVY = ("torch", "transformers", "vllm", "pandas", "matplotlib", "pyarrow", "numpy", "datasets", "math_verify")


def floor_of(room: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if room in rooms)


def room_of(module: str) -> str:
    """`mismatch_cli.trace.reader` → `trace`; the package itself → ``."""
    return [*module.split("."), ""][1]


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "mismatch_cli"}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "mismatch_cli" and name != "mismatch_cli"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py").replace("__init__", "")
    for module in imports_of(path):
        target = room_of(module)
        if target == "__version__" or target == room:
            continue
        assert floor_of(room) < floor_of(target), f"{path.name} in {room or 'the package'} imports {module}"


def test_help_imports_nothing_heavy():
    script = (
        "import sys; from mismatch_cli.cli import run; run(['--help']); run(['probe', '--help']); "
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "[]"
    assert "probe" in result.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_short(path):
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name != "command":  # a command's signature is its list of flags
            assert node.end_lineno - node.lineno < 60, f"{path.name}: {node.name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_module_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_start_up_is_close_to_a_bare_typer_program(tmp_path):
    """CPU time of `--help`, the best of interleaved runs: at most 1.3 times a Typer program with two commands."""
    bare = tmp_path / "bare.py"
    bare.write_text(
        "import typer\napp = typer.Typer()\n"
        "@app.command()\ndef one(name: str = 'x'):\n    'One.'\n"
        "@app.command()\ndef two(name: str = 'x'):\n    'Two.'\n"
        "app()\n"
    )

    def seconds(command: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command, "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    ours = theirs = float("inf")
    for run in range(24):  # on a busy machine few runs are undisturbed
        ours, theirs = min(ours, seconds(["-m", "mismatch_cli"])), min(theirs, seconds([str(bare)]))
        if run >= 7 and ours <= 1.3 * theirs:
            break
    assert ours <= 1.3 * theirs


_CALLED_BY_OTHERS = {"display", "on_broken_pipe"}  # vLLM's progress bar, rich's Console


def test_nothing_is_defined_that_the_package_does_not_name_again():
    """A function, method, class or constant whose name stands once is used by nobody; tests do not count."""
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*") if path.suffix in (".py", ".html")}
    stands = Counter(word for text in texts.values() for word in re.findall(r"\w+", text))
    defined = set()
    for path in FILES:
        tree = ast.parse(texts[path])
        defined |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assigned = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        defined |= {target.id for target in assigned if isinstance(target, ast.Name)}
    once = {name for name in defined if stands[name] == 1 and not name.startswith("__")}
    assert once <= _CALLED_BY_OTHERS
