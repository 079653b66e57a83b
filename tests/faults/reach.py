"""Which tests run which line: recorded once, as a plugin of pytest beside coverage.py.

A line that a fixture runs is reached by every test of the file, since a fixture of a file does its
work in the first test that asks for it, and another may look at the result. Processes that a test
starts are not followed.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from coverage import Coverage

from tests.faults.operators import PACKAGE, ROOMS, Fault

# Where a worker leaves what it has seen; set by the program that records.
FOLDER = "MISMATCH_CLI_REACH"
# Of tests for one fault: the import of a file costs more than most of its tests.
_MOST_FILES = 20
_GOLDENS, _OF_GOLDENS = "tests/golden/test_goldens.py", 1 / 3  # of the seconds


class Recorder:
    """Switches coverage.py's context at every phase of every test, and notes their seconds."""

    def __init__(self, folder: Path) -> None:
        self._base = folder / os.environ.get("PYTEST_XDIST_WORKER", "main")
        rooms = [f"{PACKAGE / room}/*" for room in ROOMS]
        self._coverage = Coverage(data_file=f"{self._base}.db", include=rooms, config_file=False)
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(f"{item.nodeid}|setup")
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(f"{item.nodeid}|call")
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        passed = {t: s for t, s in self._seconds.items() if t not in self._failed}
        Path(f"{self._base}.json").write_text(json.dumps(passed), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Only processes that run tests record, not the one that distributes them."""
    distributes = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if FOLDER in os.environ and not distributes:
        config.pluginmanager.register(Recorder(Path(os.environ[FOLDER])))


@dataclass
class Reach:
    """`seconds` of every test that passed; `tests[path][line]`: those that run the line."""

    seconds: dict[str, float]
    tests: dict[str, dict[int, set[str]]]

    @classmethod
    def gathered(cls, folder: Path) -> Reach:
        """What all workers have recorded; of a file that was recorded again, the latest."""
        parts, latest = {}, {}
        for path in sorted(folder.glob("*.json")):
            parts[path] = json.loads(path.read_text("utf-8"))
            latest |= dict.fromkeys(map(_file, parts[path]), path)
        reach = cls({}, defaultdict(lambda: defaultdict(set)))
        for path, passed in parts.items():
            own = {test: s for test, s in passed.items() if latest[_file(test)] == path}
            reach.seconds |= own
            reach._read(path.with_suffix(".db"), own)
        return reach

    def _read(self, path: Path, own: Iterable[str]) -> None:
        """Add the lines that one worker has seen its own tests run."""
        in_file: dict[str, list[str]] = defaultdict(list)
        for test in own:
            in_file[_file(test)].append(test)
        data = Coverage(data_file=str(path), config_file=False).get_data()
        data.read()
        for source in data.measured_files():
            # A copy of the checkout has its own folder, with the package inside.
            lines = self.tests[source.split("/mismatch_cli/", 1)[1]]
            for line, contexts in data.contexts_by_lineno(source).items():
                for context in contexts:
                    test, _, phase = context.rpartition("|")
                    # Another test may look at what a fixture has made
                    reached = in_file[_file(test)] if phase == "setup" else [test]
                    lines[line].update(set(own).intersection(reached))

    def of(self, fault: Fault, at_most: float) -> list[str]:
        """The tests that can notice a fault, at most so many seconds of them: those of the
        module's own test file first, then the goldens, which see every number that is printed,
        then its room, then others, the quick ones first.

        A line that only the import runs (a constant) is reached by whatever runs the module: the
        test that imports it first is only one of them.
        """
        files: dict[str, list[str]] = defaultdict(list)
        left, left_for_goldens = at_most, _OF_GOLDENS * at_most

        def cost(tests: list[str]) -> tuple[int, float]:
            return _rooms_apart(_file(tests[0]), fault.path), sum(map(self.seconds.get, tests))

        for test in sorted(sorted(self._running(fault)), key=lambda test: cost([test])):
            file, seconds = _file(test), self.seconds[test]
            is_new = file not in files
            if file == _GOLDENS and seconds > left_for_goldens:
                continue
            if seconds <= left and not (is_new and len(files) == _MOST_FILES):
                left -= seconds
                left_for_goldens -= seconds if file == _GOLDENS else 0.0
                files[file].append(test)
        # The tests of one file after another, so that they share its fixtures.
        return list(itertools.chain.from_iterable(sorted(files.values(), key=cost)))

    def _running(self, fault: Fault) -> set[str]:
        """The tests that run its line, or any line of its module where that line runs only once;
        those of its room where these are none or the module has nothing but constants.
        """
        lines = self.tests.get(fault.path, {})
        own: Iterable[int] = range(fault.line, fault.last_line + 1)
        if _runs_once(fault):
            own = lines
        running = set().union(*(lines.get(line, ()) for line in own))
        if running and _functions(fault.path):
            return running
        room = f"tests/{Path(fault.path).parts[0]}/"
        return running | {test for test in self.seconds if test.startswith(room)}


def _runs_once(fault: Fault) -> bool:
    """Whether only the import runs it, or a function that keeps its result."""
    around = [
        function
        for function in _functions(fault.path)
        if function.lineno <= fault.line <= (function.end_lineno or 0)
    ]
    decorators = [decorator for function in around for decorator in function.decorator_list]
    return not around or any("cache" in ast.unparse(decorator) for decorator in decorators)


@cache
def _functions(path: str) -> list[ast.FunctionDef]:
    tree = ast.parse((PACKAGE / path).read_bytes())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def _rooms_apart(file: str, module: str) -> int:
    """0 for a module's own file of tests, by its name or that of its folder (`test_trl` of
    `trl/importer.py`), 1 for the goldens, 2 for a file in its room, 3 for others.
    """
    path, tested = Path(file).relative_to("tests"), Path(module)
    if file == _GOLDENS:
        return 1
    if path.parts[0] != tested.parts[0]:
        return 3
    return 0 if path.stem in (f"test_{tested.stem}", f"test_{tested.parent.name}") else 2


def _file(test: str) -> str:
    return test.split("::", 1)[0]
