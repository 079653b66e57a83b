"""Extreme traces: no crash, no NaN, and null with a note for missing numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from mismatch_cli.base.json_form import to_json
from mismatch_cli.metrics.clipping.masked_slice import Needs
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.batch import TokenBatch
from tests.metrics.clipping import brute
from tests.metrics.clipping.world import (
    EVERYTHING,
    PLAIN,
    checked,
    plain_algorithms,
    result_of,
    row_of,
    simple,
    summarise,
    world,
)

INF = float("inf")
PLAINLY = {"needs": PLAIN, "algorithms": plain_algorithms()}


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_one_token(advantage):
    batch = simple([[-1.0]], [[-0.2]], [advantage], reward_S=np.array([1.0]))
    result = checked(batch, **PLAINLY, theory=True)
    assert (
        result["counts"]["tokens"] == 1
        and result["counts"]["prompts"] == 1
        and result["counts"]["steps"] == 1
    )
    assert row_of(result, "grpo-clip-higher")["blocked"]["all"]["value"] == (
        1.0 if advantage > 0 else 0.0
    )
    other = "negative" if advantage > 0 else "positive"
    assert row_of(result, "grpo-clip-higher")["blocked"][other]["value"] is None
    assert result["theory"]["correction"]["value"] == 0 and result["theory"]["longest"] == 1


def test_one_token_of_everything():
    batch = world(0, 1)
    batch = replace(
        batch, loss_mask_T=np.arange(batch.num_tokens) == 0, advantage_T=np.ones(batch.num_tokens)
    )
    result = checked(batch, theory=True)
    assert result["counts"]["tokens"] == 1
    assert {row["rank_correlation"]["value"] for row in result["approximation"]["rows"]} == {None}


def test_only_zero_advantages():
    """Nothing is judged, so every share is null; counts and the divergences over all counted
    tokens remain.
    """
    batch = world(0, 30)
    result = checked(replace(batch, advantage_T=np.zeros(batch.num_tokens)), theory=True)
    counts = result["counts"]
    assert counts["tokens"] == counts["positive"] == counts["negative"] == counts["prompts"] == 0
    # None of them has a judged token
    assert counts["zero_advantage"] > 0 and counts["responses"] == 0
    for row in result["algorithms"]:
        assert {estimate["value"] for estimate in row["blocked"].values()} == {None}
        assert {estimate["value"] for estimate in row["lost"].values()} == {None}
        assert (
            row["blocked_tokens"] == {"positive": [], "negative": []} and row["by_position"] == []
        )
    assert result["approximation"]["rows"][0]["mean"]["value"] > 0
    assert result["theory"]["surrogate"]["value"] is not None
    assert (
        result["overlap"]["examples"] == []
        and result["bad_updates"]["over_tokens"]["value"] is None
    )


def test_everything_masked():
    batch = world(0, 30)
    result = checked(
        replace(batch, loss_mask_T=np.zeros(batch.num_tokens, dtype=bool)), theory=True
    )
    assert result["counts"]["tokens"] == 0 and result["counts"]["masked"] == batch.num_tokens
    assert result["theory"] is None


def test_an_empty_batch_and_empty_responses(take_responses):
    nothing = take_responses(world(0, 5), [])
    result = checked(nothing, world(0, 30))
    assert result["counts"]["tokens"] == result_of(world(0, 30))["counts"]["tokens"]
    empty = simple([[], [-1.0], []], [[], [-0.2], []], [1.0, 1.0, 1.0])
    assert checked(empty, **PLAINLY)["counts"]["tokens"] == 1


def overflowing() -> TokenBatch:
    """One token in 20 with log π − log μ = 89.9: r = 1e39 does not fit a float32."""
    logq, logp = [[-1.0, -90.0]] * 10, [[-1.5, -0.1]] + [[-1.5, -91.0]] * 9
    return simple(
        logq, logp, [1.0] * 5 + [-1.0] * 5, prompt_id_S=np.arange(10), reward_S=np.ones(10)
    )


def test_an_infinite_ratio():
    """It is blocked as it must be; the lost weight has no number then, and says so."""
    result = checked(overflowing(), **PLAINLY, theory=True)
    clipped = row_of(result, "grpo-clip-higher")
    assert clipped["blocked"]["positive"]["value"] == pytest.approx(1 / 10)
    # 0.61 and 0.37 are both below 0.8
    assert clipped["blocked"]["negative"]["value"] == pytest.approx(1.0)
    assert clipped["lost"]["all"]["value"] is None and clipped["lost"]["all"]["note"]
    assert clipped["lost"]["positive"]["value"] is None and clipped["lost"]["positive"]["note"]
    assert clipped["lost"]["negative"]["value"] == pytest.approx(1.0)
    assert row_of(result, "reinforce")["lost"]["all"]["value"] == 0
    assert row_of(result, "dppo-binary-tv")["blocked"]["positive"]["value"] == pytest.approx(1 / 10)
    (token,) = clipped["blocked_tokens"]["positive"]
    assert token["ratio"] is None and token["pi"] == pytest.approx(np.exp(-0.1))
    assert result["sweeps"]["ratio_clip"][-1]["blocked"]["value"] > 0


def test_an_infinite_ratio_under_a_cap():
    result = checked(overflowing(), **PLAINLY)
    assert row_of(result, "pg-tis")["lost"]["capped"]["value"] is None
    assert result["sweeps"]["cap"][-1]["share"]["value"] == pytest.approx(1 / 20)
    assert {row["lost"]["value"] for row in result["sweeps"]["cap"]} == {None}


def test_an_infinite_ratio_without_advantages_and_with_everything():
    batch = overflowing()
    needs = replace(PLAIN, advantages=False)
    checked(
        replace(batch, advantage_T=None), needs=needs, algorithms=plain_algorithms(), theory=True
    )
    batch = world(0, 30)
    logq = batch.logp_rollout_T.copy()
    logq[::7] = -120.0
    result = checked(replace(batch, logp_rollout_T=logq), theory=True)
    assert row_of(result, "grpo-clip-higher")["blocked"]["positive"]["value"] > 0


def test_an_infinite_ratio_in_another_shard():
    first, other = summarise(overflowing(), **PLAINLY), summarise(world(0, 30), **PLAINLY)
    first.merge(other)
    result = to_json(first.result(5))
    json.dumps(result, allow_nan=False)
    assert row_of(result, "grpo-clip-higher")["lost"]["all"]["value"] is None


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    "what", ["infinite ratio", "infinite ratio, some A = 0", "out of support", "infinite full KL"]
)
def test_no_warning_reaches_the_terminal(what):
    """A null with a note says enough: numpy does not repeat it on stderr."""
    batch = overflowing()
    if what == "infinite ratio, some A = 0":
        batch.advantage_T[:2] = 0
    if what == "out of support":
        batch.logp_trainer_T[:2] = -INF
    needs = PLAIN
    if what == "infinite full KL":
        infinite_T = np.full_like(batch.logp_trainer_T, INF)
        batch = replace(batch, tv_full_T=np.ones_like(infinite_T), kl_full_T=infinite_T)
        batch.logp_trainer_T[:2] = -INF
        needs = replace(PLAIN, full=True)
    result_of(batch, needs=needs, algorithms=plain_algorithms(), theory=True)


def excluding() -> TokenBatch:
    """Twelve responses of two tokens, the first of which the trainer excludes."""
    logq, logp = [[-0.5, -1.0]] * 12, [[-INF, -1.0]] * 12
    return simple(logq, logp, [1.0] * 6 + [-1.0] * 6, reward_S=np.ones(12))


def test_examples_out_of_support_are_json():
    """JSON has no number for log π = −inf: it is null, as in the worst tokens of a summary."""
    result = checked(excluding(), **PLAINLY, theory=True)
    assert None in {row["logp_current"] for row in result["overlap"]["examples"]}


def test_out_of_support():
    """log π = −inf: r = 0, a negative token is blocked by every one-sided mask, a positive one
    by none.
    """
    result = result_of(excluding(), **PLAINLY, theory=True)
    for name in ("grpo-clip-higher", "dppo-binary-tv", "dppo-binary-kl", "mask-0.5", "relax-both"):
        row = row_of(result, name)
        assert row["blocked"]["positive"]["value"] == 0, name
        assert row["blocked"]["negative"]["value"] == 0.5, name
        assert row["lost"]["negative"]["value"] == 0, name  # r·|A| = 0: nothing is lost
        (token,) = [row for row in row["blocked_tokens"]["negative"] if row["blocked"]][:1]
        assert token["pi"] == 0 and token["ratio"] == 0
    assert row_of(result, "ipo")["blocked"]["all"]["value"] == 0.5
    assert result["counts"]["out_of_support"] == 12 and result["counts"]["tokens"] == 24
    assert row_of(result, "grpo-clip-higher")["by_mu"][7]["blocked"]["negative"]["value"] == 1.0
    assert result["theory"]["difference"]["value"] == pytest.approx(-1.0)
    assert result["theory"]["weight_max"] == 0 and result["theory"]["ess"]["value"] is None


def test_out_of_support_with_everything():
    batch = world(0, 40)
    logp, topk = batch.logp_trainer_T.copy(), batch.topk_logp_trainer_TK.copy()
    logp[::9], topk[::5, 3] = -INF, -INF
    batch = replace(batch, logp_trainer_T=logp, topk_logp_trainer_TK=topk)
    batch.kl_full_T[::5] = INF
    result = result_of(batch, theory=True)
    counted = batch.loss_mask_T & np.isfinite(batch.logp_recomputed_T)
    assert result["counts"]["out_of_support"] == (counted & (logp == -INF)).sum() > 0
    assert (~counted & (logp == -INF)).any()
    result["overlap"]["examples"] = []  # their log π = −inf is another test's concern
    json.dumps(result, allow_nan=False)
    needs = replace(EVERYTHING, top_k=0, topk_recomputed=False)
    t = brute.counted(batch, needs)
    judged = t[t["A"] != 0]
    for name in (
        "grpo-clip-higher",
        "minirl",
        "dppo-binary-tv",
        "dppo-binary-kl",
        "mask-0.5",
        "ipo",
        "ppo",
        "gspo",
    ):
        assert row_of(result, name)["blocked"]["all"]["value"] == pytest.approx(
            judged[name].mean()
        ), name


def test_at_equal_weights_only_masks_on_the_engine_gap_block():
    """The recomputed policy is the trainer: r′ = 1, so only masks on ρ block anything."""
    batch = world(0, 40)
    batch = replace(
        batch,
        logp_recomputed_T=batch.logp_trainer_T,
        topk_logp_recomputed_TK=batch.topk_logp_trainer_TK,
    )
    result = checked(batch)
    for name in ("minirl", "ppo", "gspo", "dppo-topk-tv-recompute", "ppo-opsm"):
        assert row_of(result, name)["blocked"]["all"]["value"] == 0, name
    t = brute.counted(batch, EVERYTHING)
    shares = [
        t.loc[t["A"] != 0, name].mean() for name in ("ppo-icepop", "ppo-mis", "ppo-mis-geometric")
    ]
    assert shares[0] > 0 and shares[2] > 0.5
    for name, share in zip(("ppo-icepop", "ppo-mis", "ppo-mis-geometric"), shares, strict=True):
        assert row_of(result, name)["blocked"]["all"]["value"] == pytest.approx(share), name


def test_no_algorithm_and_many():
    assert checked(world(0, 30), needs=PLAIN, algorithms=())["algorithms"] == []
    many = tuple(parse_algorithm(f"dppo-binary-tv:max_tv={k / 100}") for k in range(1, 65))
    result = checked(world(0, 30), needs=PLAIN, algorithms=many)
    shares = [row["blocked"]["all"]["value"] for row in result["algorithms"]]
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1]


def test_a_step_without_a_judged_token_and_negative_free_steps():
    batch = simple(
        [[-1.0]] * 3, [[-0.2]] * 3, [0.0, 1.0, -1.0], step_S=np.arange(3, dtype=np.int32)
    )
    result = checked(batch, **PLAINLY)
    rows = row_of(result, "grpo-clip-higher")["by_step"]
    assert [(row["first"], row["tokens"], row["blocked"]["all"]["value"]) for row in rows] == [
        (0, 0, None),
        (1, 1, 1),
        (2, 1, 0),
    ]
    assert [row["over_negative"]["value"] for row in result["bad_updates"]["by_step"]] == [
        None,
        None,
        0,
    ]


def test_smaller_recordings_and_own_k():
    """Five ranks support an algorithm that needs five."""
    algorithms = (
        parse_algorithm("dppo-topk-tv:k=5"),
        parse_algorithm("dppo-topk-kl:k=1,replace_last=true"),
        parse_algorithm("dppo-binary-kl"),
    )
    batch = world(0, 40, top_k=5)
    result = checked(
        batch, needs=Needs(advantages=True, recomputed=False, top_k=5), algorithms=algorithms
    )
    t = brute.counted(
        world(0, 40), replace(EVERYTHING, recomputed=False, full=False, topk_recomputed=False)
    )
    judged = t[t["A"] != 0]
    expected = ((judged["tv5"] > 0.2) & (judged["A"] * (judged["p"] - judged["q"]) > 0)).mean()
    assert (
        result["algorithms"][0]["blocked"]["all"]["value"] == pytest.approx(expected)
        and expected > 0
    )
    # k = 1 with replacement is binary
    assert result["algorithms"][1]["blocked"] == result["algorithms"][2]["blocked"]


def test_a_cap_is_compared_and_subtracted_in_float32():
    """1.1 is 1.0996 in float16; r = 2 and 1, both kept."""
    batch = simple([[-1.0, -1.0]], [[-1.0 + np.log(2.0), -1.0]], [1.0])
    result = result_of(batch, needs=PLAIN, algorithms=[parse_algorithm("pg-tis:cap=1.1")])
    (row,) = result["algorithms"]
    assert row["lost"]["capped"]["value"] == pytest.approx((2 - np.float32(1.1)) / 3, rel=1e-6)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_infinite_ratio_loses_nothing_to_a_floor():
    """Only the floor changes weights: of r = e⁻¹ it adds 0.5 − e⁻¹ to e⁻¹ + e^−½."""
    result = result_of(overflowing(), needs=PLAIN, algorithms=[parse_algorithm("pg-is:floor=0.5")])
    lost = result["algorithms"][0]["lost"]
    assert lost["capped"]["value"] == lost["positive"]["value"] == 0
    added = 0.5 - np.exp(-1)
    assert lost["negative"]["value"] == pytest.approx(-added / (np.exp(-1) + np.exp(-0.5)))


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_cap_beyond_float32_caps_nothing():
    batch = simple([[-1.0, -2.0]], [[-0.2, -0.1]], [1.0], reward_S=np.array([1.0]))
    algorithms = (parse_algorithm("pg-tis:cap=1e39"), parse_algorithm("pg-is"))
    result = result_of(batch, needs=PLAIN, algorithms=algorithms)
    assert [row["lost"]["all"]["value"] for row in result["algorithms"]] == [0.0, 0.0]


def test_mean_probabilities_are_those_of_the_blocked_and_of_the_kept():
    """Three tokens with A > 0: the clip blocks the one whose ratio is above 1.28."""
    mu_T, ratio_T = np.array([0.1, 0.4, 0.8]), np.array([2.0, 1.1, 1.0])
    logq_T = np.log(mu_T)
    batch = simple([logq_T.tolist()], [(logq_T + np.log(ratio_T)).tolist()], [1.0])
    row = row_of(result_of(batch, **PLAINLY), "grpo-clip-higher")
    assert row["mu_blocked"]["value"] == pytest.approx(0.1, rel=1e-5)
    assert row["mu_kept"]["value"] == pytest.approx(0.6, rel=1e-5)


def test_both_signs_within_a_response_lose_their_own_weight():
    """Ratios 2 and 1/2 with A = ±1: of each sign, PPO blocks one token and keeps another at 1."""
    ratios = np.array([2.0, 1.0, 0.5, 1.0])
    signs = np.array([1.0, 1.0, -1.0, -1.0])
    logq = np.full(4, -1.0)
    batch = simple(
        [logq.tolist()] * 12, [(logq + np.log(ratios)).tolist()] * 12, [0.0] * 12,
        advantage_T=np.tile(signs, 12),
    )  # fmt: skip
    lost = row_of(checked(batch, **PLAINLY), "ppo-rollout")["lost"]
    assert lost["positive"]["value"] == pytest.approx(2 / 3)
    assert lost["negative"]["value"] == pytest.approx(0.5 / 1.5)
    assert lost["all"]["value"] == lost["masked"]["value"] == pytest.approx(2.5 / 4.5)
