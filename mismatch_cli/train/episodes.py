"""Episodes of several turns: the model acts, the environment replies, and all of it becomes one
response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import Engine, Request, sample_checked, sample_seed
from mismatch_cli.probe.tasks.prompts import Problem, encode_prompts
from mismatch_cli.processes.ranks import ALONE, World
from mismatch_cli.rules.batch import Episode, Rollout
from mismatch_cli.train.environment import Environments, OngoingEpisode, starting
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
    def said(self) -> list[int]:
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
        self._engine, self._environments, self._tokenizer = engine, environments, tokenizer
        self._config, self._world = config, world
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
            running = [episode for episode in episodes if not episode.ended]
            # Ranks may share an engine, and all of them must call it
            if not any(self._world.gather(bool(running))):
                break
            self._speak(running, turn, sampling)
            self._answer([episode for episode in running if not episode.ended])
        self._environments.forget()
        return [_joined(episode) for episode in episodes]

    def _begun(self, problems: Sequence[Problem], step: int, samples: int) -> list[_Running]:
        config = self._config
        names = [(step, p.prompt_id, place % samples, place) for place, p in enumerate(problems)]
        # One seed for all episodes of a problem: their rewards are compared.
        seeds = [sample_seed(config.sampler.seed, problem.prompt_id, 0) for problem in problems]
        playing = [starting(*start) for start in zip(names, seeds, problems, strict=True)]
        said = self._environments.begin(playing)
        first = [
            Problem(number, observation, None) for number, observation in enumerate(said[::samples])
        ]
        for place, observation in enumerate(said):
            if (known := first[place // samples]).prompt != observation:
                raise MismatchError(
                    f"--environment {config.turns.environment} is not deterministic: reset with the "
                    f"same seed and problem returned {str(known.prompt)[:_SHOWN]!r} and "
                    f"{str(observation)[:_SHOWN]!r}, so rewards cannot be compared. Draw "
                    "everything in reset from its seed."
                )
        prompts = self._prompts(first, [p.prompt_id for p in problems[::samples]])
        return [_Running(p, prompts[place // samples]) for place, p in enumerate(playing)]

    def _prompts(self, problems: list[Problem], prompt_ids: list[int]) -> list[list[int]]:
        """Prompts by their index here: with several evaluation sets, two problems may have the
        same `prompt_id`.
        """
        if not problems:
            return []
        config = self._config
        encoded = encode_prompts(
            problems,
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
        return min(self._config.sampler.max_tokens, context) - len(episode.said)

    def _speak(
        self, running: Sequence[_Running], turn: int, sampling: SamplingSettings | None
    ) -> None:
        """Sample a turn of each; one that ran out of room ends its episode."""
        if not running and self._config.engine.tensor_parallel == 1:
            return
        requests = [self._request(episode, turn, sampling) for episode in running]
        prompts = [episode.playing.name[1] for episode in running]
        spoken = sample_checked(self._engine, requests, prompts, lambda _: None)
        for episode, said in zip(running, spoken, strict=True):
            episode.parts.append(said)
            episode.turns += 1
            if said.finish_reason == "length" and not self._room(episode):
                episode.ended = "length"

    def _request(self, episode: _Running, turn: int, sampling: SamplingSettings | None) -> Request:
        step, prompt_id, sample, _ = episode.playing.name
        seed = sample_seed(self._config.sampler.seed, prompt_id, sample, step, turn)
        longest = min(
            self._room(episode), self._config.turns.turn_tokens or self._config.sampler.max_tokens
        )
        return Request(episode.prompt_ids + episode.said, seed, sampling, longest)

    def _answer(self, running: Sequence[_Running]) -> None:
        """Take a step in each environment, and append its reply to the turn, if there is room
        for more.
        """
        actions = [self._text(episode.parts[-1]) for episode in running]
        outcomes = self._environments.step([episode.playing for episode in running], actions)
        going = []
        for episode, outcome in zip(running, outcomes, strict=True):
            # The step timed out, or was the last
            last = outcome is None or episode.turns == self._config.turns.max_turns
            episode.reward += 0.0 if outcome is None else outcome.reward
            episode.ended = "stop" if outcome and outcome.done else "length" if last else ""
            if outcome and not episode.ended:
                going.append((episode, outcome))
        said = self._turns.after(
            [e.parts[-1] for e, _ in going], [outcome.observation for _, outcome in going]
        )
        for (episode, _), ids in zip(going, said, strict=True):
            if len(ids) < self._room(episode):
                episode.parts.append(_unmeasured(ids, episode.parts[-1]))
            else:
                episode.ended = "length"

    def _text(self, turn: Rollout) -> str:
        """The text of an action, without its end token."""
        ids = turn.response_ids[:-1] if turn.finish_reason == "stop" else turn.response_ids
        text: str = self._tokenizer.decode(ids)
        return text


_SHOWN = 100  # characters of an observation


def _joined(episode: _Running) -> Episode:
    """One response: the turns as sampled, and unmeasured tokens between them."""
    parts = episode.parts
    return Episode(
        prompt_ids=episode.prompt_ids,
        response_ids=episode.said,
        logp_rollout_T=np.concatenate([part.logp_rollout_T for part in parts]),
        rank_rollout_T=np.concatenate([part.rank_rollout_T for part in parts]),
        topk_ids_TK=_all([part.topk_ids_TK for part in parts]),
        topk_logp_rollout_TK=_all([part.topk_logp_rollout_TK for part in parts]),
        finish_reason=episode.ended,
        routes_FMK=_routes([part for part in parts if part.finish_reason != _NOBODY]),
        reward=episode.reward,
        turns=episode.turns,
        loss_mask_T=np.concatenate(
            [np.full(len(p.response_ids), p.finish_reason != _NOBODY) for p in parts]
        ),
    )


def _all(columns: list[np.ndarray | None]) -> np.ndarray | None:
    known = [column for column in columns if column is not None]
    return np.concatenate(known) if known else None


def _routes(spoken: list[Rollout]) -> np.ndarray | None:
    """The experts of every token when it was first read: each turn reads the earlier ones again."""
    first, read = [], 0
    for turn in spoken:
        if turn.routes_FMK is None:
            return None
        first.append(turn.routes_FMK[read:])
        read = len(turn.routes_FMK)
    return np.concatenate(first)


_NOBODY = ""  # the finish reason of tokens that the model did not sample


def _unmeasured(ids: list[int], beside: Rollout) -> Rollout:
    """Tokens that the model did not sample, with the columns of a turn."""
    width = None if beside.topk_ids_TK is None else beside.topk_ids_TK.shape[1]
    return Rollout(
        prompt_ids=[],
        response_ids=ids,
        logp_rollout_T=np.full(len(ids), np.nan, dtype=np.float32),
        rank_rollout_T=np.full(len(ids), -1, dtype=np.int32),
        topk_ids_TK=None if width is None else np.zeros((len(ids), width), dtype=np.int32),
        topk_logp_rollout_TK=None
        if width is None
        else np.full((len(ids), width), np.nan, dtype=np.float32),
        finish_reason=_NOBODY,
    )
