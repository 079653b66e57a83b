"""Binary and top-K divergences compared with full ones: bias, rank correlation, wrong decisions,
and the bracket.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from mismatch_cli.base.json_form import to_json
from mismatch_cli.metrics.clipping.masked_slice import Needs
from tests.metrics.clipping import brute
from tests.metrics.clipping.world import ALL, EVERYTHING, PLAIN, result_of, simple, summarise, world

THRESHOLDS = {"tv": 0.15, "kl": 0.05}
EVERYTHING_BUT_TOP_K = replace(EVERYTHING, top_k=0, topk_recomputed=False)
WITHOUT_TOP_K = tuple(a for a in ALL if not a.needs_top_k)


def column(t: pd.DataFrame, divergence: str, k: int) -> pd.Series:
    if k:
        return t[f"{divergence}{k}"]
    return (t["p"] - t["q"]).abs() if divergence == "tv" else brute.binary_kl(t["q"], t["p"])


def comparison(t: pd.DataFrame, divergence: str, k: int) -> dict[str, float]:
    """Bias, rank correlation and wrong decisions over the tokens of `t` with a known full
    divergence.
    """
    t = t[t[f"{divergence}_full"].notna()]
    judged, threshold = t[t["A"] != 0], THRESHOLDS[divergence]
    value, full = column(t, divergence, k), t[f"{divergence}_full"]
    away = np.sign(judged["A"]) * (judged["p"] - judged["q"]) > 0
    wrong = away & ((value > threshold) != (full > threshold)).loc[judged.index]
    finite = np.isfinite(value) & np.isfinite(full)
    return {
        "bias": (value - full)[finite].mean(),
        "rank_correlation": value.rank().corr(full.rank()),
        "wrong_mask": wrong.mean(),
    }


def check_comparison(row: dict[str, Any], expected: dict[str, float]) -> None:
    assert row["bias"]["value"] == pytest.approx(expected["bias"], rel=1e-3, abs=2e-6), row
    assert row["rank_correlation"]["value"] == pytest.approx(
        expected["rank_correlation"], abs=1e-4
    ), row
    assert row["wrong_mask"]["value"] == pytest.approx(expected["wrong_mask"], abs=1e-12), row


def test_every_divergence_and_partition_has_a_row(judged_world):
    approximation = judged_world.result["approximation"]
    assert approximation["truth"] == "full"
    expected = [(divergence, k) for divergence in THRESHOLDS for k in (0, 1, 5, 10, 20)]
    assert [(row["divergence"], row["k"]) for row in approximation["rows"]] == expected
    assert [row["k"] for row in approximation["bracket"]] == [0, 1, 5, 10, 20]


def test_mean_bias_rank_correlation_and_wrong_decisions(judged_world):
    t = judged_world.t
    assert len(t) > len(judged_world.judged)
    for row in judged_world.result["approximation"]["rows"]:
        assert row["threshold"] == THRESHOLDS[row["divergence"]]
        value = column(t, row["divergence"], row["k"])
        assert row["mean"]["value"] == pytest.approx(value.mean(), rel=1e-4), row
        check_comparison(row, comparison(t, row["divergence"], row["k"]))


def test_a_coarser_partition_is_a_lower_bound(judged_world):
    """Binary ≤ top-1 ≤ top-5 ≤ … ≤ full, so every bias is at most 0 and it shrinks with k."""
    for divergence in THRESHOLDS:
        rows = [
            row
            for row in judged_world.result["approximation"]["rows"]
            if row["divergence"] == divergence
        ]
        biases = [row["bias"]["value"] for row in rows]
        assert biases == sorted(biases) and biases[0] < 0 and biases[-1] <= 1e-6
        assert rows[0]["wrong_mask"]["value"] > rows[-1]["wrong_mask"]["value"]


def slack(judged_world, k: int) -> pd.Series:
    """Σ min(μ, π) over the part with several tokens: the others."""
    t, batch = judged_world.t, judged_world.batch
    if not k:
        return np.minimum(1 - t["q"], 1 - t["p"])
    rests = (brute.partition(batch, t, k, policy)[:, -1] for policy in ("rollout", "trainer"))
    return pd.Series(np.minimum(*rests))


def test_the_bracket_contains_the_full_tv(judged_world):
    t = judged_world.t
    widths = []
    for row in judged_world.result["approximation"]["bracket"]:
        low = column(t, "tv", row["k"])
        high = (low + slack(judged_world, row["k"])).clip(upper=1)
        assert (low <= t["tv_full"] + 1e-6).all() and (t["tv_full"] <= high + 1e-6).all()
        assert row["low"]["value"] == pytest.approx(low.mean(), rel=1e-5)
        assert row["high"]["value"] == pytest.approx(high.mean(), rel=1e-5)
        assert row["low"]["value"] <= t["tv_full"].mean() <= row["high"]["value"]
        assert row["threshold"] == 0.15
        decided = (low > 0.15) | (high <= 0.15)
        assert row["decided"]["value"] == pytest.approx(decided.mean(), abs=1e-12)
        widths.append(row["high"]["value"] - row["low"]["value"])
    assert widths == sorted(widths, reverse=True)


def test_without_the_full_divergence_only_means_and_the_bracket_remain(judged_world):
    batch = replace(judged_world.batch, tv_full_T=None, kl_full_T=None)
    approximation = result_of(batch, needs=replace(EVERYTHING, full=False))["approximation"]
    assert approximation["truth"] is None
    for row, with_truth in zip(
        approximation["rows"], judged_world.result["approximation"]["rows"], strict=True
    ):
        assert row["mean"] == with_truth["mean"]
        for name in ("bias", "rank_correlation", "wrong_mask"):
            assert row[name] == {"value": None, "low": None, "high": None, "note": "not measured"}
    assert approximation["bracket"] == judged_world.result["approximation"]["bracket"]


@pytest.mark.parametrize("lacking", ["some tokens", "a batch"])
def test_every_column_is_over_the_tokens_with_a_full_divergence(lacking):
    """So mean − bias is the mean full divergence; the bracket does not need one and is over all
    tokens.
    """
    batches = [world(0, 30), world(1, 30)]
    complete = result_of(*batches)["approximation"]
    names = ("tv_full_T", "kl_full_T")
    if lacking == "a batch":
        batches[1] = replace(batches[1], **dict.fromkeys(names))
    else:
        for batch, name, count in zip(batches, names, (2, 3), strict=True):
            getattr(batch, name)[::count] = float("nan")
    t = pd.concat([brute.counted(batch, EVERYTHING) for batch in batches], ignore_index=True)
    approximation = result_of(*batches)["approximation"]
    assert approximation["truth"] == "full" and approximation["bracket"] == complete["bracket"]
    assert approximation["tokens"] == t["tv_full"].notna().sum() < complete["tokens"] == len(t)
    for row, whole in zip(approximation["rows"], complete["rows"], strict=True):
        counted = t[t[f"{row['divergence']}_full"].notna()]
        assert row["mean"]["value"] == pytest.approx(
            column(counted, row["divergence"], row["k"]).mean(), rel=1e-4
        )
        assert (
            row["wrong_mask"]["value"] != whole["wrong_mask"]["value"]
            or row["wrong_mask"]["value"] == 0
        )
        check_comparison(row, comparison(t, row["divergence"], row["k"]))


@pytest.mark.parametrize("merged", [False, True])
def test_an_infinite_divergence_has_no_mean(merged):
    """π = 0 on the sampled token, with and without an advantage: TV has a mean over all tokens,
    KL does not.
    """
    batch, other = world(0, 30), world(1, 30)
    batch.logp_trainer_T[::9] = -float("inf")
    batch.kl_full_T[::9] = float("inf")
    # Of another token of the vocabulary, which the binary KL does not see
    batch.kl_full_T[4::9] = float("inf")
    t = pd.concat(
        [brute.counted(x, EVERYTHING_BUT_TOP_K) for x in (batch, other)], ignore_index=True
    )
    infinite = int((t["lp"] == -np.inf).sum())
    assert 0 < (t.loc[t["lp"] == -np.inf, "A"] == 0).sum() < infinite
    if merged:
        summary = summarise(other, needs=EVERYTHING_BUT_TOP_K, algorithms=WITHOUT_TOP_K)
        summary.merge(summarise(batch, needs=EVERYTHING_BUT_TOP_K, algorithms=WITHOUT_TOP_K))
        approximation = to_json(summary.result(5))["approximation"]
    else:
        approximation = result_of(
            batch, other, needs=EVERYTHING_BUT_TOP_K, algorithms=WITHOUT_TOP_K
        )["approximation"]
    tv, kl = approximation["rows"]
    assert kl["mean"] == {
        "value": None,
        "low": None,
        "high": None,
        "note": f"infinite on {infinite} tokens",
    }
    assert tv["mean"]["value"] == pytest.approx(column(t, "tv", 0).mean(), rel=1e-4)
    for row in (tv, kl):
        check_comparison(row, comparison(t, row["divergence"], 0))


def test_infinite_on_a_thousand_tokens():
    batch = simple([[-1.0] * 100] * 12, [[-float("inf")] * 100] * 12, [1.0] * 12)
    kl = result_of(batch, needs=PLAIN, algorithms=WITHOUT_TOP_K[:1])["approximation"]["rows"][1]
    assert kl["mean"]["value"] is None and kl["mean"]["note"] == "infinite on 1,200 tokens"


def test_without_top_k_the_binary_divergences_remain(judged_world):
    approximation = result_of(
        judged_world.batch, needs=Needs(True, True, 0, full=True), algorithms=WITHOUT_TOP_K
    )["approximation"]
    with_top_k = [row for row in judged_world.result["approximation"]["rows"] if row["k"] == 0]
    assert approximation["rows"] == with_top_k
    assert [row["k"] for row in approximation["bracket"]] == [0]


@pytest.mark.parametrize(("top_k", "ks"), [(1, [0, 1]), (5, [0, 1, 5]), (7, [0, 1, 5, 7])])
def test_smaller_recordings(top_k, ks):
    result = result_of(
        world(3, 30, top_k=top_k),
        needs=Needs(True, True, top_k, full=True),
        algorithms=WITHOUT_TOP_K,
    )
    assert [row["k"] for row in result["approximation"]["bracket"]] == ks
    assert set(result["sweeps"]) >= {"top_k_tv", "top_k_kl"}


def test_judging_both_signs_counts_each_token_once_except_for_masks(judged_world):
    """Without advantages means are over tokens; a mask judges both signs, and only one of them
    moves away.
    """
    t = judged_world.t
    batch = replace(judged_world.batch, advantage_T=None)
    approximation = result_of(batch, needs=replace(EVERYTHING, advantages=False))["approximation"]
    for row, signed in zip(
        approximation["rows"], judged_world.result["approximation"]["rows"], strict=True
    ):
        assert (
            row["mean"]["value"] == signed["mean"]["value"]
            and row["bias"]["value"] == signed["bias"]["value"]
        )
        value, full = column(t, row["divergence"], row["k"]), t[f"{row['divergence']}_full"]
        wrong = (value > row["threshold"]) != (full > row["threshold"])
        assert row["wrong_mask"]["value"] == pytest.approx(wrong.sum() / (2 * len(t)), abs=1e-12)
