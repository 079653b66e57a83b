"""Dynamic sampling: a step learns from groups whose rewards differ; other problems replace the
rest.

Source: DAPO (arXiv 2503.14476), equation 11, and `filter_groups` of verl. Seed and step decide the
other problems: no state passes from one step to the next, so a resumed run and any number of ranks
choose the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.rules.batch import Rollout
from mismatch_cli.train.step import mean_reward
from mismatch_cli.train.task import EncodedProblem

if TYPE_CHECKING:
    from mismatch_cli.train.run import Record, RunInProgress
    from mismatch_cli.train.step import Step


@dataclass(frozen=True)
class PromptGroup:
    """The responses to one problem, with their rewards."""

    posed: EncodedProblem
    rollouts: list[Rollout]
    reward_S: np.ndarray
    advantage_S: np.ndarray

    @property
    def teaches(self) -> bool:
        """Whether its rewards differ: otherwise every advantage is 0."""
        return bool((self.advantage_S != 0).any())


def with_other_problems(run: RunInProgress, step: Step) -> Step:
    """The step with the first groups that teach something, from its own problems and then from
    others.

    If there are too few, groups without an advantage fill the step: they teach nothing, but every
    step has the same size.
    """
    wanted = run.config.prompts_per_step
    groups = _of_all_ranks(run, step)
    others = run.task.others_of_step(step.number)
    while _teaching(groups) < wanted:
        problems = next(others, None)
        if problems is None:
            break
        groups += _of_all_ranks(run, _sampled_step(run, problems, step.number))
    # Sorting is stable: among those that teach, the order of the problems decides.
    ordered = sorted(groups, key=lambda group: not group.teaches)
    share = run.world.share(wanted)
    return _step_of(step, ordered[:wanted][share.start : share.stop], _sampled(groups))


def _teaching(groups: Sequence[PromptGroup]) -> int:
    """How many groups teach something."""
    return sum(group.teaches for group in groups)


def _sampled_step(run: RunInProgress, problems: list[EncodedProblem], step: int) -> Step:
    """The step with other problems: this rank's share of them, sampled and graded."""
    samples = run.config.sampler.samples_per_prompt
    posed = [p for p in run.share(problems) for _ in range(samples)]
    return run.graded(step, posed, run.sample(posed, step, samples))


def _of_all_ranks(run: RunInProgress, step: Step) -> list[PromptGroup]:
    """The groups of all ranks, in the order of the problems: any rank may have to train on any
    group.
    """
    own = list(_groups(step, run.config.sampler.samples_per_prompt))
    return list(chain.from_iterable(run.world.gather(own)))


def _groups(step: Step, size: int) -> Iterator[PromptGroup]:
    """The step's responses by problem, of which each has `size` in a row."""
    for start in range(0, len(step.posed), size):
        rows = slice(start, start + size)
        yield PromptGroup(
            step.posed[start], step.rollouts[rows], step.reward_S[rows], step.advantage_S[rows]
        )


def _step_of(step: Step, groups: list[PromptGroup], sampled: Record) -> Step:
    """The step with the responses of these groups instead of its own."""
    posed: list[EncodedProblem] = []
    sample_index: list[int] = []
    rollouts: list[Rollout] = []
    for group in groups:
        size = len(group.rollouts)
        posed += [group.posed] * size
        sample_index += range(size)
        rollouts += group.rollouts
    return replace(
        step,
        posed=posed,
        sample_index=sample_index,
        rollouts=rollouts,
        reward_S=np.concatenate([group.reward_S for group in groups]),
        advantage_S=np.concatenate([group.advantage_S for group in groups]),
        sampled=sampled,
    )


def _sampled(groups: list[PromptGroup]) -> Record:
    """What was sampled for a step: the mean reward of the kept groups alone does not measure the
    policy.
    """
    means = []
    for group in groups:
        if not np.isnan(group.reward_S).all():
            means.append(mean_reward(group.reward_S))
    if not means:
        # Nothing was graded, and the error says of how many responses.
        means = list(chain.from_iterable(group.reward_S for group in groups))
    return {
        "groups": len(groups),
        "teaching": _teaching(groups),
        "reward": mean_reward(np.array(means)),
    }
