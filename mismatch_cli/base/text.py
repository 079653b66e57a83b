"""Text is data: this reads JSON and TOML, and makes token text harmless for the terminal, for HTML
and for plots.

A model can emit any character: escape sequences that clear the screen, overrides that reverse a
line, markup, or nothing visible. Invisible characters become visible: `⏎` for a line break, `⇥` for
a tab, else `\\x1b` or `\\u202e`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MARKS = {"\n": "⏎", "\t": "⇥"}
# Levels of JSON or TOML; ours have 6, and functions that walk down a value stop at 1,000
_DEEPEST = 100
_TOO_DEEP = f"it is nested over {_DEEPEST} levels deep"
# Control, format, surrogate, private, unassigned, separators
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def is_encodable(text: str) -> bool:
    """Whether a text has no lone surrogates, which stand for bytes that are not UTF-8: libraries
    reject them.
    """
    return not _LONE_SURROGATE.search(text)


def parse_json(text: str | bytes) -> Any:
    """The value of JSON from anywhere; a ValueError if it is none, or is nested too deeply to be
    walked through.
    """
    try:
        return _shallow(json.loads(text))
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


def parse_toml(text: str) -> dict[str, Any]:
    """The content of TOML from anywhere; a ValueError, which names the line, if it is none or is
    nested too deeply.
    """
    import tomllib

    try:
        return dict(_shallow(tomllib.loads(text)))
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    except tomllib.TOMLDecodeError as error:
        last = f"at line {len(text.splitlines())}, the end of the document"
        raise ValueError(str(error).replace("at end of document", last)) from error


def _shallow(value: Any) -> Any:
    """The value, unless it is nested too deeply: then a ValueError."""
    level = [value]
    # Level by level: a function that calls itself would fail on what is to be refused.
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
            elif isinstance(item, list):
                below += item
        if not below:
            return value
        level = below
    raise ValueError(_TOO_DEEP)


def visible(text: str) -> str:
    """The text with every character spelled out that has no glyph or moves its neighbours."""
    # A model may emit terminal escapes, and a trace may be a stranger's: token text is hostile.
    # Shown without passing here, it could clear the screen, or reverse the line that it is in.
    if text.isprintable():
        return text
    return "".join(map(_visible_character, text))


def for_terminal(text: str) -> Text:
    """Visible text as a rich `Text`, in which neither tags nor `:emoji:` codes are interpreted.

    Not a markup string: a backslash before a tag cannot be escaped without knowing what follows,
    and LaTeX is full of backslashes. Put it into a table cell, print it, or join it to other pieces
    with `Text.assemble`.
    """
    from rich.text import Text

    return Text(visible(text))


def for_html(text: str) -> str:
    """Visible text that keeps its lines, for an element with `white-space: pre-wrap` in a template
    that escapes markup.

    It encodes as UTF-8 (no lone surrogates). Right-to-left scripts keep their letters: put each
    piece into a `<bdi>`.
    """
    return visible(text).replace("⏎", "⏎\n")


def for_mathtext(text: str) -> str:
    """Visible text for a matplotlib figure: `$` is literal, and characters that its font lacks
    are spelled out.
    """
    drawable = "".join(map(_drawable_character, visible(text)))
    return drawable.replace("$", r"\$")


# Our own signs, as wide where that is possible, so that columns stay columns
_IN_ASCII = {
    **dict(zip("▁▂▃▄▅▆▇█", "12345678", strict=True)),
    **dict(zip("–—−·×…“”’▸°†", '---.x~""\'>o+', strict=True)),
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
    "≈": "~",
    "±": "+-",
    "→": "->",
    "←": "<-",
    "∞": "inf",
    "✔": "ok",
    "✘": "x",
    "π": "pi",
    "μ": "mu",
    "ε": "eps",
    "δ": "delta",
    "ρ": "rho",
    "Δ": "D",
    "Σ": "sum",
    "χ": "chi",
    "β": "beta",
    "‖": "||",
    "²": "^2",
    "⏎": "\\n",
    "⇥": "\\t",
}


def with_signs_of(encoding: str | None, text: str) -> str:
    """The text with our own signs (Greek letters, marks, bars) spelled in ASCII where an encoding
    lacks them: `pi`, `<=`, and 1 to 8 for the heights of a sparkline.
    """
    # Text in memory has no encoding, and takes every character
    if not encoding:
        return text
    return text.translate(_signs_lacked_by(encoding))


@cache
def _signs_lacked_by(encoding: str) -> dict[int, str]:
    """Our signs that an encoding lacks, for `str.translate`."""
    return {
        ord(sign): plain
        for sign, plain in _IN_ASCII.items()
        if not sign.encode(encoding, errors="ignore")
    }


def _visible_character(character: str) -> str:
    if character in _MARKS:
        return _MARKS[character]
    if unicodedata.category(character) in _INVISIBLE:
        return _spelled_out(character)
    return character


def _spelled_out(character: str) -> str:
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    if code <= 0xFFFF:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"


def _drawable_character(character: str) -> str:
    return character if ord(character) in _figure_glyphs() else _spelled_out(character)


@cache
def _figure_glyphs() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())
