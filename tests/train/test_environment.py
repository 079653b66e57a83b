"""A user's environment in its real child processes: what it may return, what it may not, what it
cannot break.
"""

from __future__ import annotations

from typing import Any

import pytest

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.probe.tasks.prompts import Problem
from mismatch_cli.train.environment import (
    Environments,
    OngoingEpisode,
    Outcome,
    check_environment,
    starting,
)

GAMES = """
import os
import time

print("a library that prints")


class Counting:
    '''As Gymnasium and GEM have it.'''

    def __init__(self, problem, answer):
        self.problem, self.answer = problem, answer

    def reset(self, seed=None):
        self.total = seed % 10
        return f"{self.problem}: {self.total}", {"info": 1}

    def step(self, action):
        if action == "hang":
            time.sleep(60)
        if action == "die":
            os._exit(3)
        if action == "die once" and not os.path.exists(__file__ + ".died"):
            open(__file__ + ".died", "w").close()
            os._exit(3)
        self.total += len(action)
        return f"{self.total}", self.total / 2, str(self.total) == self.answer, self.total > 30, {}


class Short:
    '''Three answers, no seed, and messages.'''

    def reset(self):
        return [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]

    def step(self, action):
        return [{"role": "tool", "content": action, "name": "left out"}], 1, False


def made(answer):
    game = Short()
    game.step = {
        "broken": lambda action: 1 / 0,
        "leaves": lambda action: exit(),
        "two": lambda action: ("o", 1.0),
        "nan": lambda action: ("o", float("nan"), False),
        "text": lambda action: ("o", "1", False),
        "none": lambda action: (None, 1.0, False),
        "parts": lambda action: ([{"role": "user", "content": ["part"]}], 1.0, False),
        "half": lambda action: ("\\ud800", 1.0, False),
        "end": lambda action: (None, True, True),
    }[answer]
    return game


class NoSeedTwice(Short):
    def reset(self, seed):
        time.sleep(60)


def needs(weather):
    return Short()
"""


@pytest.fixture
def environments(tmp_path):
    (tmp_path / "games.py").write_text(GAMES, encoding="utf-8")
    made: list[Environments] = []

    def make(name: str, **settings: Any) -> Environments:
        made.append(Environments(f"{tmp_path}/games.py:{name}", **settings))
        return made[-1]

    yield make
    for environment in made:
        environment.stop()


def playing(
    sample: int, seed: int = 3, answer: str | None = None, prompt: int = 7
) -> OngoingEpisode:
    return starting((1, prompt, sample), seed, Problem(prompt, "count", answer))


def test_episodes_run_side_by_side_with_seed_problem_and_answer(environments):
    games, episodes = (
        environments("Counting", processes=2),
        [playing(i, seed=i, answer="6") for i in range(5)],
    )
    assert games.begin(episodes) == [f"count: {i}" for i in range(5)]
    first = games.step(episodes, ["a", "ab", "abc", "abc", ""])
    assert first == [
        Outcome("1", 0.5, False),
        Outcome("3", 1.5, False),
        Outcome("5", 2.5, False),
        Outcome("", 3.0, True),
        Outcome("4", 2.0, False),
    ]
    assert games.step([episodes[4], episodes[0]], ["x" * 27, "12345"]) == [
        Outcome("", 15.5, True),
        Outcome("", 3.0, True),
    ]
    games.forget()
    assert games.begin(episodes[:1]) == ["count: 0"]


def test_processes_share_the_samples_of_a_problem(environments, monkeypatch):
    """With the names that training gives its episodes: step, problem, sample, process."""
    games, numbers = environments("Counting", processes=2), list[int]()
    for number, child in enumerate(games.children):

        def noting(*question: Any, number: int = number, ask: Any = child.ask) -> Any:
            numbers.append(number)
            return ask(*question)

        monkeypatch.setattr(child, "ask", noting)
    games.begin([starting((1, 7, i, i), 3, Problem(7, "count", None)) for i in range(8)])
    assert sorted(numbers) == [0] * 4 + [1] * 4


def test_messages_and_three_return_values_suffice(environments):
    games, episode = environments("Short"), playing(0)
    assert games.begin([episode]) == [
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    ]
    assert games.step([episode], ["act"]) == [
        Outcome([{"role": "tool", "content": "act"}], 1.0, False)
    ]
    ends = environments("made")
    ends.begin([last := playing(1, answer="end")])
    assert ends.step([last], ["act"]) == [Outcome("", 1.0, True)]


@pytest.mark.slow
def test_a_step_that_hangs_ends_its_episode_and_no_other(environments):
    """Its process ends too: the others are replayed without a difference."""
    games, episodes = environments("Counting", seconds=2.0), [playing(i) for i in range(3)]
    games.begin(episodes)
    games.step(episodes, ["a", "ab", "abc"])
    assert games.step(episodes, ["abc", "hang", "ab"]) == [
        Outcome("7", 3.5, False),
        None,
        Outcome("8", 4.0, False),
    ]
    assert games.timeouts == games.state_dict()["timeouts"] == 1
    assert games.step([episodes[0], episodes[2]], ["", "a"]) == [
        Outcome("7", 3.5, False),
        Outcome("9", 4.5, False),
    ]


def test_a_process_that_dies_is_tried_once_more(environments):
    games, episodes = environments("Counting"), [playing(i) for i in range(2)]
    games.begin(episodes)
    assert games.step(episodes, ["ab", "die once"]) == [
        Outcome("5", 2.5, False),
        Outcome("11", 5.5, False),
    ]
    with pytest.raises(MismatchError, match="Counting failed: its process died"):
        games.step(episodes, ["die", ""])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("broken", "ZeroDivisionError"),
        ("leaves", "SystemExit"),
        ("two", r"step must return \(observation, reward, done\).* it returned tuple of 2"),
        ("nan", "its reward is nan"),
        ("text", "returned the text '1', not a number"),
        ("none", "observation of step is NoneType, neither text"),
        ("parts", "observation of step is list, neither text"),
        ("half", "half a character"),
    ],
)
def test_invalid_results_stop_the_run_with_their_reason(environments, answer, said):
    games, episode = environments("made"), playing(0, answer=answer)
    games.begin([episode])
    with pytest.raises(
        MismatchError, match=rf"games\.py:made failed: .*{said}.* on the action 'act'"
    ):
        games.step([episode], ["act"])


def test_a_reset_that_hangs_stops_the_run(environments):
    with pytest.raises(
        MismatchError, match=r"its reset takes over 1 s\. Allow more with environment_seconds"
    ):
        environments("NoSeedTwice", seconds=1.0).begin([playing(0)])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent", "has no function 'absent'. Give the environment"),
        ("needs", "needs has the parameter 'weather'. It can have: problem, answer"),
    ],
)
def test_environments_that_cannot_be_made_are_reported_first(environments, tmp_path, name, said):
    with pytest.raises(MismatchError, match=said):
        environments(name).start()
    with pytest.raises(MismatchError, match=said):
        check_environment(f"{tmp_path}/games.py:{name}")


def test_names_of_missing_environments_are_refused():
    check_environment("")
    for where in ("mine.py", "nowhere.py:f", ":f"):
        with pytest.raises(UsageError, match=r"path/to/file\.py:name"):
            check_environment(where)
