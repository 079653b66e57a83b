"""Plays a user's environment in processes that cannot hang the run: its observations, and the
rewards of turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, TypeVar

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.text import is_encodable
from mismatch_cli.probe.tasks.prompts import Problem
from mismatch_cli.processes import users_code
from mismatch_cli.processes.child import DIED, LATE, Child, Reply
from mismatch_cli.rules.batch import Episode, Rollout
from mismatch_cli.train.environment_worker import play

Observation = str | list[dict[str, str]]  # a text, or chat messages
_Answer = TypeVar("_Answer")
_SHOWN = 200  # characters of an action
_ON_SEED = "on its seed"
_LOST = (DIED, Reply())  # null is the answer for an episode that the process does not know


@dataclass(frozen=True)
class Outcome:
    """The result of an action."""

    observation: Observation  # empty at the end
    reward: float
    done: bool


@dataclass
class OngoingEpisode:
    """An episode in progress: what is needed to replay it after its process is lost."""

    name: tuple[int, ...]  # unique in the run; the last number selects the process that plays it
    start: dict[str, Any]
    actions: list[str] = field(default_factory=list)

    def question(self, action: str, turn: int) -> dict[str, Any]:
        """A question that is different in each turn, so that no turn is mistaken for one that
        was given up.
        """
        return {"episode": self.name, "turn": turn, "action": action}

    @property
    def questions(self) -> list[dict[str, Any]]:
        """All questions about this episode so far, with which another process replays it."""
        steps = [self.question(action, turn) for turn, action in enumerate(self.actions)]
        return [self.start, *steps]


def check_environment(where: str | None) -> None:
    """Load an environment once, so that its errors show before the run starts; does nothing
    without one.
    """
    if not where:
        return
    environment = Environments(where)
    try:
        environment.start()
    finally:
        environment.stop()


class Environments:
    """Makes environments with `NAME` of `FILE.py` and plays them in a few processes, each with a
    share of the episodes.

    A step that takes too long ends its episode and counts in `timeouts`. It ends its process too:
    the other episodes there are replayed with the same seeds and actions. `stated` and `unstated`
    exist only for the interface of graders.
    """

    def __init__(self, where: str, seconds: float = 30.0, processes: int = 1) -> None:
        file, code = users_code.check(where, "--environment", "class", "name")
        self._where = where
        self._seconds = seconds
        self.timeouts = self.stated = self.unstated = 0
        self._forgotten = 0  # times; it makes each such question differ from one that was given up
        late = f"{file} did not load within a minute."
        self.children = [Child(play, code, cannot_start=late) for _ in range(processes)]

    def start(self) -> None:
        """Start a process now, which shows whether the user's code loads."""
        self.children[0].start()

    def stop(self) -> None:
        for child in self.children:
            child.stop()

    def rewards(self, problems: Sequence[Problem], rollouts: Sequence[Rollout]) -> list[float]:  # noqa: ARG002
        """The rewards that episodes earned as they were played, behind the interface of graders."""
        return [rollout.reward for rollout in rollouts if isinstance(rollout, Episode)]

    def begin(self, playing: Sequence[OngoingEpisode]) -> list[Observation]:
        """The first observation of each episode; a `MismatchError` if there is none."""
        return self._of_all(playing, self._begin)

    def step(
        self, playing: Sequence[OngoingEpisode], actions: Sequence[str]
    ) -> list[Outcome | None]:
        """The result of an action in each episode; None where that takes too long."""
        names = [episode.name for episode in playing]
        action_of = dict(zip(names, actions, strict=True))

        def step(child: Child, episode: OngoingEpisode) -> Outcome | None:
            return self._step(child, episode, action_of[episode.name])

        outcomes = self._of_all(playing, step)
        self.timeouts += outcomes.count(None)
        return outcomes

    def forget(self) -> None:
        """Close the environments of all episodes; a process that hangs is ended."""
        self._forgotten += 1
        for child in self.children:
            child.ask({"forget": self._forgotten}, self._seconds)

    def state_dict(self) -> dict[str, Any]:
        """As for graders; no episode is played twice, so those given up need not be remembered."""
        return {"given_up": [], "timeouts": self.timeouts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.timeouts = state["timeouts"]

    def _of_all(
        self, playing: Sequence[OngoingEpisode], ask: Callable[[Child, OngoingEpisode], _Answer]
    ) -> list[_Answer]:
        """Ask all processes in parallel about their shares, each about one episode after
        another.
        """
        count = len(self.children)
        answers: dict[int, _Answer] = {}

        def ask_share(number: int) -> None:
            child = self.children[number]
            for place, episode in enumerate(playing):
                if episode.name[-1] % count == number:
                    answers[place] = ask(child, episode)

        if count == 1:
            ask_share(0)
        else:
            with ThreadPoolExecutor(count) as threads:
                list(threads.map(ask_share, range(count)))  # raises what a share has raised
        return [answers[place] for place in range(len(playing))]

    def _begin(self, child: Child, playing: OngoingEpisode) -> Observation:
        reply = self._ask(child, playing, playing.start, _ON_SEED)
        if reply is None:
            raise self._failed(
                f"its reset takes over {self._seconds:g} s", "Allow more with environment_seconds"
            )
        return self._observation(reply, _ON_SEED)

    def _step(self, child: Child, playing: OngoingEpisode, action: str) -> Outcome | None:
        where = f"on the action {action[:_SHOWN]!r}"
        question = playing.question(action, len(playing.actions))
        reply = self._ask(child, playing, question, where)
        playing.actions.append(action)
        if reply is None:
            return None
        reward = reply["reward"]
        if not isfinite(reward):
            raise self._failed(f"its reward is {reward}", f"Run it by itself {where}")
        if reply["done"]:
            return Outcome("", reward, done=True)
        return Outcome(self._observation(reply, where), reward, done=False)

    def _ask(
        self, child: Child, playing: OngoingEpisode, question: dict[str, Any], where: str
    ) -> dict[str, Any] | None:
        """The answer, or None if it takes too long; retried once if the process died or does not
        know the episode.
        """
        reply = child.ask(question, self._seconds)
        if reply in _LOST:
            if question != playing.start:
                for earlier in playing.questions:
                    child.ask(earlier, self._seconds)
            reply = child.ask(question, self._seconds)
        if reply is LATE:
            return None
        if reply in _LOST:
            raise self._failed(DIED.error, "Run it by itself and watch its memory")
        if reply.error:
            raise self._failed(reply.error, f"Run it by itself {where}")
        return dict(reply.value)

    def _observation(self, reply: dict[str, Any], where: str) -> Observation:
        observation: Observation = reply["observation"]
        if not is_encodable(json.dumps(observation, ensure_ascii=False)):
            raise self._failed(
                "its observation holds half a character (a lone surrogate)",
                f"Run it by itself {where}",
            )
        return observation

    def _failed(self, why: str, advice: str) -> MismatchError:
        return MismatchError(f"--environment {self._where} failed: {why}. {advice}.")


def starting(name: tuple[int, ...], seed: int, problem: Problem) -> OngoingEpisode:
    """An episode to begin; `name` must be unique."""
    start = {"episode": name, "seed": seed, "problem": problem.prompt, "answer": problem.answer}
    return OngoingEpisode(name, start)
