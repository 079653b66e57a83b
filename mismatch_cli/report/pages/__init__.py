"""The page of each study, which terminal and HTML print."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from mismatch_cli.report.view import ReportView
    from mismatch_cli.studies.study import Study


def page_of(study: Study, **choices: Any) -> ReportView:
    """The page of a study without its figures, from `page` in the module named after the study."""
    return cast("ReportView", import_module(f"{__name__}.{study.STUDY}").page(study, **choices))
