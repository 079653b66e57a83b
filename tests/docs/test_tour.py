"""The map of the code is true: the tour's files and names exist, and both pages stay short."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests import house
from tests.paths import DOCS, PACKAGE, ROOT

TOUR = (DOCS / "tour.md").read_text(encoding="utf-8")
MOST_TOKENS, MOST_BYTES = 22_000, 6_000
MOST_STEPS = 4  # of the path that answers a question
_STOP = re.compile(r"^\d+\. \[`([^`]+)`\]", re.M)
_STEP = re.compile(r"^\d+\. `([^`]+)`", re.M)
_IN_BACKTICKS = re.compile(r"`([^`\n]+)`")
_NAME = re.compile(r"\w+(\.\w+)?")


@cache
def defined_in(path: Path) -> set[str]:
    """What a file defines: `function`, `CONSTANT`, `Class` and `Class.member`."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    names = set(names_of(module.body))
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for name in names_of(node.body)}
    return names


def names_of(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (ast.unparse(target) for target in targets)


def named(page: str) -> Iterator[tuple[str, str]]:
    """Every name in backticks, with the file that is named before it."""
    file = ""
    for word in _IN_BACKTICKS.findall(page):
        if word.endswith(".py"):
            file = word
        elif not word.startswith("--") and not word.endswith("/"):  # a flag, a folder
            yield file, word


def test_the_tour_is_read_in_a_morning():
    stops = _STOP.findall(TOUR)
    assert len(stops) == len(set(stops)) == 14
    assert sum(len(house.File(PACKAGE / stop).token_lines) for stop in stops) <= MOST_TOKENS


def test_every_question_has_a_short_path():
    _, *questions = TOUR.split("\n## ")[1:]
    assert len(questions) == 6
    for question in questions:
        assert 0 < len(set(_STEP.findall(question))) <= MOST_STEPS, question.partition("\n")[0]


def test_files_and_names_of_the_tour_exist():
    lacking = [
        f"{file} does not define {name}"
        for file, name in named(TOUR)
        if not _NAME.fullmatch(name) or name not in defined_in(PACKAGE / file)
    ]
    assert lacking == []
    assert len(list(named(TOUR))) > 50


def test_names_that_do_not_exist_are_found():
    page = "1. `rules/policies.py`: `Policies.compare`, `Policies.contrast`, `numpy`"
    defined = defined_in(PACKAGE / "rules/policies.py")
    assert [name for _, name in named(page) if name not in defined] == [
        "Policies.contrast",
        "numpy",
    ]


def test_contributing_is_short():
    assert len((ROOT / "CONTRIBUTING.md").read_bytes()) <= MOST_BYTES
