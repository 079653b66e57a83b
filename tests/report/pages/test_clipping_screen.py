"""The screen of `clipstats`: at most 40 lines of 80 columns that end with the verdict and what
to type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mismatch_cli.base.json_form import from_json
from mismatch_cli.report.outline import Excerpt, Screen, TokenText
from mismatch_cli.report.pages.clipping import page_of_result
from mismatch_cli.report.screen import as_text, screen_of
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.studies.clipping_result import ClippingResult
from tests.report.pages.clipping_result import (
    NAMES,
    equal_weights_result,
    nothing_judged,
    page_of,
    sample_result,
)

FACTS = (("μ", "0.1"), ("π", "0.2"))
IMPORTED = {"title": "a dump", "file_count": 1, "left_out": {}, "left_out_first": {}, "noted": {}}
CONTEXT = (TokenText("We get 7*6="), TokenText("43", 4), TokenText(" ropes."))


def shown(result: dict[str, Any]) -> Screen:
    first, *others = result["compared"] or [""]
    pairs = [(first, other) for other in others] + [(other, first) for other in others]
    examples = [
        Excerpt(
            f"{only} blocks, {rival} keeps", FACTS, CONTEXT, short=f"Only {only} blocks (A > 0)"
        )
        for only, rival in pairs
    ]
    screen = screen_of(page_of(result, examples))
    assert screen is not None
    return screen


def lines_of(screen: Screen) -> list[str]:
    return as_text(screen, 80).splitlines()


RESULTS = {
    "everything": sample_result,
    "without advantages": lambda: sample_result(advantages=False, steps=1),
    "one algorithm": lambda: sample_result(("dppo-binary-tv",)),
    "no family": lambda: sample_result(("ipo", "gspo", "mask-0.5")),
    "one step, no theory": lambda: sample_result(steps=1, theory=False),
    "equal weights, no top-K": equal_weights_result,
    "nothing blocked": lambda: sample_result(steps=1, gap=False),
    "nothing judged": nothing_judged,
}


@pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS)
def test_at_most_40_lines_that_end_with_what_to_type(make: Any) -> None:
    screen = shown(make())
    lines = lines_of(screen)
    assert 10 <= len(lines) <= 40 and max(map(len, lines)) <= 80
    assert lines[-1].startswith("mismatch-cli clipstats --full")
    text = "\n".join(lines)
    assert screen.verdict.words in text and "mismatch-cli guide choosing-a-threshold" in " ".join(
        text.split()
    )
    assert not [line for line in lines if line.startswith("Hidden at") and "algorithm" in line]


def test_the_compared_pair_comes_first_then_the_others_from_strict_to_loose() -> None:
    result = sample_result()
    lines = lines_of(shown(result))
    marked = [line.split()[1] for line in lines if line.startswith("▸")]
    shares = {row["name"]: row["blocked"]["all"]["value"] for row in result["algorithms"]}
    listed = [
        name
        for line in lines
        for name in NAMES
        if line[2:].startswith(f"{name} ") and line[:1] in " ▸"
    ]
    assert marked == listed[:2] and set(marked) == {"dppo-binary-tv", "grpo-clip-higher"}
    assert listed[2:] == sorted(listed[2:], key=lambda name: -shares[name])
    others = [name for name in NAMES if shares[name] and name not in marked]
    others.remove("dppo-binary-tv-recompute")
    assert listed[2] == max(others, key=shares.__getitem__)
    assert listed[-1] == min(others, key=shares.__getitem__)
    assert "dppo-binary-tv-recompute" not in listed  # the same mask on π′
    left = len(NAMES) - len(listed)
    assert any(line.startswith(f"… {left} more: --full") for line in lines)


def test_of_many_the_compared_ones_the_strictest_and_the_loosest_stay() -> None:
    content = sample_result([name for name, algorithm in TABLE.items() if algorithm.masks])
    result = from_json(ClippingResult, content)
    others = [
        row for row in result.algorithms if row not in result.leading and not result.is_twin(row)
    ]
    others.sort(key=lambda row: -row.strictness)
    table = page_of(content).parts[0].tables[0]
    assert table.brief is not None
    names = [table.rows[place][0][2:] for place in table.brief.rows]
    assert {*names[:2]} == {*result.compared} and len({*names}) == 8 < len(others)
    assert names[2:4] == [others[0].name, others[-1].name]


def test_algorithms_with_one_mask_are_one_row() -> None:
    result = sample_result(("minirl", "gspo", "relax-both"))
    twin = next(row for row in result["algorithms"] if row["name"] == "gspo") | {"name": "gspo-too"}
    result["algorithms"].append(twin)
    result["same_mask"] = [["minirl"], ["gspo", "gspo-too"], ["relax-both"]]
    assert any("gspo (+1 alike)" in line for line in lines_of(shown(result)))
    # Another weight: its lost update has a row of its own
    twin["lost"] = result["algorithms"][0]["lost"]
    lines = lines_of(shown(result))
    assert any("gspo-too" in line for line in lines) and not any("alike)" in line for line in lines)


def test_equal_thresholds_are_shown_and_can_be_typed() -> None:
    result = sample_result()
    for row, family, value in zip(
        result["same_strictness"], ("binary_tv", "ratio_clip"), (0.0734, 0.39), strict=True
    ):
        row["thresholds"][family] |= {"value": value, "low": value - 0.01, "high": value + 0.01}
    screen = shown(result)
    assert "grpo-clip-higher and TV δ = 0.0734; dppo-binary-tv and ε = 0.390" in screen.verdict.text
    assert (
        screen.next[0][0]
        == "mismatch-cli clipstats -a grpo-clip-higher -a dppo-binary-tv:delta=0.0734"
    )
    (table,) = [table for table in screen.tables if table.title == "Same strictness"]
    assert [column.title for column in table.columns] == [
        "as strict as",
        "ε",
        "TV δ",
        "KL δ",
    ]
    assert table.rows[0][:3] == ("grpo-clip-higher", "0.2 / 0.28", "0.073 ± 0.010")
    assert table.rows[1][:3] == ("dppo-binary-tv", "0.390 ± 0.010", "0.15")


def test_the_name_of_a_file_is_not_suggested() -> None:
    result = sample_result(("ipo", "relax-both"))
    result["same_strictness"][0]["algorithm"] = "my_mask"
    result["same_strictness"] = result["same_strictness"][:1]
    screen = shown(result)
    assert "my_mask" in screen.verdict.text and "my_mask" not in screen.next[0][0]


@pytest.mark.parametrize(
    ("origin", "way"),
    [
        ({}, "MISMATCH_ANSWER_FIELD=FIELD mismatch-cli probe"),
        ({"format": "plain"}, "mismatch-cli import DUMP --columns {}=COLUMN"),
        ({"format": "record"}, "pass {}= to the recorder"),
        ({"format": "verl"}, "import a dump with {}s"),
    ],
)
def test_what_to_type_for_advantages_and_rewards_depends_on_where_the_trace_is_from(
    origin: Any, way: str
) -> None:
    result = sample_result(advantages=False, steps=1) | {"arguments": ["--theory"], "theory": None}
    result["about"] |= {"imported": IMPORTED | origin} if origin else {}
    page = page_of(result)
    assert page.notes[0].startswith("No advantages")
    assert shown(result).notes[0] == page.notes[0]
    for column in ("advantage", "reward"):
        assert any(note.endswith(f"To get them: {way.format(column)}.") for note in page.notes)


def test_without_an_update_no_later_trainer_is_advised() -> None:
    """Where every advantage is 0, no trainer gives masks something to block."""
    result = equal_weights_result()
    runs = [Path("one"), Path("other")]
    examples: list[Excerpt] = []
    first = page_of_result(from_json(ClippingResult, result), examples, runs).next[0]
    # It scores one trace at a time
    assert first[0] == ("mismatch-cli rescore one --trainer-model LATER --weights newer")
    result["counts"] |= {"tokens": 0, "zero_advantage": 9}
    first = page_of_result(from_json(ClippingResult, result), examples, runs).next[0]
    assert first[0] == "mismatch-cli curate MODEL --prompts FILE"
    assert shown(result).verdict.text == "Every advantage is 0, so there is no update."


@pytest.mark.parametrize("advantages", [True, False])
def test_tokens_that_are_all_masked_have_no_advantage_of_0(advantages) -> None:
    result = sample_result(advantages=advantages)
    result["counts"] |= {"tokens": 0, "zero_advantage": 0, "masked": 9}
    screen = shown(result)
    assert screen.verdict.words == "NOTHING TO BLOCK"
    assert screen.verdict.text.startswith("No token counts: each is masked")
    assert screen.next[0][1] == "why no token counts"


def test_verdicts() -> None:
    assert shown(sample_result(steps=1, gap=False)).verdict.words == "NOTHING BLOCKED"
    assert shown(nothing_judged()).verdict.words == "NOTHING JUDGED"
    assert shown(sample_result(("dppo-binary-tv",))).verdict.words == "3.56 % BLOCKED"
    result = sample_result()
    for row, share in zip(result["algorithms"][2:5:2], (0.04, 0.02), strict=True):
        row["blocked"]["all"]["value"] = share
    verdict = shown(result).verdict
    assert (
        verdict.words == "2.0 × AS STRICT"
        and "grpo-clip-higher blocks 4.00 % (mean μ" in verdict.text
    )
    result["counts"]["tokens"] = 0
    assert shown(result).verdict.words == "NOTHING TO BLOCK"
    hypothetical = shown(sample_result(advantages=False)).verdict
    assert "% if A > 0 and" in hypothetical.text and "Equally strict" not in hypothetical.text
