"""Each room has a README of a page or two, and what it names exists.

python -m tests.test_rooms     # lists what is wrong
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests import house
from tests.paths import PACKAGE, ROOT

ROOMS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
MOST_LINES, MOST_COLUMNS = 80, 100
_QUOTED = re.compile(r"`([^`]+)`")
_PATH = re.compile(r"[a-z_][a-z0-9_/]*(\.py|/)")
_TYPE = re.compile(r"[A-Z]\w*[a-z]\w*(\.\w+)?")  # or a method of it


@cache
def names() -> frozenset[str]:
    """Every name in the code of the package: classes, functions, fields, what libraries have."""
    nodes = [node for file in house.files() for node in file.nodes]
    defined = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    return frozenset(defined | used | {n.attr for n in nodes if isinstance(n, ast.Attribute)})


def faults(room: Path) -> Iterator[str]:
    """What is wrong with the README of a room, one sentence each.

    Folders are looked up only in its section of files: elsewhere they may be those of a run.
    """
    readme = room / "README.md"
    if not readme.is_file():
        yield "is missing"
        return
    text = readme.read_text(encoding="utf-8")
    lines = text.splitlines()
    if len(lines) > MOST_LINES:
        yield f"has {len(lines)} lines, more than {MOST_LINES}"
    yield from (f"has a wide line: {line}" for line in lines if len(line) > MOST_COLUMNS)
    before, _, after = text.partition("\n## Files\n")
    of_files, *rest = after.split("\n## ")
    elsewhere = _QUOTED.findall("\n".join([before, *rest]))
    words = {*_QUOTED.findall(of_files), *(word for word in elsewhere if not word.endswith("/"))}
    for word in sorted(words):
        if _PATH.fullmatch(word) and not exists(word, room):
            yield f"names {word}, which does not exist"
        if _TYPE.fullmatch(word) and not names().issuperset(word.split(".")):
            yield f"names {word}, which is not in the code"


def exists(path: str, room: Path) -> bool:
    """Whether it is anywhere in the room, or at this place in the package or the repository."""
    inside = any(room.rglob(path.rstrip("/")))
    return inside or (PACKAGE / path).exists() or (ROOT / path).exists()


def all_faults() -> list[str]:
    return [f"{room.name}/README.md {fault}" for room in ROOMS for fault in faults(room)]


def test_each_room_has_a_readme_that_is_true():
    wrong = all_faults()
    assert not wrong, "\n" + "\n".join(wrong)


def test_what_does_not_exist_is_named(tmp_path):
    assert list(faults(tmp_path)) == ["is missing"]
    text = "`Trace.open` = `gone.py`, `Nobody`, `Trace.gone_by_now`, `traces/`\n\n## Files\n\n`gone/`\n"
    wide, long = "x" * (MOST_COLUMNS + 1), "\n" * MOST_LINES
    (tmp_path / "README.md").write_text(f"{text}{wide}{long}", encoding="utf-8")
    assert list(faults(tmp_path)) == [
        f"has {MOST_LINES + 5} lines, more than {MOST_LINES}",
        f"has a wide line: {wide}",
        "names Nobody, which is not in the code",
        "names Trace.gone_by_now, which is not in the code",
        "names gone.py, which does not exist",
        "names gone/, which does not exist",
    ]


if __name__ == "__main__":
    print("\n".join(all_faults()))
