"""Every number of the gap that the page and the full screen of the bundled run show is the one of
summary.json, by its metric: read back from the text, without the functions that wrote it.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.places import bundled
from mismatch_cli.metrics.gap_table import METRICS, VOLATILITY

TRACE = str(bundled("traces") / "fp8-kv")
SECTIONS = {
    "The gap": "mismatch",
    "Whole responses": "mismatch",
    "Staleness": "staleness",
    "Total": "total",
}
POSITIONS = ("abs_d_mean", "d_mean", "tv_binary_mean")
HEADS = ("value", "95 % interval", "× noise", "noise")
_NUMBER = r"−?[\d,]+(?:\.\d+)?(?:e−?\d+)?"


class Row(NamedTuple):
    """A metric's name, and its cells by the head of their column."""

    section: str
    name: str
    cells: dict[str, str]


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


HOLDS = {
    "value": is_value,
    "95 % interval": is_interval,
    "× noise": is_times,
    "noise": is_noise,
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary and the page."""
    folder = tmp_path_factory.mktemp("cells") / "made"
    assert run(["report", TRACE, "--output", str(folder), "--plots", "svg", "--quiet"]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {"summary": summary, "page": page}


@pytest.fixture
def screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> list[str]:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    assert run(["report", TRACE, "--full"]) == 0
    return capsys.readouterr().out.splitlines()


def screen_rows(lines: list[str]) -> list[Row]:
    """The rows of the tables of metrics, each cell by where the head of its column ends."""
    # The longest first: one may begin like another.
    labels = sorted((metric.label for metric in METRICS.values()), key=len, reverse=True)
    rows, section, ends = [], "", {}
    for line in lines[: lines.index("Rewards and responses")]:
        title = next((name for name in SECTIONS if line.startswith(name)), None)
        if title:
            section, ends = title, {}
        elif re.match(r"\s+value\s+95 % interval", line):
            ends = {head: match.end() for head in HEADS if (match := _head(head).search(line))}
        elif ends and not line.strip():
            ends = {}
        elif ends:
            label = next((name for name in labels if line.strip().startswith(f"{name} ")), None)
            if label is not None:
                start = line.index(label) + len(label)
                rows.append(Row(section, label, cells_of(line, start, ends)))
    return rows


def cells_of(line: str, start: int, ends: dict[str, int]) -> dict[str, str]:
    cells = {}
    for head, end in sorted(ends.items(), key=lambda item: item[1]):
        cells[head] = line[start:end].strip()
        start = end
    return cells


def _head(name: str) -> re.Pattern[str]:
    """A head of a column: `noise` is also the end of `× noise`."""
    return re.compile(rf"(?<!× ){name}")


class Tables(HTMLParser):
    """The tables of a page: their class, the section around them, and rows of words."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: list[tuple[str, str, str, list[list[str]]]] = []
        self._heading, self._words, self._inside = "", [], ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append((dict(attrs).get("class") or "", self._heading, "", []))
        elif tag == "tr" and self.tables:
            self.tables[-1][3].append([])
        if tag in ("th", "td", "h2", "caption"):
            self._inside, self._words = tag, []
        if tag == "span" and dict(attrs).get("class") in ("formula", "unit"):
            self._words.append("\t")

    def handle_endtag(self, tag: str) -> None:
        words = " ".join("".join(self._words).split("\t")[0].split())
        if tag in ("th", "td") and self.tables and self.tables[-1][3]:
            self.tables[-1][3][-1].append(words)
        elif tag == "h2":
            self._heading = words
        elif tag == "caption":
            kind, heading, _, rows = self.tables[-1]
            self.tables[-1] = (kind, heading, words, rows)

    def handle_data(self, data: str) -> None:
        if self._inside:
            self._words.append(data)


def page_rows(html: str) -> list[Row]:
    rows = []
    for kind, heading, _, cells in Tables(html).tables:
        section = next((name for name in SECTIONS if heading.startswith(name)), "")
        if kind == "metrics" and section:
            heads = [head[:1].lower() + head[1:] for head in cells[0][1:]]
            for name, *values in (row for row in cells[1:] if len(row) == len(heads) + 1):
                rows.append(Row(section, name, dict(zip(heads, values, strict=True))))
    return rows


def wrong_cells(rows: list[Row], summary: dict[str, Any]) -> list[str]:
    keys = {metric.label: key for key, metric in METRICS.items()}
    wrong = []
    for row in rows:
        estimate = summary["pairs"][SECTIONS[row.section]]["metrics"][keys[row.name]]
        for head, cell in row.cells.items():
            if not HOLDS[head](cell, estimate):
                wrong.append(f"{row.section}, {row.name}, {head}: {cell!r} of {estimate}")
    return wrong


def test_every_metric_on_the_screen_is_that_of_the_summary(shown, screen):
    rows = screen_rows(screen)
    assert wrong_cells(rows, shown["summary"]) == []
    measured = [
        k for k, m in shown["summary"]["pairs"]["mismatch"]["metrics"].items() if m["value"]
    ]
    assert len([row for row in rows if SECTIONS[row.section] == "mismatch"]) >= 0.9 * len(measured)


def test_every_metric_on_the_page_is_that_of_the_summary(shown):
    rows = page_rows(shown["page"])
    assert wrong_cells(rows, shown["summary"]) == []
    assert {row.section for row in rows} == set(SECTIONS)
    assert len(rows) > 100 and all(set(row.cells) == set(HEADS) for row in rows)


def estimates_in(cell: str) -> list[str]:
    """The first number of a cell: of `0.011 ± 0.004`, `0.0021 [0.001, 0.005]` the value."""
    return re.findall(_NUMBER, cell)[:1]


def grid(shown: dict[str, Any], section: str, caption: str) -> list[list[str]]:
    (rows,) = (
        rows
        for kind, heading, title, rows in Tables(shown["page"]).tables
        if kind == "grid" and heading.startswith(section) and title.startswith(caption)
    )
    return rows[1:]


def test_every_cell_by_position_is_that_of_its_column(shown):
    pair = shown["summary"]["pairs"]["mismatch"]
    for caption, key in (
        ("From the first token", "positions"),
        ("From the last token", "from_end"),
    ):
        rows = grid(shown, "By position", caption)
        assert len(rows) == len(pair[key])
        for cells, row in zip(rows, pair[key], strict=True):
            assert cells[1] == f"{row['tokens']:,}"
            for cell, metric in zip(cells[2:], POSITIONS, strict=True):
                (value,) = estimates_in(cell)
                assert equals(value, row[metric]["value"]), (caption, cells[0], metric, cell)


def test_every_cell_by_probability_is_that_of_its_column(shown):
    bins = shown["summary"]["pairs"]["mismatch"]["volatility"]
    columns = {metric.label: key for key, metric in VOLATILITY.items()}
    tables = [
        rows
        for kind, heading, _, rows in Tables(shown["page"]).tables
        if kind == "grid" and heading.startswith("Ratio and TV")
    ]
    compared = 0
    for heads, *rows in tables:
        assert len(rows) == len(bins)
        for cells, row in zip(rows, bins, strict=True):
            for head, cell in zip(heads[2:], cells[2:], strict=True):
                assert equals(*estimates_in(cell), row[columns[head]]["value"]), (head, cells[0])
                compared += 1
    assert compared > 100


def test_by_length_shows_the_mean_and_the_spread_of_its_responses(shown):
    by_length = shown["summary"]["pairs"]["mismatch"]["sequence"]["by_length"]
    for cells, row in zip(grid(shown, "Whole responses", "By length"), by_length, strict=True):
        assert cells[1] == f"{row['sequences']:,}"
        for cell, key in zip(cells[2:], ("d_sum_mean", "d_sum_sd"), strict=True):
            value = row[key]["value"]
            assert cell == "—" if value is None else equals(*estimates_in(cell), value)
