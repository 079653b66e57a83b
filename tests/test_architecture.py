"""The rules of the architecture: imports, file names, lengths, start-up time."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from graphlib import TopologicalSorter

import pytest
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backend_bases import RendererBase

from mismatch_cli.library.opened_run import Run
from mismatch_cli.library.results import Result
from tests import house
from tests.paths import PACKAGE
from tests.tiers import cpu_seconds_of_children

# The rooms, from the bottom to the top: each may import those above its line in this list.
ROOMS = (
    "base",  # errors, text, numbers, settings: nothing above is known here
    "rules",  # trust regions, weights, algorithms
    "trace",  # the one file format, and run folders
    "metrics",  # accumulators and intervals
    "processes",  # workers, ranks, a child that cannot hang us
    "models",  # engines and scoring
    "probe",  # prompts → trace
    "frameworks",  # what others save, log, and how to record them
    "limits",  # published numbers, and what is usual for a trace
    "diagnosis",  # what is wrong with a trace
    "studies",  # traces → typed results
    "report",  # results → screen, page, figures
    "library",  # mismatch_cli.open
    "app",  # the commands
    "train",  # programs from here on: no room above imports one, and none imports another
    "bisect",
    "watch",
)
PROGRAMS = ROOMS[ROOMS.index("app") + 1 :]
# Files that are known by their names, in folders of any room or in one of a room
FRAMEWORK_FILES = ("importer.py", "recorder.py", "metrics.py", "pickles.py")
SPREAD = ("commands", "pages", "plots", "checks", "engines", "trust_regions", "weights")

HEAVY = (
    "torch",
    "transformers",
    "vllm",
    "pandas",
    "matplotlib",
    "pyarrow",
    "numpy",
    "datasets",
    "math_verify",
)


def room_of(module: str) -> str:
    """`mismatch_cli.trace.reader` → `trace`; the package itself → ``."""
    return [*module.split("."), ""][1]


def is_found_by_its_name(file: house.File) -> bool:
    """Found by a registry: files of these folders, and what is known of a framework."""
    *folders, name = file.name.split("/")
    of_a_framework = file.room == "frameworks" and name in FRAMEWORK_FILES
    return folders[-1] in SPREAD or of_a_framework


def for_types_alone(module: str) -> set[str]:
    (file,) = (file for file in house.files() if file.module == module)
    conditions = (node for node in file.nodes if isinstance(node, ast.If))
    blocks = [node for node in conditions if "TYPE_CHECKING" in ast.dump(node.test)]
    return {
        node.module
        for block in blocks
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom) and node.module
    }


def test_the_ground_floor_is_these_rooms():
    """Beside them: the two files of the package, and what pyproject.toml copies into a wheel."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    files = {path.name for path in PACKAGE.glob("*.py")}
    assert folders == set(ROOMS)
    assert files == {"__init__.py", "__main__.py"}


def test_imports_point_down():
    """The package itself imports lazily what it opens, and `__main__` the command line."""
    order = {room: number for number, room in enumerate(ROOMS)}
    up = [
        f"{module} imports {target}"
        for module, targets in house.imported().items()
        for target in targets
        if (room := room_of(module)) in order
        and room != room_of(target)
        and (order[room] < order[room_of(target)] or {room, room_of(target)} <= set(PROGRAMS))
    ]
    assert up == []


def test_there_are_no_cycles_inside_rooms_either():
    """`prepare` names a cycle that it finds."""
    TopologicalSorter(
        {m: targets - for_types_alone(m) for m, targets in house.imported().items()}
    ).prepare()


# What a figure may import: how figures are drawn, the result of its study, and the format of
# numbers and tokens.
_KNOWN_TO_PLOTS = re.compile(
    r"mismatch_cli\.(base\.(numbers|text)|rules\.algorithms|metrics|(\w+\.)?studies|report\.drawing)\b"
)


def is_a_helper(module: str) -> bool:
    """A file that its folder's others share."""
    return module.rpartition(".")[2].startswith("_")


def test_a_figure_knows_its_study_and_no_other_figure():
    plots = {
        m: targets
        for m, targets in house.imported().items()
        if m.split(".")[2:3] == ["plots"] and len(m.split(".")) > 3
    }
    assert len(plots) > 20
    wrong = [
        f"{module} imports {target}"
        for module, targets in plots.items()
        for target in targets
        if not _KNOWN_TO_PLOTS.match(target) and not is_a_helper(target)
    ]
    assert wrong == []


def test_drawing_loads_no_torch():
    """Numbers are numpy arrays before they are drawn."""
    script = (
        "import sys; from mismatch_cli.base import registry; from mismatch_cli.report import "
        "figures; loaded = [registry.load(figures.PLOTS, name, 'plot') for name in "
        "registry.names(figures.PLOTS)]; print(len(loaded) > 15, [m for m in ('torch', "
        "'transformers', 'vllm', 'pandas') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "True []"


def test_what_is_shown_is_computed_elsewhere():
    """A report reads traces only for excerpts, and no study knows how it is shown."""
    readers = {
        module
        for module, targets in house.imported().items()
        if room_of(module) == "report"
        and {"mismatch_cli.trace.reader", "mismatch_cli.trace.manifest"} & targets
    }
    assert readers == {"mismatch_cli.report.excerpts"}
    printing = ("rich", "typer", "matplotlib", "jinja2")
    printers = re.compile(rf"^ *(from|import) ({'|'.join(printing)})\b", re.M)
    studies = [file for file in house.files() if "studies" in file.name.split("/")[:-1]]
    assert [file.name for file in studies if printers.search(file.text)] == []


def test_a_file_is_known_by_its_name():
    """Outside registries no two files share a name."""
    named = defaultdict(list)
    for file in house.files():
        name = file.name.rpartition("/")[2]
        if name not in ("__init__.py", "__main__.py") and not is_found_by_its_name(file):
            named[name.lstrip("_")].append(file.name)
    assert {name: paths for name, paths in named.items() if len(paths) > 1} == {}


def test_no_number_of_the_house_rises():
    """`python -m tests.house` shows them; after an improvement, `--lower` writes them down."""
    may, are = house.ratchets(), house.measured()
    assert set(may) == set(are)
    risen = {n: v for n, v in are.items() if v > may[n] + (0.02 if n in house.RATES else 0)}
    assert risen == {}, "see `python -m tests.house --list NAME`"
    fallen = {name: are[name] for name in house.COUNTS if are[name] < may[name]}
    assert fallen == {}, "better than before: type `python -m tests.house --lower`"


def test_lab_and_helpers_read_like_the_package():
    """`python -m tests.house` shows their numbers, `--list found-names` the names."""
    above = {}
    for part, numbers in house.beside().items():
        for name, value in numbers.items():
            if value > house.most_beside(name):
                above[part, name] = value
    assert above == {}


def test_every_module_says_what_it_is_for():
    assert [file.name for file in house.files() if not ast.get_docstring(file.nodes[0])] == []


def test_help_imports_nothing_heavy():
    script = (
        "import sys; from mismatch_cli.app.cli import run; run(['--help']); run(['probe', '--help']); "
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stderr.strip() == "[]"
    assert "probe" in result.stdout


# Typed in a folder with a training run; pictures stay blank, since drawing has its own imports.
READING = """
algorithms
verdict
verdict --list
guide gate
gate
watch --json
report --json
report --as all
report trained --json
clipstats --json
compare --json
diagnose --json
watch --json
report FLOAT32 --output exported --export csv
report FLOAT32 --output exported --export parquet
report FLOAT32 --output exported --export jsonl
import --json
import --formats
import --schema
"""
# Where Arrow converts Python values, it asks pandas whether they are its own
_ARROW_LOOKS_FOR_PANDAS = ("--export", "import")
_NOT_FOR_READING = ("torch", "transformers", "datasets", "peft", "math_verify", "vllm", "pandas")


def test_reading_imports_neither_torch_nor_what_samples(tmp_path):
    (tmp_path / "trained").mkdir()
    steps = ('{"step": 1, "reward": 0.5}\n', '{"step": 2, "reward": 0.6}\n')
    (tmp_path / "trained/metrics.jsonl").write_text("".join(steps), encoding="utf-8")
    script = (
        "import sys; from mismatch_cli.app.cli import run; from mismatch_cli.base.places import "
        "bundled; from mismatch_cli.report import figures; from "
        "mismatch_cli.report.drawing.panels import Sheet; "
        "figures.draw = lambda *of: Sheet(of[-1]); float32 = str(bundled('traces') / 'float32')\n"
        f"for line in {READING.split(chr(10))[1:-1]!r}:\n"
        "    code = run([*line.replace('FLOAT32', float32).split(), *['--force'] * ('exported' "
        "in line)])\n"
        f"    loaded = [m for m in {_NOT_FOR_READING!r} if m in sys.modules]\n"
        "    print('@', line, code, loaded, flush=True, file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
    )
    answers = [
        line.removeprefix("@ ") for line in result.stderr.splitlines() if line.startswith("@")
    ]
    for line, answer in zip(READING.split("\n")[1:-1], answers, strict=True):
        names = (
            answer.replace("'pandas'", "")
            if any(words in line for words in _ARROW_LOOKS_FOR_PANDAS)
            else answer
        )
        assert names == f"{line} 0 []", result.stderr


@pytest.mark.slow
def test_start_up_is_close_to_a_bare_typer_program(tmp_path):
    """CPU time of `--help`, best of interleaved runs, is at most 1.3 times that of a Typer app
    of two commands.
    """
    bare = tmp_path / "bare.py"
    bare.write_text(
        "import typer\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def one(name: str = 'x'):\n"
        "    'One.'\n"
        "@app.command()\n"
        "def two(name: str = 'x'):\n"
        "    'Two.'\n"
        "app()\n"
    )

    def seconds(command: list[str]) -> float:
        before = cpu_seconds_of_children()
        subprocess.run([sys.executable, *command, "--help"], check=True, capture_output=True)
        return cpu_seconds_of_children() - before

    ours = theirs = float("inf")
    for run in range(24):  # few runs are undisturbed on a busy machine
        ours, theirs = min(ours, seconds(["-m", "mismatch_cli"])), min(theirs, seconds([str(bare)]))
        if run >= 7 and ours <= 1.3 * theirs:
            break
    assert ours <= 1.3 * theirs


# Used by vLLM's progress bar, rich's Console, matplotlib, and by users who record or open a run.
_CALLED_BY_OTHERS = {
    "add_padded", "on_step_end", "on_train_end", "find_class",
    *(name for kind in (Run,
                        *Result.__subclasses__()) for name in vars(kind) if not name.startswith("_")),
    "display", "on_broken_pipe", "collect_usage_pieces", "list_commands",
    "_get_font_height_metrics",
    *vars(RendererBase), *dir(Axes), *dir(Axis),
}  # fmt: skip


def test_nothing_is_defined_that_the_package_does_not_name_again():
    """A function, method, class or constant whose name occurs once is unused; tests do not
    count.
    """
    texts = [
        *(file.text for file in house.files()),
        *(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.html")),
    ]
    occurrences = Counter(word for text in texts for word in re.findall(r"\w+", text))
    defined = set()
    for file in house.files():
        defined |= {
            node.name for node in file.nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        }
        assigned = [
            target
            for node in file.nodes[0].body
            if isinstance(node, ast.Assign)
            for target in node.targets
        ]
        defined |= {target.id for target in assigned if isinstance(target, ast.Name)}
    once = {name for name in defined if occurrences[name] == 1 and not name.startswith("__")}
    assert once <= _CALLED_BY_OTHERS
