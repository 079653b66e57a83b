"""Files that hold no dump, by their first bytes: pointers, empty, packed or binary files, and JSON
that is not one object per line.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

from mismatch_cli.base.errors import quoted, suggest
from mismatch_cli.base.text import parsed_json, visible

_BEGINNING, _SAMPLE = 2**12, 2**20  # bytes
_SHOWN = 80  # characters of its keys
_BEGUN = re.compile("-?[a-z]*")  # the rest of a text that ends inside a JSON value
_POINTER = b"version https://git-lfs.github.com/spec/"
_PACKED = {b"\x1f\x8b": "gunzip -k", b"\x28\xb5\x2f\xfd": "unzstd", b"\xfd7zXZ": "unxz -k"}
_NO_LINES = {
    b"PK\x03\x04": "a zip archive. Unpack it, or rename it to *.pt if torch.save wrote it",
    b"PAR1": "a Parquet file. Rename it to *.parquet",
    b"\xff\xfe": "UTF-16 text. Save it as UTF-8",
    b"\xfe\xff": "UTF-16 text. Save it as UTF-8",
}
_READ = 'import json, sys; whole = json.load(open(sys.argv[1], "rb")); '
_ITS_ROWS, _AS_ONE_LINE = "[print(json.dumps(row)) for row in whole]", "print(json.dumps(whole))"


class Other(NamedTuple):
    """What a file is instead of a dump: in the plural, and as the end of a sentence that begins
    with its path.
    """

    kind: str
    why: str


def pointer(path: Path) -> Other | None:
    """A Git LFS pointer, which stands for a file that was not downloaded; None for others."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) != _POINTER:
            return None
    why = "is a Git LFS pointer, not the file. Get it with `git lfs pull` in its repository."
    return Other("Git LFS pointers", why)


def other_file(path: Path, *, of_lines: bool) -> Other | None:
    """What the file is if its beginning shows that no importer reads it, else None; `of_lines` is
    true if it is to hold JSON lines.
    """
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING)
    if not beginning.strip() and len(beginning) < _BEGINNING:
        return Other("empty files", "is empty. Copy it again, or wait until it is written.")
    if beginning.startswith(_POINTER):
        return pointer(path)
    if not of_lines:
        return None
    return _no_lines(path, beginning)


def _no_lines(path: Path, beginning: bytes) -> Other | None:
    """The same of a file that is to hold one JSON object per line."""
    name = quoted(path)
    for magic, program in _PACKED.items():
        if beginning.startswith(magic):
            return Other("packed files", f"is packed. Unpack it first: {program} {name}")
    for magic, what in _NO_LINES.items():
        if beginning.startswith(magic):
            return Other("files of another kind", f"is {what}.")
    if beginning.lstrip()[:1] not in (b"[", b"{"):
        return None
    first, line_break, _ = beginning.lstrip().partition(b"\n")
    if line_break and first.startswith(b"{") and _is_object(first):
        return None  # most files
    return _document(path)


def _document(path: Path) -> Other | None:
    """One JSON object over several lines, or a list of all rows; None for anything else, such as
    lines of which the first is broken.
    """
    with path.open("rb") as file:
        text = file.read(_SAMPLE).lstrip().decode("utf-8", errors="replace").rstrip()
    try:
        whole, end = json.JSONDecoder().raw_decode(text)
    except RecursionError:
        return None
    except json.JSONDecodeError as error:
        ends_inside = error.msg.startswith("Unterminated") or _BEGUN.fullmatch(text, error.pos)
        if not ends_inside:
            return None
        whole, end = {}, len(text)
    if text[end:].strip():
        return None
    if text.startswith("["):
        return _array(path)
    if "\n" not in text:
        return None
    return _object(path, whole)


def _array(path: Path) -> Other:
    lines = _into_lines(path, _ITS_ROWS)
    return Other("JSON arrays", f"is one JSON array, and import reads one object per line. {lines}")


def _object(path: Path, content: Mapping[str, object]) -> Other:
    names = shorten(", ".join(map(visible, content)), _SHOWN, placeholder=" …")
    keys = f" (keys: {names})" if names else ""
    why = f"is a single JSON document{keys}, and import reads one object per line. "
    why += "If one of its values lists the responses, write one of these per line. "
    return Other("single JSON documents", why + _into_lines(path, _AS_ONE_LINE))


def _into_lines(path: Path, code: str) -> str:
    """What to type; the file's content is in none of it."""
    lines = path.with_suffix(".lines.jsonl").name
    typed = quoted("python3", "-c", _READ + code, path)
    return f"Make it lines: {typed} > {quoted(lines)} && {suggest('import', Path(lines))}"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parsed_json(line), dict)
    except ValueError:
        return False
