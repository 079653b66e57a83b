"""The page of each study, which terminal and HTML print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from mismatch_cli.base import registry

if TYPE_CHECKING:
    from mismatch_cli.report.outline import Outline
    from mismatch_cli.studies.study import Study

_PAGES = "mismatch_cli.*.pages.NAME"


def page_of(study: Study, **choices: Any) -> Outline:
    """The page of a study without its figures, from `page` in the module named after the study."""
    module = registry.load(_PAGES, study.STUDY, "page")
    return cast("Outline", module.page(study, **choices))
