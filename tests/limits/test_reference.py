"""The table names a source for each row, and its page is up to date: python -m
tests.limits.test_reference
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from mismatch_cli.frameworks import dialects
from mismatch_cli.limits.judge import BROKEN, HEALTHY
from mismatch_cli.limits.published import Published, published
from mismatch_cli.limits.published_sets import about_sets
from mismatch_cli.limits.reference import MeasuredRange, reference
from mismatch_cli.metrics.gap_table import METRICS
from tests.docs.pages import DOCS, is_renewed, renewed

PAGE = DOCS / "published-limits.md"
# What the page says once, above its tables.
_SAID_ABOVE = re.compile(
    "HF sdpa on an RTX 4090, (its own samples scored at )?batch 1 and 8(, [0-9,]+ tokens)?"
    "|Fast-LLM or DeepSpeed against vLLM, (bf16, )?|, one fixed text, not sampled"
    "|^GRPO on GSM8K, |, means of the first and last 10 of 200 steps"
    "|vLLM 0.12 against HF(, )?|(, )?[0-9]+k tokens( sampled in bf16)?"
    "|an example of monitoring in the documentation(; )?"
    "|Tinker names both estimators and one number(; )?"
    # What its levels show already, or what decides nothing; JSON has all of it
    "|below 0.005 under normal circumstances; |0.5 is the line named Good.*"
    "|one threshold; |, set from a measured [0-9.]+|; its fork vime has the same limit"
)


def limits() -> Iterator[str]:
    yield "| whose (set) | metric, ours | limit | source |"
    yield "|---|---|---|---|"
    for row in published():
        says = "" if "CI" in row.who or "nightly" in row.who else row.says
        note = "; ".join(filter(None, (says, _short(row.note))))
        levels = [row.text(BROKEN)]
        if row.has_two_levels:
            levels = [f"healthy {row.text(HEALTHY)}", f"broken unless {row.text(BROKEN)}"]
        ours = "" if ":" in row.metric else f", `{row.metric}`{_pair(row)}"
        models = _models(row)
        yield _line(
            f"{row.who} (`{row.gate}`)" if row.gate else row.who,
            f"`{row.name}`{ours}",
            ", ".join(levels) + (f" ({models})" if models else ""),
            f"{dated(row)}: {note}" if note else dated(row),
        )


def measured() -> Iterator[str]:
    """One line for all that a source measured of a model in a setup; an empty cell is as above."""
    yield "| source | model | setup | value |"
    yield "|---|---|---|---|"
    groups: dict[str, dict[str, dict[str, list[str]]]] = {}
    for row in reference().measured:
        value = f"{row.low:g}" if row.low == row.high else f"{row.low:g} – {row.high:g}"
        kind = _models(row)
        model = f"{row.model} ({kind})" if kind else row.model
        publisher = re.escape(row.source.split()[0])
        setup = re.sub(rf"^{publisher}('s)?(, | |$)", "", _short(row.setup), flags=re.I)
        setup = f"{setup} (**{row.state}**)" if row.state else setup
        source, spread = _spread(row.source)
        setups = groups.setdefault(dated(row, source), {}).setdefault(model, {})
        setups.setdefault(setup or "—", []).append(f"`{row.metric}`{_pair(row)} {value}{spread}")
    for source, models in groups.items():
        for model, setups in models.items():
            for setup, values in setups.items():
                yield _line(source, model, setup, ", ".join(values))
                source = model = ""


def usual() -> Iterator[str]:
    yield "| precision | nats | source |"
    yield "|---|---|---|"
    for row in reference().usual:
        yield _line(row.who, f"{row.low:g} – {row.high:g}", re.sub(r" \([^)]*\)", "", row.source))


def _spread(source: str) -> tuple[str, str]:
    """A source, and in brackets the range of the single values whose mean is given."""
    match = re.fullmatch(r"(.*?)( \((?:[0-9.]+ to|at most) [0-9.]+\)|)", source)
    assert match
    return match[1], match[2]


def _short(text: str) -> str:
    return _SAID_ABOVE.sub("", text)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _pair(row: Published | MeasuredRange) -> str:
    return "" if row.pair == "mismatch" else f" ({row.pair})"


def _models(row: Published | MeasuredRange) -> str:
    """The family of models where it is not that of most, and the precision."""
    family = {"moe": "MoE", "dense": "dense" if isinstance(row, Published) else ""}
    return ", ".join(filter(None, (family.get(row.family, ""), row.precision)))


def dated(row: Published | MeasuredRange, source: str = "") -> str:
    source = source or row.source
    return f"{source} ({row.date})" if row.date else source


PARTS = {"limits": limits, "measured": measured, "usual": usual}


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


def test_what_the_table_leaves_out_is_said_above_it():
    """Of the sources whose rows it shortens, and of those with a value of its own."""
    above = PAGE.read_text(encoding="utf-8")
    for row in reference().measured:
        publisher = re.split(r"[ /]", row.source)[0]
        if row.derived or _short(row.setup) != row.setup:
            assert f"* **{publisher}**" in above, row.source


@pytest.mark.parametrize("part", PARTS)
def test_the_page_is_up_to_date(part):
    assert is_renewed(PAGE, part, "\n".join(PARTS[part]()))


if __name__ == "__main__":
    for part, make in PARTS.items():
        renewed(PAGE, part, "\n".join(make()))
