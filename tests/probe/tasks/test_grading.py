"""Grades with the real math-verify in its real worker."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from mismatch_cli.probe.tasks.answers import last_boxed
from mismatch_cli.probe.tasks.grading import MathVerify, group_mean_advantages
from mismatch_cli.processes.child import DIED, Reply


@pytest.fixture(scope="module")
def grader():
    with MathVerify(seconds=2) as grader:
        yield grader


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so \\boxed{4}", "4", 1),
        ("first \\boxed{5}, then \\boxed{4}", "4", 1),
        ("first \\boxed{4}, then \\boxed{5}", "4", 0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1),
        ("\\boxed{\\boxed{3}}", "3", 1),
        ("\\boxed{10\\text{ cm}}", "10", 1),
        ("\\boxed{(1, 2)}", "(1,2)", 1),
        ("\\boxed{x^2+1}", "1+x^2", 1),
        ("\\boxed{}", "3", 0),
        ("\\boxed{1", "1", 0),
        ("the answer is 4", "4", 0),
        ("\\boxed{4}", "$4$", 1),
        ("\\boxed{4}", "We get \\boxed{4}.", 1),
        ("\\boxed{\\text{<script>}}", "4", 0),
        ("\\boxed{\\frac{1}{\\boxed{2}}}", "\\frac{1}{2}", 0),  # of nested boxes the inner one
        ("\\boxed{\\dfrac{1}{2}}", "\\frac12", 1),
        ("\\boxed{-\\frac{1}{2}}", "\\frac{-1}{2}", 1),
        ("\\boxed{5\\,\\text{cm}^2}", "5", 1),
        ("\\boxed{\\$5}", "5", 1),
        ("\\boxed{90^\\circ}", "90", 1),
        ("\\boxed{1{,}000}", "1000", 1),
        ("\\boxed{x=5}", "5", 1),
        ("\\boxed{\\sqrt{8}}", "2\\sqrt{2}", 1),
        ("\\boxed{(2,1)}", "(1,2)", 0),
        ("\\boxed{(0,1)}", "[0,1]", 0),
        ("\\boxed{1, 2, 3, 4, 5}", "3", 0),  # a guess at everything
        ("\\boxed{1/2 or 3}", "3", 0),
        ("\\boxed{3 \\neq 4}", "3", 0),
        ("\\boxed{1/0}", "5", 0),
        ("\\boxed{" + "9" * 5000 + "}", "9", 0),  # longer than Python turns into a number
        ("\\boxed{1\x00\ud83d}", "2", 0),  # what broken bytes decode to
        ("\\boxed{\n4\n}", "4", 1),
        ("\\boxed{1}" * 20_000, "1", 1),
        ("{" * 200_000 + "\\boxed{1.0}", "1", 1),
    ],
)
def test_answers(grader, response, answer, reward):
    assert grader.grade(response, answer, "stop") == reward


@pytest.mark.parametrize(
    "pair", [("4", "4"), ("4", "5"), ("-3", "3"), ("007", "7"), ("10", "100"), ("0", "-0")]
)
def test_the_shortcut_for_integers_agrees_with_the_library(grader, pair):
    boxed, answer = pair
    assert grader.grade(f"\\boxed{{{boxed}}}", answer, "stop") == grader.compare(boxed, answer)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("so \\boxed{5}</think> The answer is \\boxed{4}.", 1),
        ("so \\boxed{4}</think> The answer is \\boxed{5}.", 0),
        ("so \\boxed{4}", 0),  # the thought did not end
        ("so \\boxed{4}</think> The answer is 4.", 0),
        ("a</think>\\boxed{4}</think>\\boxed{4}", 0),  # two ends
    ],
)
def test_only_what_follows_the_thought_counts(grader, response, reward):
    assert grader.grade(response, "4", "stop", in_thought=True) == reward


def test_a_truncated_response_scores_zero(grader):
    assert grader.grade("\\boxed{4}", "4", "length") == 0


def test_a_comparison_that_hangs_is_given_up_and_counted():
    with MathVerify(seconds=1) as grader:
        grader.grade("\\boxed{1.0}", "1", "stop")
        began = time.monotonic()
        assert grader.grade("\\boxed{9^{9^{9^{9}}}}", "4", "stop") == 0
        assert time.monotonic() - began < 5
        assert grader.timeouts == 1
        assert len(grader.child.given_up) == 1
        assert grader.grade("\\boxed{4.0}", "4", "stop") == 1  # a new worker has taken over


def test_what_was_given_up_is_not_tried_again():
    with MathVerify() as grader:
        grader.child.give_up(['["\\\\boxed{1.0}", "\\\\boxed{1}"]'])
        # Equal, but a resumed run scores like the first one
        assert grader.grade("\\boxed{1.0}", "1", "stop") == 0
        assert grader.timeouts == 1


def test_a_worker_that_died_between_two_questions_is_replaced():
    with MathVerify() as grader:
        grader.grade("\\boxed{1.0}", "1", "stop")
        os.kill(grader.child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, grader.child.pid, os.WEXITED | os.WNOWAIT)
        assert grader.grade("\\boxed{2.0}", "2", "stop") == 1


@pytest.mark.parametrize(("deaths", "reward", "timeouts"), [(1, 1, 0), (2, 0, 1)])
def test_a_comparison_that_kills_the_worker_is_retried_once_then_counted(
    monkeypatch, deaths, reward, timeouts
):
    with MathVerify() as grader:
        replies = iter([DIED] * deaths + [Reply(value=True)])
        monkeypatch.setattr(grader.child, "ask", lambda *_: next(replies))
        assert grader.grade("\\boxed{1.0}", "1", "stop") == reward
        assert grader.timeouts == timeouts == len(grader.child.given_up)


def test_the_worker_ends_with_the_grader():
    with MathVerify() as grader:
        grader.grade("\\boxed{4.0}", "4", "stop")
        process = Path(f"/proc/{grader.child.pid}")
        assert process.exists()
    assert not process.exists()


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{a{b}c}", "a{b}c"),
        ("\\boxed{1} \\fbox{2}", "2"),
        ("\\fbox{2} \\boxed{1}", "1"),
        ("\\boxed{1} \\boxed{2", "1"),
        ("none", None),
    ],
)
def test_the_last_complete_box(text, content):
    assert last_boxed(text) == content


def test_advantages_are_reward_minus_group_mean():
    reward_S = np.array([1, 0, 0, 0, 1, 1], dtype=np.float32)
    advantage_S = group_mean_advantages(reward_S, np.array([5, 5, 5, 5, 2, 2]))
    assert advantage_S.tolist() == [0.75, -0.25, -0.25, -0.25, 0, 0]
    assert advantage_S.dtype == np.float32


def test_a_group_of_one_teaches_nothing():
    assert group_mean_advantages(np.ones(1, dtype=np.float32), np.array([3])).tolist() == [0]
