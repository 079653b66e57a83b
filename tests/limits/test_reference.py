"""The table names a source for each row, and its page is up to date: python -m
tests.limits.test_reference
"""

from __future__ import annotations

import re

from mismatch_cli.frameworks import dialects
from mismatch_cli.limits.judge import BROKEN, HEALTHY
from mismatch_cli.limits.published import Published, published
from mismatch_cli.limits.published_sets import about_sets
from mismatch_cli.limits.reference import MeasuredRange, reference
from mismatch_cli.metrics.gap_table import METRICS
from tests.paths import DOCS

PAGE = DOCS / "published-limits.md"
MARK = "<!-- generated -->\n"
USUAL = "The mean |Δlog p| of models without a fault"


def tables() -> str:
    limits = [
        "| whose | metric | ours | healthy | broken unless | for | conclusion | set | source |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in published():
        says = f"{row.says}; {row.note}" if row.note else row.says
        levels = [
            row.text(level) if getattr(row, level) is not None else ""
            for level in (HEALTHY, BROKEN)
        ]
        about = ", ".join(filter(None, (row.family, row.precision)))
        limits.append(
            f"| {row.who} | `{row.name}` | `{row.metric}`, {row.pair} | {' | '.join(levels)} | "
            f"{about} | {says} | {f'`{row.gate}`' if row.gate else ''} | {dated(row)} |"
        )
    head = "| model | family | precision | setup | metric | value | source |"
    measured = [head, "|---|---|---|---|---|---|---|"]
    for row in reference().measured:
        value = f"{row.low:g}" if row.low == row.high else f"{row.low:g} – {row.high:g}"
        setup = f"{row.setup} (**{row.state}**)" if row.state else row.setup
        source = f"{dated(row)}; {row.derived}" if row.derived else dated(row)
        pair = "" if row.pair == "mismatch" else f", {row.pair}"
        measured.append(
            f"| {row.model} | {row.family} | {row.precision} | {setup} | `{row.metric}`{pair} | "
            f"{value} | {source} |"
        )
    usual = ["| precision | nats | source |", "|---|---|---|"]
    usual += [
        f"| {row.who} | {row.low:g} – {row.high:g} | {row.source} |" for row in reference().usual
    ]
    sections = {"Published limits": limits, "Measured by others": measured, USUAL: usual}
    return (
        "\n".join(
            line for title, rows in sections.items() for line in (f"\n## {title}\n", *rows)
        ).lstrip()
        + "\n"
    )


def dated(row: Published | MeasuredRange) -> str:
    return f"{row.source} ({row.date})" if row.date else row.source


def test_every_row_has_a_source_and_a_metric():
    for row in published():
        framework, colon, name = row.metric.rpartition(":")
        names = [line.name for line in dialects.lines(framework)] if colon else METRICS
        assert name in names, row.who
        assert row.source and row.says and row.pair in ("mismatch", "total")
        assert row.family in ("", "dense", "moe") and re.fullmatch(r"(\d{4}-\d\d)?", row.date)
        assert row.direction != "size" or METRICS[row.metric].signed
        agreement = 0.0 if row.direction == "max" else 1.0
        agreement = agreement if colon else METRICS[row.metric].agreement
        healthy, broken = row.range(HEALTHY), row.range(BROKEN)
        assert healthy.contains(agreement), row.who
        assert healthy.lies_within(broken), row.who
    assert len({row.who for row in published()}) == len(published())


def test_every_set_has_rows_and_says_what_it_is():
    assert set(about_sets()) == {row.gate for row in published() if row.gate}
    assert all(about_sets().values())


def test_one_number_of_a_publisher_is_one_row():
    numbers = [(row.gate, row.metric, row.pair, row.family) for row in published() if row.gate]
    assert len(set(numbers)) == len(numbers)


def test_every_measured_and_usual_row_has_a_source():
    for row in reference().measured:
        assert re.search(r"[#/]", row.source)
        assert row.metric in METRICS
        assert row.low <= row.high
        assert row.family in ("", "dense", "moe")
        assert row.precision in ("", "fp32", "fp16", "bf16", "fp8", "fp4")
        assert row.pair in ("mismatch", "total", "floor")
    for usual in reference().usual:
        assert usual.source and 0 < usual.low < usual.high
    assert {"", "fp32", "bf16", "fp8"} <= {usual.precision for usual in reference().usual}


def test_the_page_is_up_to_date():
    _, generated = PAGE.read_text(encoding="utf-8").split(MARK)
    assert generated.strip() == tables().strip()


if __name__ == "__main__":
    start, _ = PAGE.read_text(encoding="utf-8").split(MARK)
    PAGE.write_text(f"{start}{MARK}\n{tables()}", encoding="utf-8")
