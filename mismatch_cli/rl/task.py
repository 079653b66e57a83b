"""The problems of a training run: which ones a step samples, how they are posed, and what an answer earns."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from mismatch_cli.batch import Rollout
from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.rl.config import TrainConfig
from mismatch_cli.tasks.grading import Grader
from mismatch_cli.tasks.own_reward import OwnReward
from mismatch_cli.tasks.prompts import Problem, PromptSource, encode_prompts, load_problems


@dataclass(frozen=True)
class Posed:
    """A problem with the token ids that pose it."""

    problem: Problem
    prompt_ids: list[int]


class Task:
    """Problems with answers; a step's share follows from seed and step alone, every problem once in each epoch."""

    def __init__(self, config: TrainConfig, tokenizer: Any, max_model_len: int) -> None:
        self._config, self._tokenizer = config, tokenizer
        source = PromptSource(
            config.dataset,
            prompt_field=config.prompt_field or None,
            answer_field=config.answer_field or None,
            split=config.split,
            limit=config.num_problems or None,
        )
        self._judge = OwnReward(config.reward) if config.reward else Grader()
        problems = [p for p in load_problems(source) if config.reward or p.answer is not None]
        if not problems:
            raise MismatchError(f"{config.dataset} has no problem with an answer. Name its field with --answer-field.")
        self.posed = self._pose(problems, max_model_len)
        if config.prompts_per_step > len(self.posed):
            raise UsageError(
                f"prompts_per_step = {config.prompts_per_step} is more than the {len(self.posed)} problems there are."
            )

    def _pose(self, problems: list[Problem], max_model_len: int) -> list[Posed]:
        template = self._config.prompt_template
        encoded = encode_prompts(problems, self._tokenizer, template=template, max_model_len=max_model_len)
        return [Posed(p, i) for p, i in zip(encoded.problems, encoded.prompt_ids, strict=True)]

    def of_step(self, step: int) -> list[Posed]:
        """The problems of a step, without what is left over at the end of an epoch."""
        per_epoch = len(self.posed) // self._config.prompts_per_step
        epoch, place = divmod(step, per_epoch)
        order = list(range(len(self.posed)))
        random.Random(f"{self._config.seed}/{epoch}").shuffle(order)
        first = place * self._config.prompts_per_step
        return [self.posed[i] for i in order[first : first + self._config.prompts_per_step]]

    def reward(self, posed: Posed, rollout: Rollout) -> float:
        """What a response earns, by math-verify or by the user's function."""
        response, problem = self._tokenizer.decode(rollout.response_ids), posed.problem
        if isinstance(self._judge, OwnReward):
            return self._judge.grade(response, problem.answer, rollout.finish_reason, problem.prompt)
        assert problem.answer is not None
        in_thought = self._config.prompt_template == "r1-distill"
        return self._judge.grade(response, problem.answer, rollout.finish_reason, in_thought=in_thought)

    @property
    def timeouts(self) -> int:
        """Responses that earned 0 because judging them took too long."""
        return self._judge.timeouts

    def state_dict(self) -> dict[str, Any]:
        """What took too long: a resumed run does not try it again, and scores what the unbroken one did."""
        return {"given_up": self._judge.child.given_up, "timeouts": self._judge.timeouts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._judge.child.give_up(state["given_up"])
        self._judge.timeouts = state["timeouts"]

    def close(self) -> None:
        self._judge.child.stop()
