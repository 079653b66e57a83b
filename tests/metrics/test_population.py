"""Distinct prompts and groups without signal, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.hashing import GROUPS, prompt_groups
from mismatch_cli.metrics.population import (
    Curation,
    DistinctPrompts,
    RewardGroups,
    accuracy_by_prompt,
)
from tests.studies.written import write_trace


def test_prompts_are_counted_once_and_exactly() -> None:
    first, other = DistinctPrompts(), DistinctPrompts()
    first.update(np.array([1, 2, 3]))
    other.update(np.array([3, 2, 9]))
    first.merge(other)
    assert first.result() == 4


def test_more_prompts_than_fit_are_estimated() -> None:
    sketch = DistinctPrompts(size=4096)
    for start in range(0, 60_000, 10_000):
        sketch.update(np.arange(start, start + 15_000))
    assert len(sketch.hashes) == 4096
    assert sketch.result() == pytest.approx(65_000, rel=0.05)


def test_as_many_prompts_as_fit_may_be_more() -> None:
    """Three hashes kept, of which the largest is in the middle: two for each half."""
    sketch = DistinctPrompts(3)
    sketch.update(np.array([1, 2]))
    assert sketch.exact and sketch.result() == 2
    sketch.hashes = np.array([2**61, 2**62, 2**63], dtype=np.uint64)
    assert not sketch.exact and sketch.result() == 4
    assert DistinctPrompts().size == RewardGroups().size == 65_536


def _groups(make_batch, rewards, prompts, steps=None, size: int = 2**16) -> RewardGroups:
    count = len(rewards)
    batch = make_batch(
        [[-1.0]] * count, reward=rewards, prompt_id=prompts, step=steps or [0] * count
    )
    groups = RewardGroups(size)
    groups.update(batch)
    return groups


def test_groups_without_signal(make_batch) -> None:
    # prompt 1: equal, 2: mixed, 3: alone (no group), 4: not graded
    groups = _groups(make_batch, [1, 1, 0, 1, 0, float("nan"), float("nan")], [1, 1, 2, 2, 3, 4, 4])
    assert groups.jackknife().estimate(3).value == 0.5


def test_the_share_without_each_prompt(make_batch) -> None:
    """Prompt 1 has equal rewards and prompts 2 and 5 have not; no other group has prompts."""
    groups = _groups(make_batch, [1, 1, 0, 1, 1, 0], [1, 1, 2, 2, 5, 5])
    assert groups.jackknife().value == pytest.approx(1 / 3)
    of_1, of_2, of_5 = prompt_groups(np.array([1, 2, 5])).tolist()
    assert len({of_1, of_2, of_5}) == 3
    expected_G = np.full(GROUPS, np.nan)
    expected_G[[of_1, of_2, of_5]] = (0, 0.5, 0.5)
    np.testing.assert_array_equal(groups.jackknife().without_G, expected_G)


def test_a_prompt_in_two_steps_is_two_groups(make_batch) -> None:
    assert (
        _groups(make_batch, [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]).jackknife().estimate(1).value
        == 1
    )
    assert _groups(make_batch, [1, 1, 0, 0], [1, 1, 1, 1]).jackknife().estimate(1).value == 0


def test_a_group_may_span_two_shards(make_batch) -> None:
    first, other = _groups(make_batch, [1, 0], [1, 2]), _groups(make_batch, [1, 1], [1, 2])
    first.merge(other)
    assert first.jackknife().estimate(2).value == 0.5


def test_groups_beyond_the_bound_are_a_sample(make_batch) -> None:
    rng = np.random.default_rng(0)
    whole = RewardGroups(size=500)
    for part in range(10):
        prompts = np.repeat(np.arange(1000), 2) + 1000 * part
        whole.merge(
            _groups(make_batch, rng.integers(0, 2, 2000).tolist(), prompts.tolist(), size=500)
        )
    estimate = whole.jackknife().estimate(10_000)
    assert len(whole.hash_G) == 500
    assert estimate.value == pytest.approx(0.5, abs=0.1) and estimate.low < 0.5 < estimate.high


def test_a_problem_may_span_several_shards(make_batch, tmp_path):
    shards = [
        make_batch([[-1.0]] * 3, prompt_id=[3, 7, 3], reward=[1.0, 0.0, 0.0]),
        make_batch([[-1.0]] * 3, prompt_id=[3, 3, 7], reward=[0.0, 0.0, 0.5]),
    ]
    trace = write_trace(tmp_path / "t", *shards)
    assert accuracy_by_prompt(trace) == {3: 0.25, 7: 0.25}


@pytest.mark.parametrize(("reward", "shown"), [(1.5, "1.5"), (-0.25, "-0.25")])
def test_a_reward_outside_0_to_1_is_no_accuracy(make_batch, tmp_path, reward, shown):
    trace = write_trace(tmp_path / "t", make_batch([[-1.0]] * 3, reward=[0.0, reward, 1.0]))
    with pytest.raises(MismatchError, match=f"a reward of {shown}, but an accuracy must be from"):
        accuracy_by_prompt(trace)


def test_an_accuracy_is_over_graded_responses(make_batch, tmp_path):
    """A reward may decline some responses, which then are neither right nor wrong."""
    nan = float("nan")
    batch = make_batch([[-1.0]] * 5, prompt_id=[3, 7, 3, 3, 7], reward=[1.0, 0.5, nan, 0.0, nan])
    assert accuracy_by_prompt(write_trace(tmp_path / "t", batch)) == {3: 0.5, 7: 0.5}
    none = make_batch([[-1.0]] * 2, prompt_id=[3, 7], reward=[nan, nan])
    with pytest.raises(MismatchError, match="--reward declined every response"):
        accuracy_by_prompt(write_trace(tmp_path / "none", none))


def test_without_rewards_there_is_no_accuracy(make_batch, tmp_path):
    with pytest.raises(MismatchError, match="has no rewards"):
        accuracy_by_prompt(write_trace(tmp_path / "t", make_batch([[-1.0]])))


def test_both_ends_of_the_range_are_kept():
    accuracy = {0: 7 / 40, 1: 8 / 40, 2: 0.5, 3: 32 / 40, 4: 33 / 40}
    held_out = {1: 7 / 40, 2: 8 / 40, 3: 33 / 40}
    curation = Curation((0.2, 0.8), 40, 40, accuracy, held_out)
    assert curation.kept == [1, 2, 3]
    assert curation.confirmed == [2]
