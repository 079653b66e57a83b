"""The outline of a diagnosis: what its page has, and what is left of it on a screen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.report.outline import Outline, Table, Verdict
from mismatch_cli.report.pages import page_of
from mismatch_cli.report.screen import as_text, screen_of
from mismatch_cli.studies.diagnosis import DiagnosisAnalysis, analyse_diagnosis
from mismatch_cli.trace.reader import Trace


@pytest.fixture(scope="module")
def analysis() -> DiagnosisAnalysis:
    return analyse_diagnosis([Trace.open(bundled("traces/fp8-kv"))])


@pytest.fixture(scope="module")
def view(analysis) -> Outline:
    return page_of(analysis)


def table_with(view: Outline, head: str) -> Table:
    tables = [table for section in view.parts for table in section.tables]
    return next(table for table in tables if table.columns[0].title == head)


def test_the_parts_add_up_to_the_gap(analysis, view):
    rows = table_with(view, "the gap").rows
    nats = [float(row[1]) for row in rows]
    assert nats[0] == pytest.approx(sum(nats[1:]), abs=1e-5)
    assert nats[0] == pytest.approx(analysis.result.abs_d_mean, rel=1e-2)
    assert [row[0].strip() for row in rows[1:]] == ["explained", "expected", "unexplained"]


def test_what_was_found_links_to_its_evidence(analysis, view):
    table = table_with(view, "found")
    titles = [row.title for row in analysis.found_rows]
    assert [row[0] for row in table.rows] == titles == ["Rounded logits"]
    assert [s.anchor for s in view.sections if s.title in titles] == list(table.row_links)


def test_the_screen_has_the_tables_of_the_page_in_brief(view):
    screen = screen_of(view)
    assert screen is not None
    heads = [table.columns[0].title for table in screen.tables]
    assert heads == ["the gap", "found", "suspects"]
    page = table_with(view, "setting")
    assert [column.title for column in page.columns[3:]] == ["seen elsewhere", "source"]
    assert [row[:3] for row in page.rows[:4]] == list(screen.tables[2].rows)
    assert dict(view.remarks)["Checks"].startswith("33 of 43 made; --trainer-model MODEL allows 7")


def test_whatever_there_is_no_room_for_the_parts_of_the_gap_stay(view):
    long = replace(view, verdict=Verdict("NOT EXPLAINED", "many words " * 160, "bad"))
    screen = screen_of(long)
    assert screen is not None
    parts, _, suspects = screen.tables
    assert len(parts.rows) == 4 and len(suspects.rows) == 3
    assert not screen.profiles and "unexplained" in as_text(screen, 80)
