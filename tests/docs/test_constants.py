"""The inventory of constants is complete, and its values are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.paths import DOCS, PACKAGE

PAGE = DOCS / "constants.md"
FOLDERS = ("diagnosis", "limits", "watch")
FILES = (
    *(f"studies/{name}.py" for name in ("gate", "good_runs", "dashboard", "comparison")),
    "trace/foreign_values.py",
    *(f"metrics/{name}.py" for name in ("logit_steps", "own_scale", "lattice", "estimate")),
)
SHOWS = {"commands", "live_view.py"}  # of a program: what is typed and printed
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


def test_every_constant_that_decides_is_in_the_inventory_with_its_value():
    listed: dict[str, list[tuple[str, str]]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"### `(.+)`", line):
            listed[heading[1]] = []
        elif row := re.match(r"\| `(\w+)` \| `(.+?)` \| [^|]+ \| [^|]+ \| (yes|no)", line):
            listed[list(listed)[-1]].append((row[1], row[2]))
    written = {}
    for path in modules():
        name = path.relative_to(PACKAGE).as_posix()
        if found := list(constants(ast.parse(path.read_text(encoding="utf-8")))):
            written[name] = found
    assert listed == written


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
