"""A user's reward function, in its real child process."""

from __future__ import annotations

import pytest

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.probe.tasks.rewards import OwnReward

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
