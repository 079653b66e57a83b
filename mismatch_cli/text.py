"""Token text is data: this makes it visible, and harmless for the terminal, for HTML and for text in plots.

A model can emit any character: escape sequences that clear the screen, overrides that reverse a line, markup, or
nothing visible. Invisible characters become visible: `⏎` for a line break, `⇥` for a tab, else `\\x1b` or `\\u202e`.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

_HALVES = re.compile("[\ud800-\udfff]")
_NAMED = {"\n": "⏎", "\t": "⇥"}
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # control, format, surrogate, private, unassigned, separators


def is_whole(text: str) -> bool:
    """Whether a text has no lone surrogates, which stand for bytes that are not UTF-8: libraries reject them."""
    return not _HALVES.search(text)


def visible(text: str) -> str:
    """The text with every character spelled out that has no glyph or moves its neighbours."""
    if text.isprintable():
        return text
    return "".join(map(_visible_character, text))


def for_terminal(text: str) -> Text:
    """Visible text as a rich `Text`, in which neither tags nor `:emoji:` codes are interpreted.

    Not a markup string: a backslash before a tag cannot be escaped without knowing what follows, and LaTeX is full of
    backslashes. Put it into a table cell, print it, or join it to other pieces with `Text.assemble`.
    """
    from rich.text import Text

    return Text(visible(text))


def for_html(text: str) -> str:
    """Visible text that keeps its lines, for an element with `white-space: pre-wrap` in a template that escapes markup.

    It encodes as UTF-8 (no lone surrogates). Right-to-left scripts keep their letters: put each piece into a `<bdi>`.
    """
    return visible(text).replace("⏎", "⏎\n")


def for_mathtext(text: str) -> str:
    """Visible text for a matplotlib figure: `$` is literal, and characters that its font lacks are spelled out."""
    glyphs = _figure_glyphs()
    drawable = "".join(c if ord(c) in glyphs else _spelled_out(c) for c in visible(text))
    return drawable.replace("$", r"\$")


def _visible_character(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    if unicodedata.category(character) in _INVISIBLE:
        return _spelled_out(character)
    return character


def _spelled_out(character: str) -> str:
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


@cache
def _figure_glyphs() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())
