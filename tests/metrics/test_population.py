"""Distinct prompts and groups without signal, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.metrics.population import DistinctPrompts, RewardGroups


def test_prompts_are_counted_once_and_exactly() -> None:
    one, other = DistinctPrompts(), DistinctPrompts()
    one.update(np.array([1, 2, 3]))
    other.update(np.array([3, 2, 9]))
    one.merge(other)
    assert one.result() == 4


def test_more_prompts_than_fit_are_estimated() -> None:
    sketch = DistinctPrompts(size=4096)
    for start in range(0, 60_000, 10_000):
        sketch.update(np.arange(start, start + 15_000))
    assert len(sketch.hashes) == 4096
    assert sketch.result() == pytest.approx(65_000, rel=0.05)


def _groups(make_batch, rewards, prompts, steps=None, size: int = 2**16) -> RewardGroups:
    count = len(rewards)
    batch = make_batch([[-1.0]] * count, reward=rewards, prompt_id=prompts, step=steps or [0] * count)
    groups = RewardGroups(size)
    groups.update(batch)
    return groups


def test_groups_without_signal(make_batch) -> None:
    # prompt 1: equal, 2: mixed, 3: alone (no group), 4: not graded
    groups = _groups(make_batch, [1, 1, 0, 1, 0, float("nan"), float("nan")], [1, 1, 2, 2, 3, 4, 4])
    assert groups.jackknife().estimate(3).value == 0.5


def test_a_prompt_in_two_steps_is_two_groups(make_batch) -> None:
    assert _groups(make_batch, [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]).jackknife().estimate(1).value == 1
    assert _groups(make_batch, [1, 1, 0, 0], [1, 1, 1, 1]).jackknife().estimate(1).value == 0


def test_a_group_may_lie_in_two_shards(make_batch) -> None:
    one, other = _groups(make_batch, [1, 0], [1, 2]), _groups(make_batch, [1, 1], [1, 2])
    one.merge(other)
    assert one.jackknife().estimate(2).value == 0.5


def test_groups_beyond_the_bound_are_a_sample(make_batch) -> None:
    rng = np.random.default_rng(0)
    whole = RewardGroups(size=500)
    for part in range(10):
        prompts = np.repeat(np.arange(1000), 2) + 1000 * part
        whole.merge(_groups(make_batch, rng.integers(0, 2, 2000).tolist(), prompts.tolist(), size=500))
    estimate = whole.jackknife().estimate(10_000)
    assert len(whole.hash_G) == 500
    assert estimate.value == pytest.approx(0.5, abs=0.1) and estimate.low < 0.5 < estimate.high
