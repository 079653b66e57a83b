"""How many other problems dynamic sampling tries."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.options import build
from mismatch_cli.train.dynamic import PromptGroup, _sampled, with_other_problems
from mismatch_cli.train.step import Step
from mismatch_cli.train.train_config import TrainConfig


def step_of(problems: list[str]) -> Step:
    """Two responses per problem; the rewards of one whose name begins with "same" are equal."""
    posed = [problem for problem in problems for _ in range(2)]
    reward_S = np.array([0.5 if p.startswith("same") else i % 2 for i, p in enumerate(posed)])
    advantage_S = reward_S - 0.5
    return Step(1, 0, posed, [0, 1] * len(problems), [None] * len(posed), reward_S, advantage_S)


def learned_from(own: list[str], *others: list[str]) -> tuple[list[str], int]:
    """The problems of the step, and how many were sampled for it."""
    run = SimpleNamespace(
        config=build(TrainConfig, {"prompts_per_step": 2, "samples_per_prompt": 2}),
        world=SimpleNamespace(gather=lambda part: [part], share=range),
        task=SimpleNamespace(others_of_step=lambda number: iter(others)),
        share=lambda problems: problems,
        sample=lambda posed, number, samples: posed,
        graded=lambda number, posed, rollouts: step_of(posed[::2]),
    )
    step = with_other_problems(run, step_of(own))
    return step.posed[::2], step.sampled["groups"]


@pytest.mark.parametrize(
    ("own", "expected", "sampled"),
    [
        (["a", "b"], ["a", "b"], 2),
        (["same", "b"], ["b", "c"], 4),
        (["same", "same too"], ["c", "e"], 6),
    ],
)
def test_no_more_problems_are_sampled_than_the_step_needs(own, expected, sampled):
    step = learned_from(own, ["c", "same again"], ["e", "f"], ["g", "h"])
    assert step == (expected, sampled)


def test_rewards_that_grade_nothing_are_counted_over_all_groups():
    reward_S = np.full(3, np.nan)
    groups = [PromptGroup(None, [None] * 3, reward_S, np.zeros(3))] * 2
    with pytest.raises(MismatchError, match="graded none of 6 responses"):
        _sampled(groups)


@pytest.mark.parametrize(("rewards", "teaches"), [([0, 0.5, 1], True), ([0.5, 0.5, 0.5], False)])
def test_a_group_teaches_though_one_of_its_responses_has_the_mean_reward(rewards, teaches):
    reward_S = np.array(rewards)
    assert PromptGroup(None, [None] * 3, reward_S, reward_S - 0.5).teaches == teaches
