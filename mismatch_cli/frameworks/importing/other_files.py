"""Files that hold no dump, by their first bytes: pointers, empty, packed or binary files; and which
are one JSON document instead of an object per line.
"""

import json
import re
from codecs import BOM_UTF8
from pathlib import Path
from typing import NamedTuple

from mismatch_cli.base.errors import quoted, suggest
from mismatch_cli.base.text import parse_json
from mismatch_cli.frameworks.importing import SEALED

_BEGINNING = 2**12  # bytes that show what a file is
_SAMPLE = 2**20  # bytes that show whether it is one JSON document
_BEGUN = re.compile("-?[a-z]*")  # the rest of a text that ends inside a JSON value
_POINTER = b"version https://git-lfs.github.com/spec/"
_PACKED = {b"\x1f\x8b": "gunzip -k", b"\x28\xb5\x2f\xfd": "unzstd", b"\xfd7zXZ": "unxz -k"}
_NO_LINES = {
    b"PK\x03\x04": "a zip archive. Unpack it, or rename it to *.pt if torch.save wrote it",
    b"PAR1": "a Parquet file. Rename it to *.parquet",
    b"\xff\xfe": "UTF-16 text. Save it as UTF-8",
    b"\xfe\xff": "UTF-16 text. Save it as UTF-8",
}
_KINDS = {"[": "array", "{": "object"}
_READ = 'import json, sys; whole = json.load(open(sys.argv[1], "rb")); '
_ITS_ROWS = "[print(json.dumps(row)) for row in whole]"
_AS_ONE_LINE = "print(json.dumps(whole))"


class OtherFile(NamedTuple):
    """What a file is instead of a dump: in the plural, and as the end of a sentence that begins
    with its path.
    """

    kind: str
    why: str


def pointer(path: Path) -> OtherFile | None:
    """A Git LFS pointer, which stands for a file that was not downloaded; None for others."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) != _POINTER:
            return None
    why = "is a Git LFS pointer, not the file. Get it with `git lfs pull` in its repository."
    return OtherFile("Git LFS pointers", why)


def other_file(path: Path, *, of_lines: bool) -> OtherFile | None:
    """What the file is if its beginning shows that no importer reads it, else None; `of_lines` is
    true if it is to hold JSON lines.
    """
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING)
    if not beginning.strip() and len(beginning) < _BEGINNING:
        return OtherFile("empty files", "is empty. Copy it again, or wait until it is written.")
    if beginning.startswith(_POINTER):
        return pointer(path)
    if of_lines:
        return _no_lines(path, beginning)
    return None


def _no_lines(path: Path, beginning: bytes) -> OtherFile | None:
    """What a file is instead of JSON lines, if its beginning shows that; else None."""
    for magic, program in _PACKED.items():
        if beginning.startswith(magic) and path.suffix != SEALED:
            unpack = f"{program} {quoted(path)}"
            return OtherFile("packed files", f"is packed. Unpack it first: {unpack}")
    for magic, kind in _NO_LINES.items():
        if beginning.startswith(magic):
            return OtherFile("files of another kind", f"is {kind}.")
    return None


def document(path: Path) -> str:
    """ "array" or "object" for a file that is one list of rows, or one object over several lines;
    empty for lines, of which the first may be broken.
    """
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING).removeprefix(BOM_UTF8).lstrip()
        if beginning[:1] not in (b"[", b"{"):
            return ""
        # Most files end here: only of the others a longer sample is parsed.
        first, line_break, _ = beginning.partition(b"\n")
        if line_break and first.startswith(b"{") and _is_object(first):
            return ""
        file.seek(0)
        sample = file.read(_SAMPLE).removeprefix(BOM_UTF8)
    text = sample.lstrip().decode("utf-8", errors="replace").rstrip()
    if not _is_one_value(text):
        return ""
    return _KINDS[text[0]]


def _is_one_value(text: str) -> bool:
    """Whether the beginning of a file is one JSON value, or its beginning; an object on one line
    is a line.
    """
    if not text.startswith("[") and "\n" not in text:
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except RecursionError:
        return False
    except json.JSONDecodeError as error:
        # A sample that ends inside of a value is the beginning of a long one.
        is_cut = error.msg.startswith("Unterminated") or _BEGUN.fullmatch(text, error.pos)
        return bool(is_cut)
    return not text[end:].strip()


def into_lines(path: Path, kind: str) -> str:
    """What to type to make it lines; the file's content is in none of it."""
    code = _READ + (_ITS_ROWS if kind == "array" else _AS_ONE_LINE)
    lines = path.with_suffix(".lines.jsonl").name
    command = quoted("python3", "-c", code, path)
    return f"Make it lines: {command} > {quoted(lines)} && {suggest('import', Path(lines))}"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False
