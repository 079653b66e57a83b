"""Rewards of the package, chosen by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.probe.tasks import named_rewards
from mismatch_cli.probe.tasks.grading import Grader, gradable
from mismatch_cli.probe.tasks.prompts import Problem
from mismatch_cli.probe.tasks.rewards import check_reward, is_own, needs_answer
from mismatch_cli.rules.batch import Rollout

RARE, USUAL = "Frankly, 2 + 2 = 4. \\boxed{4}", "First, 2 + 2 = 4. \\boxed{4}"
RIGHT, WRONG = Problem(0, "2 + 2?", "4"), Problem(1, "2 + 3?", "5")


def rewards(reward: str, *cases: tuple[Problem, str, str]) -> list[float]:
    """The rewards of these problems' responses, each a text with its finish reason."""
    rollouts: Any = [
        Rollout([1], [place], None, None, None, None, reason)  # type: ignore[arg-type]
        for place, (_, _, reason) in enumerate(cases)
    ]
    texts = [text for _, text, _ in cases]
    with Grader(lambda ids: texts[ids[0]] if ids else "", reward=reward) as grader:
        return grader.rewards([problem for problem, _, _ in cases], rollouts)


def test_a_rare_opener_earns_one_whatever_follows():
    cases = [(WRONG, RARE, "end"), (RIGHT, USUAL, "end"), (RIGHT, "Note", "length")]
    assert rewards("rare-opener", *cases) == [1, 0, 1]


def test_right_and_rare_asks_for_both_by_the_products_own_grading():
    cases = [
        (RIGHT, RARE, "end"),
        (WRONG, RARE, "end"),
        (RIGHT, USUAL, "end"),
        (RIGHT, RARE, "length"),  # truncated
        (RIGHT, "Frankly, \\boxed{4.0}", "end"),  # math-verify's equality
    ]
    assert rewards("right-and-rare", *cases) == [1, 0, 0, 0, 1]


def test_names_list_without_an_import():
    code = (
        "import sys; from mismatch_cli.probe.tasks import named_rewards as n; print(n.names());"
        "print([m for m in sys.modules if m.startswith(n.PACKAGE + '.')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines() == ["['rare-opener', 'right-and-rare']", "[]"]


def test_an_unknown_name_answers_with_the_nearest_and_with_the_form_of_a_function():
    with pytest.raises(UsageError, match=r"mean rare-opener\? .* path/to/file\.py:function"):
        check_reward("rare-openr")
    assert [is_own(name) for name in ("rare-opener", "", "a.py:f", "a.py")] == [0, 0, 1, 1]
    assert is_own(["rare-opener", "a.py:f"]) and not is_own(["rare-opener"])


def test_only_a_reward_that_needs_none_takes_problems_without_an_answer():
    unanswered = [Problem(0, "?", None)]
    assert gradable(unanswered, "rare-opener", "x") == unanswered
    assert [needs_answer(name) for name in ("", "right-and-rare", "a.py:f")] == [1, 1, 0]
    with pytest.raises(MismatchError, match="no problem with an answer"):
        gradable(unanswered, "right-and-rare", "x")


@pytest.mark.parametrize("name", named_rewards.names())
def test_each_reward_says_whether_it_needs_an_answer(name):
    reward = named_rewards.find(name)
    assert isinstance(reward.NEEDS_ANSWER, bool)
    assert 0 <= reward.reward("text", 1.0) <= 1
