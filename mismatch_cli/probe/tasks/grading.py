"""Rewards and advantages of responses: verl's or oat's rule, a named reward or a user's function,
in a worker that cannot hang the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from math import nan
from typing import TYPE_CHECKING, Any

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.probe.tasks import named_rewards
from mismatch_cli.probe.tasks._oat_worker import comparison
from mismatch_cli.probe.tasks.answers import (
    OAT_RULE,
    THOUGHT,
    VERL_RULE,
    asks_for_box,
    asks_for_line,
    last_boxed,
    only_answer,
    stated_answer,
)
from mismatch_cli.probe.tasks.prompts import CONVERSATIONS, LINE_TEMPLATE, Problem
from mismatch_cli.probe.tasks.reward_worker import math_verify
from mismatch_cli.probe.tasks.rewards import AnsweredResponse, OwnReward, is_own, needs_answer
from mismatch_cli.processes.child import Child
from mismatch_cli.rules.batch import Rollout

if TYPE_CHECKING:
    import numpy as np


def group_mean_advantages(reward_S: np.ndarray, prompt_id_S: np.ndarray) -> np.ndarray:
    """Reward minus the mean of its group (the samples of one prompt), without division by the
    standard deviation.

    A_i = R_i − mean_{j in group} R_j, float32, shape _S. A group of one, or with equal rewards,
    gets zeros: it teaches nothing. A NaN reward means none: it is left out of the mean, and its
    advantage is NaN too. Source: Dr. GRPO; arXiv 2602.04879, section 4.1 and App. C.1.
    """
    import numpy as np

    _, group_S = np.unique(prompt_id_S, return_inverse=True)
    has_reward_S = ~np.isnan(reward_S)
    sums_G = np.bincount(group_S, weights=np.where(has_reward_S, reward_S, 0))
    means_G = sums_G / np.maximum(np.bincount(group_S, weights=has_reward_S), 1)
    return (reward_S - means_G[group_S]).astype(np.float32)


_END_OF_PROMPT = 16  # tokens, which hold the tag of a thought, whole or in pieces
_PLAIN_INTEGER = re.compile(r"-?[0-9]{1,15}")


class MathVerify:
    """Compares answers in a child process, which is restarted when a comparison takes too long.

    `rule` is "verl", math-verify as verl calls it, or "oat". A context manager: the child ends with
    it. Equal pairs are compared once. `timeouts` counts responses that scored 0 because their
    comparison timed out, `stated` those that state an answer, `unstated` those that ended without
    one.
    """

    def __init__(self, seconds: float = 5.0, rule: str = VERL_RULE) -> None:
        function, self._form = _RULES[rule]
        self._verdicts: dict[tuple[str, str], float] = {}
        self._seconds = seconds
        self.timeouts = self.stated = self.unstated = 0
        self.child = Child(
            function,
            cannot_start=(
                "The grading worker (math-verify) did not start. Try: python -c 'import "
                "math_verify'"
            ),
        )

    def grade(
        self,
        response: str,
        answer: str,
        finish_reason: str,
        *,
        in_thought: bool = False,
        on_line: bool = False,
    ) -> float:
        """1 if the answer that a response states (see `stated_answer`) is right, else 0;
        truncated ones score 0.
        """
        if finish_reason == "length":
            return 0.0
        stated = stated_answer(response, in_thought=in_thought, on_line=on_line)
        if stated is None:
            self.unstated += 1
            return 0.0
        self.stated += 1
        answer = only_answer(answer)
        if _PLAIN_INTEGER.fullmatch(stated) and _PLAIN_INTEGER.fullmatch(answer):
            # math-verify agrees, but takes a thousand times longer.
            return float(int(stated) == int(answer))
        pair = (stated, answer)
        if pair not in self._verdicts:
            verdict = self.compare(stated, answer)
            if verdict is None:
                self.timeouts += 1
                return 0.0
            self._verdicts[pair] = verdict
        return self._verdicts[pair]

    def __enter__(self) -> MathVerify:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.stop()

    def compare(self, stated: str, answer: str) -> float | None:
        """1 if the answers are equal, else 0; None if comparing took too long, or two children died
        of it (one death may be the machine's fault).
        """
        answers = [self._form(stated), self._form(answer)]
        for _ in range(2):
            reply = self.child.ask(answers, self._seconds)
            if not reply.error:
                return float(reply.value)
            self.child.stop()  # whatever it has become, the next one is new
        self.child.give_up([json.dumps(answers)])
        return None


def _as_box(answer: str) -> str:
    """A LaTeX box: the only form whose extent math-verify does not have to guess."""
    inner = last_boxed(answer)
    # With its dollars, as verl passes it: math-verify reads $5$, and $5\$$ too.
    return f"\\boxed{{{answer.strip() if inner is None else inner}}}"


def _unboxed(answer: str) -> str:
    """What oat compares: the content of a box, or the whole."""
    inner = last_boxed(answer)
    return answer if inner is None else inner


# What compares answers by each rule, and in which form
_RULES: dict[str, tuple[Callable[[], Callable[[list[str]], bool]], Callable[[str], str]]] = {
    VERL_RULE: (math_verify, _as_box),
    OAT_RULE: (comparison, _unboxed),
}


def gradable(problems: Sequence[Problem], reward: str | None, location: str) -> list[Problem]:
    """The problems that can be graded: those with an answer, or all with a `reward` that needs
    none; a `MismatchError` if none can.
    """
    if not needs_answer(reward):
        answered = list(problems)
    else:
        answered = [problem for problem in problems if problem.answer is not None]
    if not answered:
        raise MismatchError(
            f"{location} has no problem with an answer. Name the field that holds it with "
            "answer_field = … in a file for --config."
        )
    return answered


class Grader:
    """Grades responses as text, in a child process; a context manager.

    `reward` is FILE.py:FUNCTION, with a limit of `seconds`, the name of a reward, or None; names
    that need it, and None, grade by a `rule`: verl's or oat's. After a prompt that ends
    in an open thought, only text after the thought counts. `answer_format` is where responses
    state their answer; "auto" lets each prompt decide. `chat`: the tokenizer has a chat template,
    which turns problems into conversations.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        reward: str | None = None,
        seconds: float | None = None,
        template: str = "chat",
        answer_format: str = "auto",
        rule: str = VERL_RULE,
        chat: bool = True,
    ) -> None:
        self._decode = decode
        self._format = answer_format
        self._template_asks_for_line = template == LINE_TEMPLATE
        self._needs_answer = needs_answer(reward)
        self._named: named_rewards.NamedReward | None = None
        self._scorer: MathVerify | OwnReward = MathVerify(rule=rule)
        if reward and is_own(reward):
            conversational = chat and template in CONVERSATIONS
            self._scorer = OwnReward(reward, seconds or 0, conversational=conversational)
        elif reward:
            self._named = named_rewards.find(reward)

    def can_grade(self, problem: Problem) -> bool:
        """Without an answer, only a reward that needs none can grade."""
        return not self._needs_answer or problem.answer is not None

    def rewards(self, problems: Sequence[Problem], rollouts: Sequence[Rollout]) -> list[float]:
        """The rewards of responses; 0 after a timeout, NaN where grading is impossible or a
        function declines.
        """
        pairs = zip(problems, rollouts, strict=True)
        if isinstance(self._scorer, OwnReward):
            return self._scorer.grade_all([self._answered(*pair) for pair in pairs])
        return [self._reward(*pair) for pair in pairs]

    def _answered(self, problem: Problem, rollout: Rollout) -> AnsweredResponse:
        return AnsweredResponse(
            self._text(rollout),
            problem.answer,
            problem.prompt,
            rollout.finish_reason,
            problem.columns,
            tuple(rollout.response_ids),
        )

    def _reward(self, problem: Problem, rollout: Rollout) -> float:
        right = nan
        if self._needs_answer:
            right = self._verified(problem, rollout)
        if self._named is None:
            return right
        return self._named.reward(self._text(rollout), right)

    def _verified(self, problem: Problem, rollout: Rollout) -> float:
        if problem.answer is None:
            return nan
        assert isinstance(self._scorer, MathVerify)
        on_line = self._format == "line"
        if self._format == "auto":
            on_line = self._wants_line(problem)
        return self._scorer.grade(
            self._text(rollout),
            problem.answer,
            rollout.finish_reason,
            in_thought=self._opens_thought(rollout.prompt_ids),
            on_line=on_line,
        )

    def _opens_thought(self, prompt_ids: list[int]) -> bool:
        """Whether the prompt ends inside a thought, as chat templates of reasoning models do."""
        return self._decode(prompt_ids[-_END_OF_PROMPT:]).rstrip().endswith(THOUGHT)

    def _wants_line(self, problem: Problem) -> bool:
        """Whether the prompt asks for a line: the template adds its words only to problems that
        ask for no format.
        """
        if asks_for_line(problem.prompt):
            return True
        return self._template_asks_for_line and not asks_for_box(problem.prompt)

    def _text(self, rollout: Rollout) -> str:
        response_ids = rollout.response_ids
        if rollout.finish_reason == "stop":
            # The last token only ends the response: its text is not part of what was said.
            response_ids = response_ids[:-1]
        return self._decode(response_ids)

    @property
    def stated(self) -> int:
        """Number of responses that state an answer; 0 with a reward that needs none."""
        return self._scorer.stated if isinstance(self._scorer, MathVerify) else 0

    @property
    def timeouts(self) -> int:
        """Number of responses that earned 0 because grading them took too long."""
        return self._scorer.timeouts

    @property
    def unstated(self) -> int:
        """Number of responses that ended without stating an answer; 0 with a reward that needs
        none.
        """
        return self._scorer.unstated if isinstance(self._scorer, MathVerify) else 0

    def start(self) -> None:
        """Start a user's code now, which shows whether it loads; other workers start when they have
        something to compare.
        """
        if isinstance(self._scorer, OwnReward):
            self._scorer.child.start()

    def state_dict(self) -> dict[str, Any]:
        """What took too long: a resumed run does not try it again, and so scores like an
        uninterrupted one.
        """
        return {
            "given_up": self._scorer.child.given_up,
            "timeouts": self.timeouts,
            "unstated": self.unstated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scorer.child.give_up(state["given_up"])
        self._scorer.timeouts = state["timeouts"]
        if isinstance(self._scorer, MathVerify):
            self._scorer.unstated = state.get("unstated", 0)  # older checkpoints have none

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._scorer.child.stop()
