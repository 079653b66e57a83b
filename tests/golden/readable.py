"""Output in a form whose changes can be read: masked text, JSON a key a line, pages and figures as
outlines of their words.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.report.payload import unpacked

DIGITS = 6
# Of a list whose every number has a line
_MOST_ITEMS, _MOST_CHARACTERS = 12, 20_000
_MOST_LINES = 100  # for a list of objects
_NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")
_VOID = {"br", "img", "hr", "meta", "link", "input", "source", "col", "wbr"}
_UNSEEN = ("style", "script")


def masked(text: str, folder: Path) -> str:
    """Without what differs between two runs of the same code: folders, dates, seconds, versions."""
    from mismatch_cli import __version__

    text = text.replace(str(folder.resolve()), "FOLDER").replace(str(folder), "FOLDER")
    text = text.replace(f"mismatch-cli {__version__}", "mismatch-cli VERSION")
    text = text.replace(f'"{__version__}"', '"VERSION"')
    text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?", "TIME", text)
    return re.sub(r"\b\d+(\.\d+)? (s|min|h)\b(?= ago| left)", "TIME", text)


def as_text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def flat(value: Any, path: str = "") -> Iterator[str]:
    """A JSON value as lines `path = value`, its numbers to six digits."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and is_long(value):
        yield from long_list(value, path)
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for place, inner in enumerate(value):
            yield from flat(inner, f"{path}[{place}]")
    else:
        yield f"{path} = {json.dumps(rounded(value), ensure_ascii=False)}"


def is_long(values: list[Any]) -> bool:
    return len(values) > _MOST_ITEMS or len(json.dumps(values)) > _MOST_CHARACTERS


def long_list(values: list[Any], path: str) -> Iterator[str]:
    """A line for each object of a long list: its own numbers and words, and a digest of the rest.

    A list of anything else, or of very many objects, is one line.
    """
    if len(values) > _MOST_LINES or not all(isinstance(value, dict) for value in values):
        yield f"{path} = {len(values)} values, {digest(values)}"
        return
    for place, value in enumerate(values):
        own, rest = {}, {}
        for key, inner in value.items():
            if isinstance(inner, dict | list):
                rest[key] = inner
            else:
                own[key] = rounded(inner)
        line = f"{path}[{place}] = {json.dumps(own, ensure_ascii=False)}"
        yield f"{line} and {digest(rest)}" if rest else line


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return list(map(rounded, value)) if isinstance(value, list) else value


def digest(value: Any) -> str:
    """A short hash of a value, whose numbers count to six digits."""
    return hashlib.sha256(json.dumps(rounded(value)).encode()).hexdigest()[:12]


def json_lines(text: str) -> Iterator[str]:
    """A JSON document, or one per line, as paths and values."""
    try:
        yield from flat(json.loads(text))
    except json.JSONDecodeError:
        for number, line in enumerate(text.splitlines()):
            yield from flat(json.loads(line), f"line {number}")


class _Outline(HTMLParser):
    """The words of a page, each line with the element that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self._open.append(tag)
        named = dict(attrs)
        if named.get("id"):
            self.lines.append(f"{tag} #{named['id']}")
        if tag == "img":
            self.lines.append(f"img: {named.get('alt', '')}")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        words = " ".join(data.split())
        if not words:
            return
        if inside in _UNSEEN:
            self.lines.append(f"{inside}: {len(data):,} characters, {_data_digest(data)}")
        else:
            self.lines.append(f"{inside}: {words}")


def _data_digest(data: str) -> str:
    """Of packed data what is inside counts, not how it was compressed."""
    with suppress(ValueError, OSError):
        data = unpacked(data).hex()
    return hashlib.sha256(data.encode()).hexdigest()[:12]


def page_lines(html: str) -> list[str]:
    outline = _Outline()
    outline.feed(html)
    return outline.lines


def figure_lines(svg: str) -> Iterator[str]:
    """The words of a figure, its elements counted, and a digest of where they are, to a pixel."""
    for text in re.findall(r"<text[^>]*>(.*?)</text>", svg, re.S):
        yield f"text: {text}"
    counts = Counter(re.findall(r"<([a-z]+)", svg))
    yield "elements: " + ", ".join(f"{tag} {count}" for tag, count in sorted(counts.items()))
    places = [f"{float(number):.0f}" for number in _NUMBER.findall(svg)]
    yield f"places: {len(places):,}, {hashlib.sha256(' '.join(places).encode()).hexdigest()[:12]}"
