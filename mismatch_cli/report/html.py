"""`report.html`: one file that needs no network, for phone and desktop, light and dark, and
readable without scripts.

Scripts only fold, sort and select what the page shows without them. The page's policy allows
scripts by their hashes.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from mismatch_cli.base.numbers import MISSING
from mismatch_cli.base.places import shorten_paths
from mismatch_cli.base.text import for_html, visible
from mismatch_cli.report.drawing.style import DARK, LIGHT
from mismatch_cli.report.outline import SIGNS, Outline, Screen, Table, definition_anchor, status_of
from mismatch_cli.report.screen import curve_fact
from mismatch_cli.report.tables import logged_by
from mismatch_cli.trace.files import write_atomically

if TYPE_CHECKING:
    from markupsafe import Markup

_SCRIPT = "page.js"
_EXPLORER_SCRIPTS = (
    "explorer_data.js",
    "explorer_tokens.js",
    "explorer_masks.js",
    "explorer_colours.js",
    "explorer_strips.js",
    "explorer_text.js",
    "explorer_plot.js",
    "explorer_card.js",
    "explorer_picture.js",
    "explorer_link.js",
    "explorer.js",
)
_FEWEST_CHOICES = 4  # folds on one subject that get a menu; fewer are easy to scan
_CODE = re.compile(r"`([^`<>]+)`")
_WHOLE = re.compile(r"\|[^|<>&]{1,20}\||(?<![\w-])--[a-z][\w-]*")  # an absolute value, a flag
_TEMPLATES = Path(__file__).parent / "templates"


def write_html(path: Path, view: Outline) -> None:
    """Write the page by atomic rename; raises a `MismatchError` when it cannot be written."""
    write_atomically(path, render_html(view))


def render_html(view: Outline) -> str:
    """The page as text. Every value is escaped; control characters are made visible."""
    from markupsafe import Markup

    names: list[str] = [_SCRIPT]
    if view.explorer:
        names += _EXPLORER_SCRIPTS
    scripts = [(_TEMPLATES / name).read_text(encoding="utf-8") for name in names]
    return _rendered(
        "report.html",
        view=view,
        scripts=list(map(Markup, scripts)),
        script_hashes=" ".join(map(_hash, scripts)),
    )


def render_screen(screen: Screen) -> str:
    """A screen as part of another page, such as a notebook: the answer first, without scripts and
    figures.

    It takes its colours, light or dark, from that page.
    """
    remarks = [*screen.remarks, *map(curve_fact, screen.profiles)]
    return _rendered(
        "screen.html", screen=screen, tables=map(_without_links, screen.tables), remarks=remarks
    )


def _without_links(table: Table) -> Table:
    """The table without links to definitions and sections, which only the page has."""
    columns = [replace(column, metric=None) for column in table.columns]
    return replace(table, columns=tuple(columns), row_metrics=(), row_links=())


def _rendered(template: str, **values: object) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Token text may hold HTML and characters that are not seen: every value is made visible
    # (`_finalize`), then escaped (`autoescape`); a filter that returns Markup does both itself.
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.globals |= {
        "definition_anchor": definition_anchor,
        "logged_by": logged_by,
        "missing": MISSING,
        "light": LIGHT,
        "dark": DARK,
        "signs": SIGNS,
    }
    environment.filters |= {
        "math": _math,
        "tokens": _tokens,
        "folds": _folds,
        "heights": _heights,
        "shown": shorten_paths,
        "status": status_of,
    }
    return environment.get_template(template).render(**values)


def _hash(script: str) -> str:
    """The hash by which the page's policy allows a script."""
    digest = base64.b64encode(sha256(script.encode()).digest())
    return f"'sha256-{digest.decode()}'"


def _finalize(value: object) -> object:
    """Make every character of a value visible, before it is escaped."""
    # A subclass of str is markup that the template made, and is already escaped.
    return visible(value) if type(value) is str else value


_Fold = tuple[str, list[Table]]  # the title of a fold ("" if unfolded), and its consecutive tables


def _folds(tables: Iterable[Table]) -> Iterator[tuple[str, list[_Fold]]]:
    """Consecutive folds on one subject together, with the subject if they are many enough for a
    menu, else "".
    """
    folds = [(fold, list(group)) for fold, group in groupby(tables, key=lambda table: table.fold)]
    for subject, group in groupby(folds, key=lambda fold: _subject(fold[0])):
        consecutive = list(group)
        has_menu = len(consecutive) >= _FEWEST_CHOICES
        yield subject if has_menu else "", consecutive


def _subject(fold: str) -> str:
    """The subject of a fold: `by step` for `ppo, by step`; empty for a title without one."""
    return "".join(re.split(r"[:,] ", fold, maxsplit=1)[1:])


def _heights(values: Sequence[float | None]) -> list[float]:
    """Heights of bars, as fractions of the largest value."""
    measured = [value for value in values if value is not None]
    most = max(measured, default=0.0) or 1.0
    return [round((value or 0.0) / most, 3) for value in values]


def _math(text: str) -> Markup:
    """Text with formulas and `code`: E_y gets its subscript, and |π − μ| and flags do not break."""
    from markupsafe import Markup, escape

    # Escaping comes first: what follows adds tags of our own to text that may hold others.
    escaped = str(escape(visible(text)))
    subscripted = escaped.replace("E_y", "E<sub>y</sub>").replace(" %", "\u00a0%")
    code = _CODE.sub(r"<code>\1</code>", subscripted)
    return Markup(_WHOLE.sub(r'<span class="whole">\g<0></span>', code))


def _tokens(text: str) -> Markup:
    """Token text with its line breaks."""
    from markupsafe import escape

    return escape(for_html(text))
