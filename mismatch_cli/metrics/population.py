"""What a trace contains: counts, distinct prompts, groups whose rewards are all equal, and which
problems to keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.hashing import GROUPS, hash_keys, prompt_groups
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.estimate import SHARE, Jackknife, jackknife_values, without_groups
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.rules.batch import TokenBatch

if TYPE_CHECKING:
    from mismatch_cli.trace.reader import Trace

SKETCH_SIZE = 2**16


class TokenCounts(Accumulator):
    """Counted tokens, and why the others do not count."""

    def __init__(self) -> None:
        self.tokens = 0
        self.masked = 0
        self.not_measured = 0
        self.out_of_support = 0
        self.responses = 0

    def update(self, gaps: TokenGaps) -> None:
        self.tokens += len(gaps.logq_N)
        self.masked += gaps.num_masked
        self.not_measured += gaps.num_not_measured
        self.responses += gaps.last - gaps.first
        if gaps.out_of_support_N is not None:
            self.out_of_support += int(gaps.out_of_support_N.sum())


class DistinctPrompts(Accumulator):
    """The number of distinct prompts with a counted token.

    Exact up to 65,536, then estimated from the k smallest hashes (error about 0.4 %).
    """

    def __init__(self, size: int = SKETCH_SIZE) -> None:
        self.size = size
        self.hashes = np.zeros(0, dtype=np.uint64)

    def update(self, prompt_id_P: np.ndarray) -> None:
        self._keep(hash_keys(prompt_id_P))

    def merge(self, other: DistinctPrompts) -> None:
        self._keep(other.hashes)

    def _keep(self, hashes: np.ndarray) -> None:
        self.hashes = np.union1d(self.hashes, hashes)[: self.size]

    @property
    def exact(self) -> bool:
        return len(self.hashes) < self.size

    def result(self) -> int:
        if self.exact:
            return len(self.hashes)
        # The k smallest of n uniform hashes reach to about k / n of their range.
        reach = float(self.hashes[-1]) / 2.0**64
        return round((self.size - 1) / reach)


class RewardGroups(Accumulator):
    """The share of groups (step, prompt) of two or more responses whose rewards are all equal: all
    advantages are zero.

    Beyond 65,536 groups, those with the smallest hashes are kept, a random sample. A dropped group
    never comes back, as the largest kept hash only falls.
    """

    def __init__(self, size: int = SKETCH_SIZE) -> None:
        self.size = size
        self.hash_G = np.zeros(0, dtype=np.uint64)
        self.prompt_id_G = np.zeros(0, dtype=np.int64)
        self.reward_G3 = np.zeros((0, 3))  # smallest, largest, responses

    def update(self, batch: TokenBatch) -> None:
        if batch.reward_S is None:
            return
        graded_S = ~np.isnan(batch.reward_S)
        prompt_id_S, step_S = batch.prompt_id_S[graded_S], batch.step_S[graded_S]
        reward_S = batch.reward_S[graded_S].astype(np.float64)
        rows = np.stack([reward_S, reward_S, np.ones(len(reward_S))], axis=1)
        self._keep(hash_keys(step_S, prompt_id_S), prompt_id_S, rows)

    def merge(self, other: RewardGroups) -> None:
        self._keep(other.hash_G, other.prompt_id_G, other.reward_G3)

    def _keep(self, hashes: np.ndarray, prompt_ids: np.ndarray, rewards: np.ndarray) -> None:
        hashes = np.concatenate([self.hash_G, hashes])
        prompt_ids = np.concatenate([self.prompt_id_G, prompt_ids])
        rewards = np.concatenate([self.reward_G3, rewards])
        # A group may be in several batches, so rows with the same hash become one.
        hashes, first, group = np.unique(hashes, return_index=True, return_inverse=True)
        merged = np.tile([np.inf, -np.inf, 0.0], (len(hashes), 1))
        np.minimum.at(merged[:, 0], group, rewards[:, 0])
        np.maximum.at(merged[:, 1], group, rewards[:, 1])
        np.add.at(merged[:, 2], group, rewards[:, 2])
        self.hash_G = hashes[: self.size]
        self.prompt_id_G = prompt_ids[first][: self.size]
        self.reward_G3 = merged[: self.size]

    def jackknife(self) -> Jackknife:
        """The share, and the share without each group of prompts."""
        several_G = self.reward_G3[:, 2] >= 2
        smallest_G, largest_G, _ = self.reward_G3[several_G].T
        prompt_group_G = prompt_groups(self.prompt_id_G[several_G])
        graded = np.bincount(prompt_group_G, minlength=GROUPS)
        equal = np.bincount(prompt_group_G, smallest_G == largest_G, minlength=GROUPS)
        value, without = without_groups(np.true_divide, equal, graded)
        return Jackknife(float(value), jackknife_values(without, graded > 0), SHARE)


def accuracy_by_prompt(trace: Trace) -> dict[int, float]:
    """Mean reward of the graded responses of each problem by `prompt_id`, NaN without any; a
    `MismatchError` if it is not an accuracy or nothing was graded.
    """
    prompts, rewards = [], []
    for table in trace.tables(["prompt_id", "reward"]):
        if "reward" not in table.column_names:
            raise MismatchError(
                f"{trace.folder} has no rewards, because its problems have no answers to grade "
                "with. Name problems that have some: --prompts FILE"
            )
        prompts.append(table.column("prompt_id").to_numpy())
        reward_S = table.column("reward").to_numpy().astype(np.float64)
        outside_S = reward_S[(reward_S < 0) | (reward_S > 1)]
        if len(outside_S):
            raise MismatchError(
                f"{trace.folder} has a reward of {outside_S[0]:g}, but an accuracy must be from "
                "0 to 1. Scale the --reward, and start again in a new --output."
            )
        rewards.append(reward_S)
    prompt_ids, prompt_S = np.unique(np.concatenate(prompts), return_inverse=True)
    reward_S = np.concatenate(rewards)
    graded_S = ~np.isnan(reward_S)
    if not graded_S.any():
        raise MismatchError(
            f"{trace.folder} has no rewards, because its --reward declined every response. Name "
            "another --reward, or other problems."
        )
    sums_P = np.bincount(prompt_S, np.where(graded_S, reward_S, 0))
    graded_P = np.bincount(prompt_S, graded_S)
    accuracies = np.divide(sums_P, graded_P, out=np.full(len(sums_P), np.nan), where=graded_P > 0)
    return dict(zip(prompt_ids.tolist(), accuracies.tolist(), strict=True))


@dataclass(frozen=True)
class Curation:
    """Accuracies of all problems, and of the kept ones on samples that did not select them.

    The accuracies of selected problems are biased: luck does not repeat, so problems near an edge
    of the band regress to the mean. Only the held-out samples measure their accuracy.
    """

    keep: tuple[float, float]  # both ends included
    samples: int
    held_out_samples: int
    accuracy: dict[int, float]  # of every problem with a graded response
    held_out: dict[int, float]  # of the kept ones
    unstated: int = 0  # of the first samples: they ended without an answer in the asked form

    def within(self, accuracy: float) -> bool:
        low, high = self.keep
        return low <= accuracy <= high

    @property
    def kept(self) -> list[int]:
        """The problems within the band on the first samples."""
        return [prompt for prompt, accuracy in self.accuracy.items() if self.within(accuracy)]

    @property
    def confirmed(self) -> list[int]:
        """The kept problems that are within the band on the held-out samples as well."""
        return [prompt for prompt in self.kept if self.within(self.held_out[prompt])]
