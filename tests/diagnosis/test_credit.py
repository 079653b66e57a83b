"""Pairs of rewards and advantages, by plain loops, and which groups are remembered."""

from __future__ import annotations

import pickle
from itertools import permutations

import numpy as np
import pytest

from mismatch_cli.base.hashing import hash_keys
from mismatch_cli.diagnosis.credit import Credit, Pairs
from mismatch_cli.diagnosis.sample import NO_LIMIT
from mismatch_cli.rules.batch import TokenBatch
from tests.metrics.batches import make_batch


def batch_of(groups: list[tuple[int, int, list[float], list[float]]]) -> TokenBatch:
    """Of responses of one token: step, prompt, rewards and advantages of each group."""
    steps, prompts, rewards, advantages = [], [], [], []
    for step, prompt, own_rewards, own_advantages in groups:
        steps += [step] * len(own_rewards)
        prompts += [prompt] * len(own_rewards)
        rewards += own_rewards
        advantages += own_advantages
    return make_batch(
        [[-1.0]] * len(steps),
        step=np.array(steps),
        prompt_id=np.array(prompts),
        reward=np.array(rewards),
        advantage=np.array(advantages),
    )


def pairs_of(*groups: tuple[list[float], list[float]]) -> Pairs:
    """Of groups in the order of their hashes."""
    credit = Credit()
    order = np.argsort(hash_keys(np.zeros(len(groups), int), np.arange(len(groups)), seed=5))
    credit.update(batch_of([(0, int(p), *group) for p, group in zip(order, groups, strict=True)]))
    return credit.pairs()


def plain_pairs(rewards: list[float], advantages: list[float]) -> tuple[int, float, bool]:
    if len(set(advantages)) == 1:
        return 0, 0.0, False
    count, against = 0, 0.0
    for first in range(len(rewards)):
        for second in range(len(rewards)):
            if rewards[first] > rewards[second]:
                count += 1
                difference = advantages[first] - advantages[second]
                against += 1.0 if difference < 0 else 0.5 if difference == 0 else 0.0
    fits = False
    for other in permutations(advantages):
        by_reward: dict[float, set[float]] = {}
        for reward, advantage in zip(rewards, other, strict=True):
            by_reward.setdefault(reward, set()).add(advantage)
        levels = [by_reward[reward] for reward in sorted(by_reward)]
        same = all(len(level) == 1 for level in levels)
        ascends = [min(level) for level in levels] == sorted(min(level) for level in levels)
        fits = fits or (same and ascends)
    return count, against, bool(against) and fits


def test_pairs_of_responses_are_those_of_a_plain_loop(rng):
    """Two to five responses with three rewards and advantages."""
    groups, expected = [], []
    for _ in range(120):
        size = int(rng.integers(2, 6))
        rewards = rng.integers(0, 3, size).astype(float).tolist()
        advantages = (rng.integers(0, 3, size) - 1.0).tolist()
        groups.append((rewards, advantages))
        expected.append(plain_pairs(rewards, advantages))
    pairs = pairs_of(*groups)
    columns = (pairs.count_G.tolist(), pairs.against_G.tolist(), pairs.permuted_G.tolist())
    assert list(zip(*columns, strict=True)) == expected
    count, against, _ = np.array(expected).T
    assert pairs.share == against.sum() / count.sum()
    assert pairs.permuted_G.dtype == bool and 10 < pairs.permuted_G.sum() < 110


def test_rewards_and_advantages_are_the_same_but_for_rounding():
    """Up to a hundred-thousandth of their spread: 100 and 1,000."""
    for nats, against in ((0.009, 0.5), (0.011, 1.0)):
        pairs = pairs_of(([100.0, 0.0, 50.0], [0.0, nats, 1000.0]))
        assert pairs.against_G.tolist() == [against + 1.0]
    for reward, count in ((0.0009, 2), (0.0011, 3)):
        pairs = pairs_of(([0.0, reward, 100.0], [0.0, 1.0, 2.0]))
        assert pairs.count_G.tolist() == [count]
    for nats, permuted in ((0.009, True), (0.011, False)):
        pairs = pairs_of(([0.0, 0.0, 100.0], [1000.0, nats, 0.0]))
        assert pairs.permuted_G.tolist() == [permuted]


def test_without_a_group_or_with_one_advantage_for_all_there_are_no_pairs():
    empty = Credit().pairs()
    assert [len(column) for column in (empty.count_G, empty.against_G, empty.permuted_G)] == [0] * 3
    assert empty.share == 0.0 and pairs_of(([0.0, 1.0], [1.0, 0.0])).share == 1.0
    equal = pairs_of(([0.0, 1.0], [0.5, 0.5]))
    assert (equal.count_G.tolist(), equal.against_G.tolist(), equal.share) == ([0], [0], 0)


def test_a_response_has_the_advantage_of_its_trained_tokens_unless_they_differ():
    """One per response, up to a ten-thousandth of the largest; others are counted."""
    rows = [
        ([2.0, 9.0, 2.0], [True, False, True]),
        ([np.nan, -1.0], [True, True]),
        ([1.0, 1.00009], [True, True]),
        ([-1.0, -1.0001001], [True, True]),
        ([3.0, 2.0], [True, True]),
        ([4.0], [False]),
        ([-5.0, -4.0], [True, True]),
        ([0.0, 0.0], [True, True]),
        ([6.0, 5.0], [True, True]),
        ([0.0, 1e-5], [True, True]),
    ]
    rewards = np.array([1.0, 0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, np.nan, 8.0])
    batch = make_batch(
        [[-1.0] * len(values) for values, _ in rows],
        advantage=[values for values, _ in rows],
        loss_mask=[mask for _, mask in rows],
        reward=rewards,
        prompt_id=np.zeros(len(rows)),
    )
    credit = Credit()
    credit.update(batch)
    assert credit.varying == 4, "the fourth, the fifth, the seventh and the last"
    pairs = credit.pairs()
    # Rewards 1, 0, 2 and 7 with advantages 2, −1, 1.00009 and 0
    assert (pairs.count_G.tolist(), pairs.against_G.tolist()) == ([6], [3])
    credit.update(batch)
    assert credit.varying == 8


def test_a_batch_without_rewards_or_advantages_adds_nothing():
    credit = Credit()
    credit.update(make_batch([[-1.0]], reward=np.ones(1)))
    credit.update(make_batch([[-1.0]], advantage=np.ones(1)))
    assert len(credit.pairs().count_G) == 0 and credit.varying == 0


SIZES = [2, 3, 2, 4, 3, 2, 5]


@pytest.mark.parametrize("most", [2, 5, 7, 12, 20, 21, 40])
def test_the_groups_with_the_smallest_hashes_are_remembered_whole(most, rng):
    """As many as fit, in one batch or in parts that are merged; some know the limit before."""
    groups = []
    for number, size in enumerate(SIZES):
        rewards = np.arange(size).astype(float).tolist()
        groups.append((number % 2, number // 2, rewards, rewards))
    steps, prompts, _, _ = zip(*groups, strict=True)
    order = np.argsort(hash_keys(np.array(steps), np.array(prompts), seed=5)).tolist()
    expected, responses = [], 0
    for number in order:
        responses += SIZES[number]
        # The limit is the hash of the response that no longer fits
        if responses > most:
            break
        expected.append(SIZES[number] * (SIZES[number] - 1) // 2)
    whole, merged = Credit(most), Credit(most)
    whole.update(batch_of(groups))
    for turn, number in enumerate(rng.permutation(len(groups)).tolist()):
        part = Credit(most, merged.limit if turn % 2 else NO_LIMIT)
        part.update(batch_of([groups[number]]))
        part.varying = 1
        merged.merge(pickle.loads(pickle.dumps(part)))
    assert merged.varying == len(groups)
    for credit in (whole, merged):
        assert credit.pairs().count_G.tolist() == expected


def test_a_group_at_the_limit_is_not_remembered():
    own = int(hash_keys(np.array([0]), np.array([3]), seed=5)[0])
    group = (0, 3, [0.0, 1.0], [0.0, 1.0])
    for limit, groups in ((own, 0), (own + 1, 1)):
        credit = Credit(limit=limit)
        credit.update(batch_of([group]))
        assert len(credit.pairs().count_G) == groups
        earlier, later = Credit(limit=limit), Credit()
        later.update(batch_of([group]))
        earlier.merge(later)
        assert len(earlier.pairs().count_G) == groups and earlier.limit == limit
