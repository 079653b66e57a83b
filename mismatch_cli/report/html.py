"""`report.html`: one file that needs neither network nor script, legible on a phone and on a desk, in light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mismatch_cli.report.numbers import MISSING
from mismatch_cli.report.plots._style import DARK, LIGHT
from mismatch_cli.report.view import ReportView, definition_anchor
from mismatch_cli.text import for_html, visible
from mismatch_cli.trace.files import write_atomically

if TYPE_CHECKING:
    from markupsafe import Markup

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
    environment.filters |= {"formula": _formula, "tokens": _tokens}
    return environment.get_template("report.html").render(view=view)


def _finalize(value: object) -> object:
    """What is printed into the page, before it is escaped: visible, and without a line break beside a minus sign."""
    if type(value) is not str:  # markup that the template itself made is left alone
        return value
    return visible(value).replace(" − ", "\u00a0−\u00a0")


def _formula(text: str) -> Markup:
    """A formula with the one subscript that formulas have."""
    from markupsafe import Markup, escape

    return escape(_finalize(text)).replace("E_y", Markup("E<sub>y</sub>"))


def _tokens(text: str) -> Markup:
    """Token text with its line breaks."""
    from markupsafe import escape

    return escape(for_html(text))
