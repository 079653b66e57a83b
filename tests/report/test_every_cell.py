"""Every number of the gap on the page of the bundled run is the one of its summary, by its metric:
read back from the text, without the functions that wrote it.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.metrics.gap_table import VOLATILITY
from mismatch_cli.report.outline import Section, Table
from mismatch_cli.report.pages import mismatch
from mismatch_cli.studies.mismatch import MismatchAnalysis, analyse_mismatch
from mismatch_cli.trace.reader import Trace

SECTIONS = {
    "The gap": "mismatch",
    "Whole responses": "mismatch",
    "Staleness": "staleness",
    "Total": "total",
}
POSITIONS = ("abs_d_mean", "d_mean", "tv_binary_mean")
_NUMBER = r"−?[\d,]+(?:\.\d+)?(?:e−?\d+)?"


def equals(shown: str, value: float | None) -> bool:
    """Whether a shown number is a value rounded to the shown digits; nothing if it was not
    measured.
    """
    if value is None:
        return shown in ("", "—")
    match = re.fullmatch(rf"({_NUMBER})( %| ×)?", shown)
    if match is None:
        return False
    text, unit = match[1].replace("−", "-").replace(",", ""), match[2]
    digits, _, exponent = text.partition("e")
    last = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    scale = 100 if unit == " %" else 1
    return abs(float(text) - scale * value) <= 0.5001 * last + 1e-9 * abs(scale * value)


def is_value(shown: str, estimate: dict[str, Any]) -> bool:
    few = estimate["note"] == "a few prompts decide it"
    return equals(shown.replace("°", ""), estimate["value"]) and ("°" in shown) == few


def is_interval(shown: str, estimate: dict[str, Any]) -> bool:
    low, high = estimate["low"], estimate["high"]
    if low is None:
        return shown == "" or not re.search(r"\d", shown) or shown == estimate["note"]
    match = re.fullmatch(rf"\[({_NUMBER}), ({_NUMBER})\]( %)?", shown)
    unit = (match and match[3]) or ""
    return bool(match) and equals(match[1] + unit, low) and equals(match[2] + unit, high)


def is_times(shown: str, estimate: dict[str, Any]) -> bool:
    """`100 ×`, two digits; `> 1,000 ×`; `noise ≈ 0` where the noise is below resolution."""
    factor = estimate.get("times_floor")
    if factor is None:
        return shown in ("", "—")
    if factor == "below resolution":
        return shown == "noise ≈ 0"
    if shown.startswith(">"):
        return factor > 1000
    number = float(shown.removesuffix(" ×").replace(",", ""))
    return shown.endswith(" ×") and abs(number - factor) <= 0.051 * factor


def is_noise(shown: str, estimate: dict[str, Any]) -> bool:
    floor = estimate.get("floor")
    return equals(shown, floor) or (floor == 0 and shown in ("0", "0 %"))


@pytest.fixture(scope="module")
def study() -> MismatchAnalysis:
    return analyse_mismatch([Trace.open(bundled("traces") / "fp8-kv")], 0)


@pytest.fixture(scope="module")
def pairs(study) -> dict[str, Any]:
    """The summary of each pair as `--json` prints it."""
    return study.to_json()["pairs"]


@pytest.fixture(scope="module")
def parts(study) -> list[Section]:
    return list(mismatch.page(study, worst=0).parts)


def titled(parts: list[Section], title: str) -> Section:
    return next(section for section in parts if section.title.startswith(title))


def test_every_metric_on_the_page_is_that_of_the_summary(pairs, parts):
    for title, pair in SECTIONS.items():
        metrics = pairs[pair]["metrics"]
        rows = [row for group in titled(parts, title).groups for row in group.rows]
        assert len(rows) >= (6 if title == "Whole responses" else 38)
        for row in rows:
            estimate = metrics[row.metric.key]
            assert is_value(row.value, estimate), (title, row)
            assert is_interval(row.interval, estimate) or row.note == estimate["note"], (title, row)
            assert is_times(row.times_floor, estimate), (title, row)
            assert is_noise(row.floor, estimate), (title, row)


def first_number(cell: str) -> str:
    """Of `0.011 ± 0.004` and `0.0021 [0.001, 0.005]` the value."""
    return re.findall(_NUMBER, cell)[0]


def cells_of(table: Table) -> list[dict[str, str]]:
    """The cells of each row by the heads of their columns, without the row's name."""
    heads = [column.title for column in table.columns]
    return [dict(zip(heads[1:], row[1:], strict=True)) for row in table.rows]


def test_every_cell_by_position_is_that_of_its_column(pairs, parts):
    for table, key in zip(
        titled(parts, "By position").tables, ("positions", "from_end"), strict=True
    ):
        for cells, row in zip(cells_of(table), pairs["mismatch"][key], strict=True):
            assert cells.pop("tokens") == f"{row['tokens']:,}"
            for cell, metric in zip(cells.values(), POSITIONS, strict=True):
                assert equals(first_number(cell), row[metric]["value"]), (key, metric, cell)


def test_every_cell_by_probability_is_that_of_its_column(pairs, parts):
    keys = {metric.label: key for key, metric in VOLATILITY.items()}
    tables = titled(parts, "Ratio and TV").tables
    assert sum(len(table.columns) - 2 for table in tables) == len(VOLATILITY)
    for table in tables:
        for cells, row in zip(cells_of(table), pairs["mismatch"]["volatility"], strict=True):
            assert cells.pop("tokens") == f"{row['tokens']:,}"
            for head, cell in cells.items():
                assert equals(first_number(cell), row[keys[head]]["value"]), (head, cells)


def test_by_length_shows_the_mean_and_the_spread_of_its_responses(pairs, parts):
    (table,) = titled(parts, "Whole responses").tables
    by_length = pairs["mismatch"]["sequence"]["by_length"]
    for cells, row in zip(cells_of(table), by_length, strict=True):
        assert cells["responses"] == f"{row['sequences']:,}"
        for head, key in (("mean Σd", "d_sum_mean"), ("SD of Σd", "d_sum_sd")):
            value = row[key]["value"]
            cell = cells[head]
            assert cell == "—" if value is None else equals(first_number(cell), value)
