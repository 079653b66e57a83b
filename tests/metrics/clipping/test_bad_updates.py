"""Bad updates: A < 0 and μ − π ≥ δ, over both denominators, by step, and with the reward."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from mismatch_cli.metrics.clipping.bad_updates import DELTAS
from tests.metrics.clipping.world import PLAIN, plain_algorithms, result_of, simple, world

PLAINLY = {"needs": PLAIN, "algorithms": plain_algorithms()}


def test_the_sweep_over_both_denominators(judged_world):
    bad_updates, judged = judged_world.result["bad_updates"], judged_world.judged
    drop = (judged["q"] - judged["p"])[judged["A"] < 0]
    assert [row["delta"] for row in bad_updates["sweep"]] == list(DELTAS)
    assert bad_updates["sweep"][0]["bad"] > bad_updates["sweep"][6]["bad"] > 0
    for row in bad_updates["sweep"]:
        bad = int((drop >= row["delta"]).sum())
        assert row["bad"] == bad
        assert row["over_tokens"]["value"] == pytest.approx(bad / len(judged))
        assert row["over_negative"]["value"] == pytest.approx(bad / len(drop))
    at_half = next(row for row in bad_updates["sweep"] if row["delta"] == 0.5)
    assert bad_updates["delta"] == 0.5
    assert (bad_updates["over_tokens"], bad_updates["over_negative"]) == (
        at_half["over_tokens"],
        at_half["over_negative"],
    )


def test_a_drop_of_exactly_delta_is_bad():
    """μ = 1, π = ½: both are exact in float32."""
    batch = simple([[0.0], [0.0]], [[float(np.log(np.float32(0.5)))], [np.log(0.5001)]], [-1, -1])
    result = result_of(batch, **PLAINLY)
    at_half = next(row for row in result["bad_updates"]["sweep"] if row["delta"] == 0.5)
    assert at_half["bad"] == 1
    blocked = next(row for row in result["algorithms"] if row["name"] == "mask-0.5")["blocked"]
    assert blocked["negative"]["value"] == 0.5


def test_by_step_with_the_reward_of_all_responses(judged_world):
    """The reward of a step is the mean over its responses, including those without an advantage."""
    rewards, steps = judged_world.batch.reward_S, judged_world.batch.step_S
    assert np.isnan(rewards).any()
    rows = judged_world.result["bad_updates"]["by_step"]
    assert [(row["first"], row["last"]) for row in rows] == [(step, step) for step in range(6)]
    assert rows[0]["reward_change"] is None
    for before, row in pairwise(rows):
        assert row["reward_change"] == pytest.approx(
            row["reward"]["value"] - before["reward"]["value"]
        )
    assert any(row["reward_change"] for row in rows)
    for row in rows:
        inside = judged_world.judged[judged_world.judged["step"] == row["first"]]
        bad = int(((inside["A"] < 0) & (inside["q"] - inside["p"] >= 0.5)).sum())
        negative = int((inside["A"] < 0).sum())
        assert (row["tokens"], row["negative"], row["bad"]) == (len(inside), negative, bad)
        assert row["over_tokens"]["value"] == pytest.approx(bad / len(inside))
        assert row["over_negative"]["value"] == pytest.approx(bad / negative)
        assert row["reward"]["value"] == pytest.approx(np.nanmean(rewards[steps == row["first"]]))


def test_correlations_over_the_steps():
    """Both shares are correlated with the reward, its change to the next step, and the size of
    that change.
    """
    bad_updates = result_of(world(4, 240, steps=16), **PLAINLY)["bad_updates"]

    def by_step(name):
        return np.array([row[name]["value"] for row in bad_updates["by_step"]], dtype=float)

    shares, reward = [by_step("over_negative"), by_step("over_tokens")], by_step("reward")
    assert not np.allclose(*shares)
    change = np.diff(reward)
    expected = [
        pair
        for bad in shares
        for pair in ((bad, reward), (bad[:-1], change), (bad[:-1], abs(change)))
    ]
    assert [row["steps"] for row in bad_updates["correlations"]] == 2 * [16, 15, 15]
    assert ["A < 0" in row["of"] for row in bad_updates["correlations"]] == [True] * 3 + [False] * 3
    assert ["A ≠ 0" in row["of"] for row in bad_updates["correlations"]] == [False] * 3 + [True] * 3
    for row, (x, y) in zip(bad_updates["correlations"], expected, strict=True):
        assert row["value"] == pytest.approx(np.corrcoef(x, y)[0, 1])
        assert -1 <= row["low"] <= row["value"] <= row["high"] <= 1
        assert row["of"] and row["with"] and row["note"] is None


def test_correlations_need_a_series():
    correlations = result_of(world(4, 30, steps=2), **PLAINLY)["bad_updates"]["correlations"]
    assert all(row["value"] is None and row["note"] for row in correlations)


def test_without_rewards_there_is_nothing_to_correlate(judged_world):
    bad_updates = result_of(replace(judged_world.batch, reward_S=None))["bad_updates"]
    assert all(
        row["reward"]["value"] is row["reward_change"] is None for row in bad_updates["by_step"]
    )
    assert [row["steps"] for row in bad_updates["correlations"]] == [0] * 6
    assert bad_updates["sweep"] == judged_world.result["bad_updates"]["sweep"]


def test_a_change_of_the_reward_needs_two_rewards_in_a_row(judged_world):
    batch = judged_world.batch
    reward_S = np.where(batch.step_S == 2, float("nan"), batch.reward_S)
    bad_updates = result_of(replace(batch, reward_S=reward_S))["bad_updates"]
    assert [row["reward_change"] is None for row in bad_updates["by_step"]] == [
        True,
        False,
        True,
        True,
        False,
        False,
    ]
    assert [row["steps"] for row in bad_updates["correlations"]] == 2 * [5, 3, 3]


def test_without_advantages_every_token_is_judged_as_negative(judged_world):
    batch = replace(judged_world.batch, advantage_T=None)
    bad_updates = result_of(
        batch, needs=replace(PLAIN, advantages=False), algorithms=plain_algorithms()
    )["bad_updates"]
    counted = batch.loss_mask_T
    drop = (
        np.exp(batch.logp_rollout_T.astype(np.float64))
        - np.exp(batch.logp_trainer_T.astype(np.float64))
    )[counted]
    for row in bad_updates["sweep"]:
        assert row["bad"] == (drop >= row["delta"]).sum()
        assert row["over_negative"]["value"] == pytest.approx(row["bad"] / len(drop))
        assert row["over_tokens"]["value"] is None and row["over_tokens"]["note"]
    assert bad_updates["correlations"] == []
    step_T = np.repeat(batch.step_S, np.diff(batch.offset_S1))[counted]
    for row in bad_updates["by_step"]:
        drop_here = drop[step_T == row["first"]]
        assert (
            row["tokens"] == row["negative"] == len(drop_here)
            and row["bad"] == (drop_here >= 0.5).sum()
        )
        assert row["over_tokens"]["value"] is None
