"""The inventory of constants is complete, and its values are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.paths import DOCS, PACKAGE

PAGE = DOCS / "constants.md"
FOLDERS = ("diagnosis", "limits", "watch")
_OF_METRICS = ("logit_steps", "own_scale", "lattice", "estimate", "sampled_with")
FILES = (
    *(f"studies/{name}.py" for name in ("gate", "good_runs", "dashboard", "comparison")),
    "trace/foreign_values.py",
    *(f"metrics/{name}.py" for name in _OF_METRICS),
)
SHOWS = {"commands", "live_view.py"}  # of a program: what is typed and printed
FIND = {"diagnosis/by_step.py"}  # what the checks of steps share
# In a comparison: none, one, and two of something; a probability or share of one half
PLAIN = {0, 1, 2, 0.5}


def modules() -> list[Path]:
    package = PACKAGE
    in_folders = [path for folder in FOLDERS for path in sorted((package / folder).rglob("*.py"))]
    deciding = [path for path in in_folders if not SHOWS & {*path.parts, path.name}]
    return deciding + [package / name for name in FILES]


def constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The names that a module gives to numbers, and their values as written."""
    for statement in tree.body:
        if not isinstance(statement, ast.Assign):
            continue
        (target,) = statement.targets
        pairs = [(target, statement.value)]
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            pairs = list(zip(target.elts, statement.value.elts, strict=True))
        for name, value in pairs:
            if isinstance(name, ast.Name) and name.id != "STAGE" and is_number(value):
                yield name.id, ast.unparse(value)


def is_number(value: ast.expr) -> bool:
    """Made of numbers alone: `0.5`, `2**20`, `(8, 64)`."""
    parts = list(ast.walk(value))
    numbers = [part for part in parts if isinstance(part, ast.Constant)]
    named = (ast.Name, ast.Attribute, ast.Call)
    return (
        bool(numbers)
        and all(type(number.value) in (int, float) for number in numbers)
        and not any(isinstance(part, named) for part in parts)
    )


# On the page: the lines of a file, what a line decides, its items, and in these names with values
_LINE = re.compile(r"\* (?:(?P<decides>[^:`]+|`reading-tokens`): )?(?P<items>`.*|[^:]+ `.*)")
_PAIR = re.compile(r"`(_?[A-Z][A-Z0-9_]*)` `([^`]+)`")
_NOTE = re.compile(r" \[(?P<note>[^\]]+)\]$")
NOTHING = "–"
ABSOLUTE = re.compile(r"\b(?:nats|logits?|relative|seconds)\b")


class Constant(NamedTuple):
    """A constant as the page has it; `unit` and `decides` are empty where it decides nothing."""

    name: str
    value: str
    unit: str
    decides: str
    note: str


def inventory() -> dict[str, list[Constant]]:
    """The constants of each file that has a heading."""
    listed: dict[str, list[Constant]] = {}
    for text in PAGE.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"### `(.+)`", text):
            listed[heading[1]] = []
        elif text.startswith("* "):
            line = _LINE.fullmatch(text)
            assert line, text
            decides = line["decides"] or "found"
            for item in line["items"].split(" · "):
                listed[list(listed)[-1]] += constants_of(item, decides)
    return listed


def constants_of(item: str, decides: str) -> Iterator[Constant]:
    """One or several constants that share a unit, which follows the last of them."""
    note = _NOTE.search(item)
    body = _NOTE.sub("", item)
    pairs = list(_PAIR.finditer(body))
    assert pairs, item
    unit = body[pairs[-1].end() :].strip()
    if decides == NOTHING:
        assert not unit and not note, item
    else:
        assert re.search(r"[\w×]", unit) and "`" not in unit, f"no unit: {item}"
    for pair in pairs:
        yield Constant(*pair.groups(), unit, decides, note["note"] if note else "")


def test_every_constant_that_decides_is_in_the_inventory_with_its_value():
    listed = {
        file: sorted((each.name, each.value) for each in rows) for file, rows in inventory().items()
    }
    written = {}
    for path in modules():
        name = path.relative_to(PACKAGE).as_posix()
        if numbers := sorted(constants(ast.parse(path.read_text(encoding="utf-8")))):
            written[name] = numbers
    assert listed == written


def test_without_words_for_what_it_decides_a_constant_is_of_a_check():
    for file, constants in inventory().items():
        assert (
            file.startswith("diagnosis/checks/")
            or file in FIND
            or not any(each.decides == "found" for each in constants)
        ), file


def test_what_is_not_free_of_scale_says_why_it_is_harmless():
    for file, constants in inventory().items():
        for each in constants:
            harmless = re.match(r"! \w", each.note)
            assert not ABSOLUTE.search(each.unit) or harmless, f"{file}: {each.name}"


def test_no_comparison_hides_a_number():
    hidden = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                numbers = [
                    part.value
                    for side in (node.left, *node.comparators)
                    for part in ast.walk(side)
                    if isinstance(part, ast.Constant) and type(part.value) in (int, float)
                ]
                if set(numbers) - PLAIN:
                    hidden.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not hidden
