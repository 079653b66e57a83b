"""A user's reward function, in its real child process."""

from __future__ import annotations

import pytest

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.probe.tasks.answers import SECONDS_HELP
from mismatch_cli.probe.tasks.rewards import AnsweredResponse, OwnReward
from mismatch_cli.processes.child import LATE, Reply

FUNCTIONS = """
from __future__ import annotations

import time
from dataclasses import dataclass

print("a library that prints")

def length(response):
    return len(response) / 10

def all_of_it(response, answer, problem, finish_reason, scale=1.0):
    return scale * (response == answer and problem == "p" and finish_reason == "length")

@dataclass
class Score:
    value: float

def of_a_dataclass(response):
    return Score(0.25).value

def slow(response):
    time.sleep(60 if response == "hang" else 0)
    return 1

def broken(response):
    return 1 / 0

def nothing(response):
    return float("nan")

def asks_too_much(response, weather):
    return 1
"""


def test_a_function_gets_what_it_names(reward_of):
    assert reward_of("length").grade("abcde\n", None, "stop", "p") == 0.6
    assert reward_of("all_of_it").grade("4", "4", "length", "p") == 1
    assert reward_of("all_of_it").grade("4", "4", "stop", "p") == 0
    assert reward_of("of_a_dataclass").grade("4", "4", "stop", "p") == 0.25


@pytest.mark.slow
def test_a_function_that_hangs_earns_nothing_and_is_not_asked_again(reward_of):
    reward = reward_of("slow", seconds=2.0)
    assert reward.grade("hang", None, "stop", "p") == 0
    assert reward.grade("quick", None, "stop", "p") == 1
    reward.child.stop()
    assert reward.grade("hang", None, "stop", "p") == 0
    assert not reward.child.runs  # not even started
    assert reward.timeouts == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", "ZeroDivisionError"),
        ("nothing", "returned nan"),
        ("absent", "has no function 'absent'"),
        ("asks_too_much", "the parameter 'weather'. It can have: response"),
    ],
)
def test_a_function_that_fails_stops_the_run_with_its_reason(reward_of, name, said):
    with pytest.raises(MismatchError, match=said):
        reward_of(name).grade("response", "4", "stop", "p")


def test_a_file_that_cannot_be_loaded_says_why(tmp_path):
    (tmp_path / "bad.py").write_text("import nowhere_to_be_found", encoding="utf-8")
    with pytest.raises(MismatchError, match="nowhere_to_be_found"):
        OwnReward(f"{tmp_path}/bad.py:f").grade("r", None, "stop", "p")


@pytest.mark.parametrize("where", ["mine.py", "nowhere.py:f", ":f", "mine.py:not a name"])
def test_names_of_missing_functions_are_refused(where):
    with pytest.raises(UsageError, match=r"path/to/file\.py:function"):
        OwnReward(where)


@pytest.mark.parametrize("kind", ["", "batch", "keywords"])
@pytest.mark.parametrize("seconds", [0, 90])
def test_the_limits_of_a_function_are_those_of_the_help(kind, seconds, reward_of, monkeypatch):
    """Per response, per batch and to load; 30, 600 and 60 where none is set."""
    one, batch, load = (30, 600, 60) if not seconds else (90, 90, 90)
    assert SECONDS_HELP.endswith("; 0: 30, 600, 60.")
    reward = reward_of("length", seconds=seconds)
    limits = []

    def ask(question, limit):
        limits.append(limit)
        return Reply(kind) if question is None else LATE

    monkeypatch.setattr(reward.child, "ask", ask)
    rows = [AnsweredResponse("4", "4", "2 + 2", "stop"), AnsweredResponse("x", "5", "p", "stop")]
    assert reward.grade_all(rows) == [0, 0]
    assert reward.timeouts == 2 and reward.child.seconds_to_start == load
    assert limits == [30, *([batch] if kind else [one, one])]


def test_a_response_is_quoted_up_to_200_characters(reward_of):
    with pytest.raises(MismatchError, match=f"response '{'a' * 200}'"):
        reward_of("broken").grade("a" * 201, None, "stop", "p")
