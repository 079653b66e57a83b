"""How often a model solves each problem, which problems are neither too hard nor too easy, and what held out says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.errors import MismatchError

if TYPE_CHECKING:
    from mismatch_cli.trace.reader import Trace


def accuracy_by_prompt(trace: Trace) -> dict[int, float]:
    """Mean reward of each problem by `prompt_id`; a `MismatchError` where it is no accuracy or nothing was graded."""
    prompts, rewards = [], []
    for table in trace.tables(["prompt_id", "reward"]):
        if "reward" not in table.column_names:
            raise MismatchError(f"{trace.folder} has no rewards: its problems have no answers to grade with.")
        prompts.append(table.column("prompt_id").to_numpy())
        reward_S = table.column("reward").to_numpy().astype(np.float64)
        outside_S = reward_S[(reward_S < 0) | (reward_S > 1)]
        if len(outside_S):
            raise MismatchError(
                f"{trace.folder} has a reward of {outside_S[0]:g}. As an accuracy it has to lie within 0 and 1: scale "
                "the --reward, and start in another --output."
            )
        rewards.append(reward_S)
    id_G, group_S = np.unique(np.concatenate(prompts), return_inverse=True)
    sum_G = np.bincount(group_S, weights=np.concatenate(rewards))
    return dict(zip(id_G.tolist(), (sum_G / np.bincount(group_S)).tolist(), strict=True))


@dataclass(frozen=True)
class Curation:
    """What was measured on all problems, and again on the kept ones with samples that did not choose them.

    The accuracies of chosen problems are biased: a problem that is there by luck is not as lucky again, so those near
    an edge of the band regress to the mean. Only the held-out samples tell how good they are.
    """

    keep: tuple[float, float]  # both ends included
    samples: int
    held_out_samples: int
    accuracy: dict[int, float]  # of every problem
    held_out: dict[int, float]  # of the kept ones

    def within(self, accuracy: float) -> bool:
        low, high = self.keep
        return low <= accuracy <= high

    @property
    def kept(self) -> list[int]:
        """The problems that the first samples put into the band."""
        return [prompt for prompt, accuracy in self.accuracy.items() if self.within(accuracy)]

    @property
    def confirmed(self) -> list[int]:
        """Those of them that the held-out samples put there, too."""
        return [prompt for prompt in self.kept if self.within(self.held_out[prompt])]
