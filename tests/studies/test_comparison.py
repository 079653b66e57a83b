"""Comparing traces on disk: known differences, equal tokens, what is left out, and the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.json_form import from_json, to_json
from mismatch_cli.base.places import bundled
from mismatch_cli.studies.comparison import (
    _what_differs,
    analyse_comparison,
    run_names,
)
from mismatch_cli.studies.comparison_result import ComparisonResult
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.trace.reader import Trace
from tests.paths import DOCS
from tests.studies.compared import FLOAT32, Row, lacking, rows_of, shifted, write_rows

PAGE = DOCS / "json" / "compare.md"


def compared(*folders: Path, pair: str | None = None) -> Row:
    return json.loads(
        json.dumps(
            analyse_comparison([Trace.open(f) for f in folders], pair).to_json(), allow_nan=False
        )
    )


def holds(estimate: Row, value: float) -> bool:
    return estimate["low"] <= value <= estimate["high"]


def test_a_known_difference_is_within_its_interval(result):
    """log π is lower by 0.02 with noise of 0.01: the mean drops by 0.02, the spread grows by
    0.01.
    """
    metrics = result["comparisons"][0]["metrics"]
    assert holds(metrics["d_mean"]["difference"], -0.02)
    assert metrics["d_mean"]["more_than_noise"] and metrics["d_mean"]["factor"]["value"] is None
    assert metrics["d_sd"]["difference"]["value"] == pytest.approx(0.01, rel=0.05)
    assert metrics["length_mean"]["difference"]["value"] == 0
    assert metrics["abs_d_max"]["difference"]["note"] == "an extreme: no interval"


def test_on_the_same_tokens_the_policies_are_compared_directly(result):
    on_tokens = result["comparisons"][0]["on_tokens"]
    assert (
        result["comparisons"][0]["pairing"] == "tokens"
        and result["comparisons"][1]["on_tokens"] is None
    )
    assert (
        on_tokens["tokens"] == result["traces"][0]["summary"]["counts"]["tokens"]
        and on_tokens["masked_in_one"] == 0
    )
    assert holds(on_tokens["current"]["d_mean"], -0.02)
    assert on_tokens["reference"]["abs_d_max"]["value"] == 0
    assert on_tokens["clip_flips"]["value"] == 0


def test_tokens_match_their_partners_in_any_order(result, float32_rows, perturbed):
    """The largest difference of a token, from the rows themselves."""
    partners = {(row["prompt_id"], row["sample_index"]): row for row in rows_of(perturbed)}
    gaps = []
    for row in float32_rows:
        partner = partners[row["prompt_id"], row["sample_index"]]
        gaps.append(np.subtract(partner["logp_trainer"], row["logp_trainer"], dtype=np.float32))
    gap_T = np.abs(np.concatenate(gaps))
    current = result["comparisons"][0]["on_tokens"]["current"]
    assert current["abs_d_max"]["value"] == pytest.approx(gap_T.max(), rel=1e-6)
    assert current["abs_d_mean"]["value"] == pytest.approx(gap_T.mean(), rel=1e-5)


def test_the_numbers_equal_the_reports(result, traces):
    """Except for rounding and the draws behind intervals."""
    for side, trace in zip(result["traces"], traces, strict=True):
        expected = analyse_mismatch([trace], 0).to_json()["pairs"]["mismatch"]
        assert side["summary"]["counts"] == expected["counts"]
        for key, estimate in expected["metrics"].items():
            value = side["summary"]["metrics"][key]["value"]
            assert value == estimate["value"] or value == pytest.approx(
                estimate["value"], rel=1e-9
            ), key


@pytest.mark.parametrize("folder", [FLOAT32, bundled("traces/fp8-kv")], ids=["float32", "fp8-kv"])
def test_a_trace_compared_with_itself_has_no_differences(folder, tmp_path):
    (comparison,) = compared(folder, folder)["comparisons"]
    assert comparison["pairing"] == "tokens" and comparison["settings"] == []
    assert (comparison["tested"], comparison["more_than_noise"]) == (0, 0)
    assert all(
        metric["difference"]["value"] in (0, None) for metric in comparison["metrics"].values()
    )
    for policy in ("current", "reference"):
        assert comparison["on_tokens"][policy]["abs_d_max"]["value"] == 0
    assert comparison["on_tokens"]["clip_flips"]["value"] == 0


def test_different_clip_decisions_are_counted(tmp_path, float32_rows):
    """A trainer with π = μ/2 on every fourth response: the ratio leaves [0.8, 1.28] on all of
    its tokens.
    """
    rows = [row if i % 4 else shifted(row, np.log(2)) for i, row in enumerate(float32_rows)]
    (comparison,) = compared(FLOAT32, write_rows(tmp_path / "a", rows, FLOAT32))["comparisons"]
    tokens = [len(row["response_ids"]) for row in float32_rows]
    flips = comparison["on_tokens"]["clip_flips"]
    assert flips["value"] == pytest.approx(sum(tokens[::4]) / sum(tokens))
    assert flips["low"] < flips["value"] < flips["high"]


def test_responses_in_only_one_trace_are_left_out_and_counted(tmp_path, float32_rows):
    rows = [
        *float32_rows[:60],
        *(row | {"response_ids": row["response_ids"][::-1]} for row in float32_rows[60:]),
    ]
    result = compared(FLOAT32, write_rows(tmp_path / "a", rows, FLOAT32))
    palindromes = sum(row["response_ids"] == row["response_ids"][::-1] for row in float32_rows[60:])
    assert [side["compared_responses"] for side in result["traces"]] == [60 + palindromes] * 2
    assert [side["responses"] for side in result["traces"]] == [96, 96]
    assert result["comparisons"][0]["shared_responses"] == 60 + palindromes
    assert all(
        metric["difference"]["value"] in (0, None)
        for metric in result["comparisons"][0]["metrics"].values()
    )


def test_prompts_in_only_one_trace_are_left_out(tmp_path, float32_rows):
    """Different responses to 16 of the 24 prompts: 64 of the first trace's responses are
    compared.
    """
    rows = [
        row | {"response_ids": row["response_ids"][::-1]}
        for row in float32_rows
        if row["prompt_id"] < 16
    ]
    result = compared(FLOAT32, write_rows(tmp_path / "a", rows, FLOAT32))
    assert (
        result["comparisons"][0]["pairing"] == "prompts"
        and result["comparisons"][0]["shared_prompts"] == 16
    )
    assert [side["compared_responses"] for side in result["traces"]] == [64, 64]


def test_different_prompts_are_not_paired_and_nothing_is_left_out(tmp_path, float32_rows):
    first = [row for row in float32_rows if row["prompt_id"] < 12]
    second = [row for row in float32_rows if row["prompt_id"] >= 12]
    result = compared(
        write_rows(tmp_path / "a", first, FLOAT32), write_rows(tmp_path / "b", second, FLOAT32)
    )
    assert (
        result["comparisons"][0]["pairing"] == "none"
        and result["comparisons"][0]["on_tokens"] is None
    )
    assert [side["compared_responses"] for side in result["traces"]] == [48, 48]
    assert result["comparisons"][0]["tested"] > 20


def test_masks_and_columns_that_differ(tmp_path, float32_rows):
    rows = []
    for row in float32_rows:
        mask = [position > 0 for position in range(len(row["response_ids"]))]
        rows.append(
            {k: v for k, v in row.items() if not k.startswith("topk")} | {"loss_mask": mask}
        )
    result = compared(FLOAT32, write_rows(tmp_path / "a", rows, FLOAT32))
    (comparison,) = result["comparisons"]
    assert comparison["on_tokens"]["masked_in_one"] == 96
    assert comparison["on_tokens"]["tokens"] == result["traces"][1]["summary"]["counts"]["tokens"]
    assert comparison["metrics"]["tv_topk_mean"]["difference"]["note"] == "not measured"
    assert comparison["metrics"]["abs_d_mean"]["difference"]["value"] is not None


def test_what_a_dump_does_not_record_is_not_compared(tmp_path, float32_rows):
    def imported(manifest: Row) -> None:
        manifest["imported"] = {"title": "a dump", "file_count": 1, "rows_with_unknown_finish": 9}
        manifest["imported"] |= {"left_out": {}, "left_out_first": {}, "noted": {}}

    result = compared(FLOAT32, write_rows(tmp_path / "a", float32_rows, FLOAT32, manifest=imported))
    difference = result["comparisons"][0]["metrics"]["truncated_share"]["difference"]
    assert difference["value"] is None and difference["note"] == "unknown why responses ended"
    assert result["traces"][1]["summary"]["metrics"]["truncated_share"]["value"] is None


def test_unscored_responses_are_left_out_of_both(tmp_path, float32_rows):
    rows = [row if i % 4 else row | {"logp_trainer": None} for i, row in enumerate(float32_rows)]
    result = compared(FLOAT32, write_rows(tmp_path / "a", rows, FLOAT32))
    assert [side["compared_responses"] for side in result["traces"]] == [72, 72]
    assert [side["about"]["unscored_responses"] for side in result["traces"]] == [0, 24]
    assert result["comparisons"][0]["metrics"]["abs_d_mean"]["difference"]["value"] == 0


def test_the_pair_is_the_first_that_all_traces_have_or_the_requested_one(tmp_path, float32_rows):
    later = [
        {k: v for k, v in row.items() if k != "logp_recomputed"} | {"version_trainer": 1}
        for row in float32_rows
    ]
    stale = write_rows(tmp_path / "a", later, FLOAT32)
    assert compared(FLOAT32, bundled("traces/fp8-kv"))["pair"] == "mismatch"
    assert compared(FLOAT32, stale)["pair"] == "total"
    assert (
        compared(bundled("traces/fp8-kv"), bundled("traces/fp8-kv"), pair="staleness")["pair"]
        == "staleness"
    )
    assert compared(FLOAT32, bundled("traces/fp8-kv"), pair="floor")["comparisons"][0]["tested"] > 0
    with pytest.raises(
        UsageError, match=r"float32 has no staleness pair. It has: floor, mismatch, total"
    ):
        compared(FLOAT32, bundled("traces/fp8-kv"), pair="staleness")


def test_a_trace_without_scores_is_named(tmp_path, float32_rows):
    unscored = [{k: v for k, v in row.items() if "trainer" not in k} for row in float32_rows]
    folder = write_rows(tmp_path / "a", unscored, FLOAT32)
    with pytest.raises(MismatchError, match="a was not scored by a trainer"):
        compared(FLOAT32, folder)
    empty = [row | {"logp_trainer": None} for row in float32_rows]
    with pytest.raises(MismatchError, match="b has no tokens with log-probabilities of both sides"):
        compared(FLOAT32, write_rows(tmp_path / "b", empty, FLOAT32))


def test_three_traces_are_compared_with_the_first(result):
    assert [side["name"] for side in result["traces"]] == ["A", "B", "C"]
    assert [(row["trace"], row["against"], row["pairing"]) for row in result["comparisons"]] == [
        ("B", "A", "tokens"),
        ("C", "A", "prompts"),
    ]
    assert [row["settings"][0]["setting"] for row in result["comparisons"]] == [
        "libraries.torch",
        "rollout.kv_cache_dtype",
    ]
    for row in result["comparisons"]:
        assert row["expected_by_chance"] == pytest.approx(0.05 * row["tested"])
        answers = [metric["more_than_noise"] for metric in row["metrics"].values()]
        assert row["more_than_noise"] == answers.count(True)
        assert row["tested"] == len(answers) - answers.count(None)


def test_runs_are_named_by_what_distinguishes_them():
    assert run_names([Path("/x/before"), Path("/x/after")]) == ["before", "after"]
    assert run_names([Path("/x/1/probe"), Path("/x/2/probe")]) == ["1/probe", "2/probe"]
    assert run_names([Path("/x/probe"), Path("/x/probe")]) == ["probe (A)", "probe (B)"]


def test_a_stored_result_is_read_back_as_it_was(result):
    assert {"format", "version"} < result.keys()
    content = {key: value for key, value in result.items() if key not in ("format", "version")}
    assert to_json(from_json(ComparisonResult, content)) == content


def test_every_key_is_documented(result):
    text = PAGE.read_text(encoding="utf-8")
    keys: set[str] = set()

    def collect(value: Any, depth: int) -> None:
        if isinstance(value, dict):
            keys.update(value)
            for inner in value.values():
                collect(inner, depth - 1) if depth else None
        elif isinstance(value, list):
            for inner in value:
                collect(inner, depth)

    collect({k: v for k, v in result.items() if k not in ("traces", "comparisons")}, 0)
    collect(
        [
            {k: v for k, v in row.items() if k not in ("about", "summary")}
            for row in result["traces"]
        ],
        0,
    )
    for row in result["comparisons"]:
        collect({k: v for k, v in row.items() if k not in ("metrics", "on_tokens")}, 1)
        collect(row["metrics"]["k3"], 0)
        collect(row["on_tokens"] or {}, 0)
    undocumented = {key for key in keys if f"`{key}`" not in text}
    assert undocumented == set()
    assert (result["format"], result["version"]) == ("mismatch-cli comparison", 1)


def test_the_gap_differs_if_its_mean_does_and_metrics_differ_if_chance_does_not_explain_their_number():
    quiet: dict[str, bool | None] = dict.fromkeys(map(str, range(20)), False)
    # Three of twenty: in 1 of 13 comparisons
    some = {key: int(key) < 3 or answer for key, answer in quiet.items()}
    many = {key: int(key) < 4 or answer for key, answer in quiet.items()}  # four: in 1 of 63
    for answers, expected in (
        (quiet, "noise"),
        (some, "noise"),
        (many, "metrics"),
        ({}, "untested"),
    ):
        assert _what_differs(answers) == expected
        assert _what_differs(answers | {"abs_d_mean": True}) == "gap"
        assert _what_differs(answers | {"tv_binary_mean": True, "abs_d_mean": False}) == "gap"
    assert _what_differs({"abs_d_mean": None, "k3": None}) == "untested"


def test_only_tokens_that_both_have_are_compared(float32_rows, tmp_path):
    """Equal traces, but one lacks log π of its certain tokens, and another those of its first
    halves.
    """
    certain, halves = tmp_path / "certain", tmp_path / "halves"
    rng = np.random.default_rng(0)
    lacking = {certain: [], halves: []}
    for row in rng.permutation(np.array(float32_rows, dtype=object)):
        logp = np.array(row["logp_trainer"])
        without = np.where(np.array(row["logp_rollout"]) > np.log(0.999), np.nan, logp)
        lacking[certain].append(row | {"logp_trainer": without.tolist()})
        half = np.where(np.arange(len(logp)) < len(logp) // 2, np.nan, logp)
        lacking[halves].append(row | {"logp_trainer": half.tolist()})
    for folder, rows in lacking.items():
        write_rows(folder, rows, FLOAT32)
    for folders in ([FLOAT32, certain], [certain, FLOAT32], [FLOAT32, certain, halves]):
        result = compared(*folders)
        tokens = {side["summary"]["counts"]["tokens"] for side in result["traces"]}
        assert len(tokens) == 1 and tokens.pop() < 4822
        for comparison in result["comparisons"]:
            gap = comparison["metrics"]["abs_d_mean"]
            assert gap["difference"]["value"] == 0 and comparison["more_than_noise"] == 0


@pytest.mark.parametrize(("factor", "differs"), [(1.0, "noise"), (3.5, "gap")])
def test_eight_prompts_on_the_same_tokens_decide_a_large_difference(
    float32_rows, tmp_path, factor, differs
):
    """Both are a float32 trace with gaps of its own, 0.01 nats in one and 3.5 times that in the
    other.
    """
    prompts = sorted({row["prompt_id"] for row in float32_rows})[:8]
    rows = [row for row in float32_rows if row["prompt_id"] in prompts]
    rng = np.random.default_rng(1)
    folders = []
    for name, nats in (("a", 0.01), ("b", 0.01 * factor)):
        noisy = [
            row
            | {
                "logp_trainer": np.minimum(
                    np.array(row["logp_rollout"]) + rng.normal(0, nats, len(row["logp_rollout"])), 0
                ).tolist()
            }
            for row in rows
        ]
        folders.append(write_rows(tmp_path / name, noisy, FLOAT32))
    (comparison,) = compared(*folders)["comparisons"]
    assert comparison["pairing"] == "tokens" and comparison["differs"] == differs
    gap = comparison["metrics"]["abs_d_mean"]
    assert gap["more_than_noise"] is (differs == "gap")
    # Fewer than four are not told from noise
    few = [row for row in rows if row["prompt_id"] in prompts[:3]]
    folders = [write_rows(tmp_path / f"few-{name}", few, FLOAT32) for name in "ab"]
    assert compared(*folders)["comparisons"][0]["differs"] == "untested"


def test_traces_without_a_token_that_both_have_are_refused(float32_rows, tmp_path):
    """One lacks log π of every token at an even position, the other at an odd one."""
    even, odd = (
        write_rows(tmp_path / name, [lacking(row, first, 2) for row in float32_rows[:8]], FLOAT32)
        for first, name in enumerate(("even", "odd"))
    )
    with pytest.raises(MismatchError, match=r"No token of .*even can be compared"):
        compared(even, odd)
