"""Episodes of several turns: the model acts, the environment replies, and all of it becomes one
response.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import Engine, Request, sample_checked, sample_seed
from mismatch_cli.probe.tasks.prompts import Problem, encode_prompts
from mismatch_cli.processes.ranks import ALONE, World
from mismatch_cli.rules.batch import Episode, Rollout
from mismatch_cli.train.environment import (
    Environments,
    Observation,
    OngoingEpisode,
    starting,
)
from mismatch_cli.train.train_config import TrainConfig
from mismatch_cli.train.turns import Turns


@dataclass
class _Running:
    """An episode so far: the model's turns, and what the environment put between them."""

    playing: OngoingEpisode
    prompt_ids: list[int]
    parts: list[Rollout] = field(default_factory=list)
    turns: int = 0
    reward: float = 0.0
    ended: str = ""  # "stop" if the environment ended it, "length" if a limit did

    @property
    def response_ids(self) -> list[int]:
        """The response so far."""
        return [token for part in self.parts for token in part.response_ids]


class Episodes:
    """Plays episodes side by side: one call of the engine samples a turn of all that are still
    running.

    An episode ends when the environment says so, at `max_turns`, or when the response
    (`max_tokens`, including the environment's tokens) or the context has no room for another token.
    A turn that is cut off there is not an action.
    """

    def __init__(
        self,
        engine: Engine,
        environments: Environments,
        tokenizer: Any,
        config: TrainConfig,
        world: World = ALONE,
    ) -> None:
        self._engine = engine
        self._environments = environments
        self._tokenizer = tokenizer
        self._config = config
        self._world = world
        self._turns = Turns(tokenizer, config.task.template)

    def play(
        self,
        problems: Sequence[Problem],
        step: int,
        samples: int,
        sampling: SamplingSettings | None = None,
    ) -> list[Episode]:
        """An episode for each; `samples` neighbours share a problem.

        Playing a step again gives the same episodes.
        """
        episodes = self._begun(problems, step, samples)
        for turn in range(self._config.turns.max_turns):
            running = _going(episodes)
            # Ranks may share an engine, which samples only once all of them call it.
            # So a rank whose episodes have all ended calls it too, until no rank has one left.
            if not any(self._world.gather(bool(running))):
                break
            self._speak(running, turn, sampling)
            self._answer(_going(running))
        self._environments.forget()
        return list(map(_joined, episodes))

    def _begun(self, problems: Sequence[Problem], step: int, samples: int) -> list[_Running]:
        """The episodes with their prompts: the first observation, which all samples of a problem
        share.
        """
        playing = []
        for place, problem in enumerate(problems):
            name = (step, problem.prompt_id, place % samples, place)
            # One seed for all episodes of a problem: their rewards are compared.
            seed = sample_seed(self._config.sampler.seed, problem.prompt_id, 0)
            playing.append(starting(name, seed, problem))
        observations = self._environments.begin(playing)
        firsts = observations[::samples]
        for place, observation in enumerate(observations):
            self._check_same(firsts[place // samples], observation)
        prompts = self._prompts(firsts, [problem.prompt_id for problem in problems[::samples]])
        return [
            _Running(episode, prompts[place // samples]) for place, episode in enumerate(playing)
        ]

    def _check_same(self, first: Observation, observation: Observation) -> None:
        if observation != first:
            raise MismatchError(
                f"--environment {self._config.turns.environment} is not deterministic: reset with "
                f"the same seed and problem returned {str(first)[:_SHOWN]!r} and "
                f"{str(observation)[:_SHOWN]!r}, so rewards cannot be compared. Draw "
                "everything in reset from its seed."
            )

    def _prompts(
        self, observations: Sequence[Observation], prompt_ids: list[int]
    ) -> list[list[int]]:
        """The token ids of first observations; an error names the problem by its `prompt_id`."""
        if not observations:
            return []
        config = self._config
        # With several evaluation sets, two problems may have the same `prompt_id`.
        # Here each has its place as its number.
        encoded = encode_prompts(
            [Problem(place, observation, None) for place, observation in enumerate(observations)],
            self._tokenizer,
            template=config.task.template,
            max_model_len=self._engine.max_model_len,
            max_prompt=config.problems.max_prompt_tokens,
        )
        if encoded.skipped:
            skipped = encoded.skipped[0]
            which = prompt_ids[skipped["prompt_id"]]
            raise MismatchError(
                f"--environment {self._config.turns.environment}: the first observation of problem "
                f"{which} cannot be a prompt: {skipped['reason']}. Make it shorter."
            )
        return encoded.prompt_ids

    def _room(self, episode: _Running) -> int:
        """How many more tokens its response may have."""
        context = self._engine.max_model_len - len(episode.prompt_ids)
        return min(self._config.sampler.max_tokens, context) - len(episode.response_ids)

    def _speak(
        self, running: Sequence[_Running], turn: int, sampling: SamplingSettings | None
    ) -> None:
        """Sample a turn of each; one that ran out of room ends its episode."""
        if not running and self._config.engine.tensor_parallel == 1:
            return
        requests = [self._request(episode, turn, sampling) for episode in running]
        prompts = [episode.playing.name[1] for episode in running]
        turns = sample_checked(self._engine, requests, prompts, lambda _: None)
        for episode, rollout in zip(running, turns, strict=True):
            episode.parts.append(rollout)
            episode.turns += 1
            if rollout.finish_reason == "length" and not self._room(episode):
                episode.ended = "length"

    def _request(self, episode: _Running, turn: int, sampling: SamplingSettings | None) -> Request:
        step, prompt_id, sample, _ = episode.playing.name
        seed = sample_seed(self._config.sampler.seed, prompt_id, sample, step, turn)
        turn_tokens = self._config.turns.turn_tokens or self._config.sampler.max_tokens
        longest = min(self._room(episode), turn_tokens)
        return Request(episode.prompt_ids + episode.response_ids, seed, sampling, longest)

    def _answer(self, running: Sequence[_Running]) -> None:
        """Take a step in each environment, and append its reply to the turn, if there is room
        for more.
        """
        actions = [self._action(episode.parts[-1]) for episode in running]
        outcomes = self._environments.step([episode.playing for episode in running], actions)
        turns: list[Rollout] = []
        observations: list[Observation] = []
        for episode, outcome in zip(running, outcomes, strict=True):
            if outcome is None:  # the step timed out
                episode.ended = "length"
                continue
            episode.reward += outcome.reward
            if outcome.done:
                episode.ended = "stop"
            elif episode.turns == self._config.turns.max_turns:
                episode.ended = "length"
            else:
                turns.append(episode.parts[-1])
                observations.append(outcome.observation)
        replies = self._turns.after(turns, observations)
        for episode, ids in zip(_going(running), replies, strict=True):
            if len(ids) < self._room(episode):
                episode.parts.append(_unmeasured(ids, episode.parts[-1]))
            else:
                episode.ended = "length"

    def _action(self, turn: Rollout) -> str:
        """The text of a turn, without its end token."""
        ids = turn.response_ids
        if turn.finish_reason == "stop":
            ids = ids[:-1]
        text: str = self._tokenizer.decode(ids)
        return text


def _going(episodes: Sequence[_Running]) -> list[_Running]:
    """The episodes that have not ended."""
    return [episode for episode in episodes if not episode.ended]


_SHOWN = 100  # characters of an observation


def _joined(episode: _Running) -> Episode:
    """One response: the turns as sampled, and unmeasured tokens between them."""
    parts = episode.parts
    sampled = [part.finish_reason != _NOBODY for part in parts]
    lengths = [len(part.response_ids) for part in parts]
    return Episode(
        prompt_ids=episode.prompt_ids,
        response_ids=episode.response_ids,
        logp_rollout_T=np.concatenate([part.logp_rollout_T for part in parts]),
        rank_rollout_T=np.concatenate([part.rank_rollout_T for part in parts]),
        topk_ids_TK=_concatenated([part.topk_ids_TK for part in parts]),
        topk_logp_rollout_TK=_concatenated([part.topk_logp_rollout_TK for part in parts]),
        finish_reason=episode.ended,
        routes_FMK=_routes(compress(parts, sampled)),
        reward=episode.reward,
        turns=episode.turns,
        loss_mask_T=np.repeat(sampled, lengths),
    )


def _concatenated(columns: list[np.ndarray | None]) -> np.ndarray | None:
    """The columns of all parts that have one; None if none has."""
    measured = [column for column in columns if column is not None]
    if not measured:
        return None
    return np.concatenate(measured)


def _routes(rollouts: Iterable[Rollout]) -> np.ndarray | None:
    """The experts of every token when it was first read: each turn reads the earlier ones again."""
    first = []
    read = 0
    for rollout in rollouts:
        if rollout.routes_FMK is None:
            return None
        first.append(rollout.routes_FMK[read:])
        read = len(rollout.routes_FMK)
    return np.concatenate(first)


_NOBODY = ""  # the finish reason of tokens that the model did not sample


def _unmeasured(ids: list[int], turn: Rollout) -> Rollout:
    """Tokens that the model did not sample, with the columns of the turn before them."""
    tokens = len(ids)
    topk_ids_TK = topk_logp_TK = None
    if turn.topk_ids_TK is not None:
        shape = tokens, turn.topk_ids_TK.shape[1]
        topk_ids_TK = np.zeros(shape, dtype=np.int32)
        topk_logp_TK = np.full(shape, np.nan, dtype=np.float32)
    return Rollout(
        prompt_ids=[],
        response_ids=ids,
        logp_rollout_T=np.full(tokens, np.nan, dtype=np.float32),
        rank_rollout_T=np.full(tokens, -1, dtype=np.int32),
        topk_ids_TK=topk_ids_TK,
        topk_logp_rollout_TK=topk_logp_TK,
        finish_reason=_NOBODY,
    )
