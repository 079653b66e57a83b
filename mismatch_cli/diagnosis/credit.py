"""Reward and advantage of each response, beside those of the same prompt and step.

Letters: `_R` the responses that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.base.hashing import hash_keys
from mismatch_cli.diagnosis.sample import NO_LIMIT
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.rules.batch import TokenBatch

MOST_RESPONSES = 2**18  # to remember; of a longer trace, those of the groups with smallest hashes
_VARIES = 1e-4  # of the largest |A| of a response: beyond rounding, it is not one advantage
_SAME = 1e-5  # of the spread of a group: rounding of a reward or an advantage


@dataclass(frozen=True)
class Pairs:
    """Pairs of responses to one prompt whose rewards differ, by group of responses."""

    count_G: np.ndarray
    # Of these, where the smaller reward has the larger advantage; an equal one counts half
    against_G: np.ndarray
    permuted_G: np.ndarray  # bool, the group's advantages would fit its rewards in another order

    @property
    def share(self) -> float:
        return float(self.against_G.sum() / max(1, self.count_G.sum()))


class Credit(Accumulator):
    """Keeps all responses of the groups (a prompt in a step) with the smallest hashes.

    Hashes of `limit` or above are not remembered; a `limit` may be passed in if everything below it
    is complete.
    """

    def __init__(self, most_responses: int = MOST_RESPONSES, limit: int = NO_LIMIT) -> None:
        self._most = most_responses
        self.limit = limit
        self._groups = [np.zeros(0, dtype=np.uint64)]
        self._values = [np.zeros((0, 2))]  # reward, advantage
        self._responses = 0
        self.varying = 0  # responses with several advantages

    def update(self, batch: TokenBatch) -> None:
        """Add the responses of one table that have a reward and one advantage."""
        if batch.reward_S is None or batch.advantage_T is None:
            return
        group_S = hash_keys(batch.step_S, batch.prompt_id_S, seed=5)
        advantage_S, varies_S = _advantages(batch)
        complete_S = np.isfinite(batch.reward_S) & np.isfinite(advantage_S)
        self.varying += int((complete_S & varies_S).sum())
        new_S = complete_S & ~varies_S & self._is_below_limit(group_S)
        values_S2 = np.stack([batch.reward_S.astype(np.float64), advantage_S], axis=1)
        self._groups.append(group_S[new_S])
        self._values.append(values_S2[new_S])
        self._responses += int(new_S.sum())
        if self._responses > 2 * self._most:
            self._forget()

    def merge(self, other: Credit) -> None:
        """Add what another remembers: groups below both limits."""
        self.limit = min(self.limit, other.limit)
        self.varying += other.varying
        group_R = np.concatenate(self._groups + other._groups)
        values_R2 = np.concatenate(self._values + other._values)
        below_R = self._is_below_limit(group_R)
        self._remember(group_R[below_R], values_R2[below_R])
        if self._responses > 2 * self._most:
            self._forget()

    def _remember(self, group_R: np.ndarray, values_R2: np.ndarray) -> None:
        self._groups = [group_R]
        self._values = [values_R2]
        self._responses = len(group_R)

    def _is_below_limit(self, group_R: np.ndarray) -> np.ndarray:
        return group_R < np.uint64(min(self.limit, NO_LIMIT - 1))

    def _forget(self) -> None:
        """Keep whole groups, those with the smallest hashes."""
        group_R = np.concatenate(self._groups)
        order = np.argsort(group_R, kind="stable")
        group_R, values_R2 = group_R[order], np.concatenate(self._values)[order]
        if len(group_R) > self._most:
            self.limit = int(group_R[self._most])
            below_R = self._is_below_limit(group_R)
            group_R, values_R2 = group_R[below_R], values_R2[below_R]
        self._remember(group_R, values_R2)

    def pairs(self) -> Pairs:
        """Compare the responses of each group with each other."""
        self._forget()
        group_R, values_R2 = self._groups[0], self._values[0]
        if not len(group_R):
            return Pairs(np.zeros(0), np.zeros(0), np.zeros(0, dtype=bool))
        starts = np.flatnonzero(np.diff(group_R, prepend=np.uint64(NO_LIMIT - 1)))
        groups = np.split(values_R2, starts[1:])
        count_G, against_G, permuted_G = np.array(list(map(_compare_group, groups))).T
        return Pairs(count_G, against_G, permuted_G.astype(bool))


def _advantages(batch: TokenBatch) -> tuple[np.ndarray, np.ndarray]:
    """The advantage of each response, NaN without one; whether it varies over its trained
    tokens.
    """
    assert batch.advantage_T is not None
    trained_T = batch.loss_mask_T & np.isfinite(batch.advantage_T)
    response_N = np.repeat(np.arange(batch.num_responses), np.diff(batch.offset_S1))[trained_T]
    advantage_N = batch.advantage_T[trained_T].astype(np.float64)
    low_S = np.full(batch.num_responses, np.inf)
    high_S = np.full(batch.num_responses, -np.inf)
    np.minimum.at(low_S, response_N, advantage_N)
    np.maximum.at(high_S, response_N, advantage_N)
    size_S = np.maximum(np.abs(low_S), np.abs(high_S))
    has_any_S = low_S <= high_S
    with np.errstate(invalid="ignore"):
        varies_S = has_any_S & (high_S - low_S > _VARIES * size_S)
    return np.where(has_any_S, high_S, np.nan), varies_S


def _compare_group(values_R2: np.ndarray) -> tuple[int, float, bool]:
    """The pairs of a group with different rewards, those that contradict them, and whether another
    order would fit; none in a group with one advantage for all.
    """
    reward_R, advantage_R = values_R2.T
    same_reward = _SAME * max(float(np.ptp(reward_R)), 1e-12)
    spread = float(np.ptp(advantage_R))
    if not spread > 0:
        return 0, 0.0, False
    higher_RR = np.subtract.outer(reward_R, reward_R) > same_reward
    difference_RR = np.subtract.outer(advantage_R, advantage_R)
    lower_RR = difference_RR < -_SAME * spread
    tied_RR = np.abs(difference_RR) <= _SAME * spread
    against = float((higher_RR & lower_RR).sum() + 0.5 * (higher_RR & tied_RR).sum())
    # In the order of the rewards, equal rewards must meet equal advantages
    ties = np.diff(np.sort(reward_R)) <= same_reward
    fits = bool(np.all(np.diff(np.sort(advantage_R))[ties] <= _SAME * spread))
    return int(higher_RR.sum()), against, bool(against and fits)
