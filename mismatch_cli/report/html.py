"""`report.html`: one file without network or script, legible on a phone and on a desk, in light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from mismatch_cli.numbers import MISSING
from mismatch_cli.report.plots._style import DARK, LIGHT
from mismatch_cli.report.view import ReportView, Table, definition_anchor
from mismatch_cli.text import for_html, visible
from mismatch_cli.trace.files import write_atomically

if TYPE_CHECKING:
    from markupsafe import Markup

_ABSOLUTE = re.compile(r"\|[^|<>&]{1,20}\|")
_TEMPLATES = Path(__file__).parent / "templates"


def write_html(path: Path, view: ReportView) -> None:
    """Write the page by atomic rename; raises a `MismatchError` when it cannot be written."""
    write_atomically(path, render_html(view))


def render_html(view: ReportView) -> str:
    """The page as text. Every value is escaped; control characters and the like are made visible."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.globals |= {"definition_anchor": definition_anchor, "missing": MISSING, "light": LIGHT, "dark": DARK}
    environment.filters |= {"math": _math, "tokens": _tokens, "folds": _folds}
    return environment.get_template("report.html").render(view=view)


def _finalize(value: object) -> object:
    """What is printed into the page, before it is escaped: every character visible."""
    return visible(value) if type(value) is str else value  # markup that the template itself made is left alone


def _folds(tables: Iterable[Table]) -> Iterator[tuple[str, list[Table]]]:
    """Tables that follow each other under the same fold, together."""
    for fold, together in groupby(tables, key=lambda table: table.fold):
        yield fold, list(together)


def _math(text: str) -> Markup:
    """Words with formulas among them: E_y has a subscript, and no line breaks inside |π − μ| or before a % sign."""
    from markupsafe import Markup, escape

    subscripted = str(escape(visible(text))).replace("E_y", "E<sub>y</sub>").replace(" %", "\u00a0%")
    return Markup(_ABSOLUTE.sub(r'<span class="whole">\g<0></span>', subscripted))


def _tokens(text: str) -> Markup:
    """Token text with its line breaks."""
    from markupsafe import escape

    return escape(for_html(text))
