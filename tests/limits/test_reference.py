"""The table names a source for each row, and its page is up to date: python -m
tests.limits.test_reference
"""

from __future__ import annotations

from math import isfinite

from mismatch_cli.limits.reference import reference
from mismatch_cli.metrics.gap_table import METRICS
from tests.paths import DOCS

PAGE = DOCS / "published-limits.md"
MARK = "<!-- generated -->\n"
USUAL = "The mean |Δlog p| of models without a fault"


def tables() -> str:
    bars = [
        "| whose | metric | ours | healthy up to | broken above | conclusion | source |",
        "|---|---|---|---|---|---|---|",
    ]
    for bar in reference().bars:
        limits = (
            "" if not isfinite(bound) else f"{bound:g}" for bound in (bar.healthy, bar.broken)
        )
        says = f"{bar.says}; {bar.note}" if bar.note else bar.says
        ours = f"`{bar.metric}`, {bar.pair}{', its size' if bar.absolute else ''}"
        bars.append(
            f"| {bar.who} | `{bar.name}` | {ours} | {' | '.join(limits)} | {says} | {bar.source} |"
        )
    head = "| model | family | precision | setup | metric | value | source |"
    measured = [head, "|---|---|---|---|---|---|---|"]
    for row in reference().measured:
        value = f"{row.low:g}" if row.low == row.high else f"{row.low:g} – {row.high:g}"
        setup = f"{row.setup} (**{row.state}**)" if row.state else row.setup
        source = f"{row.source}; {row.derived}" if row.derived else row.source
        measured.append(
            f"| {row.model} | {row.family} | {row.precision} | {setup} | `{row.metric}` | "
            f"{value} | {source} |"
        )
    usual = ["| precision | nats | source |", "|---|---|---|"]
    usual += [
        f"| {row.who} | {row.low:g} – {row.high:g} | {row.source} |" for row in reference().usual
    ]
    sections = {"Published limits": bars, "Measured by others": measured, USUAL: usual}
    return (
        "\n".join(
            line for title, rows in sections.items() for line in (f"\n## {title}\n", *rows)
        ).lstrip()
        + "\n"
    )


def test_every_row_has_a_source_and_one_of_our_metrics():
    for bar in reference().bars:
        assert bar.source
        assert bar.metric in METRICS
        assert bar.says
        assert METRICS[bar.metric].agreement < bar.bounds[0] <= bar.bounds[1]
        assert bar.family in ("", "dense", "moe")
        assert not bar.absolute or METRICS[bar.metric].signed
    for row in reference().measured:
        assert any(mark in row.source for mark in ("#", "docs/", "README", "lab/"))
        assert row.metric in METRICS
        assert row.low <= row.high
        assert row.family in ("", "dense", "moe")
        assert row.precision in ("", "fp32", "fp16", "bf16", "fp8", "fp4")
    for usual in reference().usual:
        assert usual.source and 0 < usual.low < usual.high
    assert {"", "fp32", "bf16", "fp8"} <= {usual.precision for usual in reference().usual}
    assert len({bar.who for bar in reference().bars}) == len(reference().bars)


def test_the_page_is_up_to_date():
    _, generated = PAGE.read_text(encoding="utf-8").split(MARK)
    assert generated.strip() == tables().strip()


if __name__ == "__main__":
    start, _ = PAGE.read_text(encoding="utf-8").split(MARK)
    PAGE.write_text(f"{start}{MARK}\n{tables()}", encoding="utf-8")
