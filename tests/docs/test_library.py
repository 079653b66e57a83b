"""The Python sessions of the guide, page by page: what is below a `>>>` is what comes of it; `…`
is anything.
"""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pandas as pd
import pytest

from tests.docs.pages import PAGES
from tests.docs.reader import missing, things
from tests.pictures import leave_blank

_SESSION = re.compile(r"^```pycon\n(.*?)^```$", re.M | re.S)
_HAVING = [page for page in PAGES if _SESSION.search(page.read_text(encoding="utf-8"))]


class Anything(doctest.OutputChecker):
    """`…` stands for anything, also for nothing at all."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return bool(want or not got) and not missing(want, got, loosely=False)


def examples(page: Path) -> doctest.DocTest:
    """All sessions of a page as one."""
    text = "".join(_SESSION.findall(page.read_text(encoding="utf-8")))
    return doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)


@pytest.mark.parametrize("page", _HAVING, ids=lambda page: page.name)
def test_a_session_does_what_the_page_says(page, tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    leave_blank(monkeypatch)
    said: list[str] = []
    session = examples(page)
    things("".join(example.source for example in session.examples), tmp_path_factory.mktemp("made"))
    with pd.option_context("display.width", 120, "display.max_columns", 20):
        results = doctest.DocTestRunner(Anything()).run(session, out=said.append)
    assert results.attempted > 0 and results.failed == 0, "".join(said)
