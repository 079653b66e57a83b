"""The token ids between two turns of the model: an observation as the chat template renders it.

The model's own text is never retokenized. The template determines what follows an assistant turn,
and these ids are appended to the sampled ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.probe.tasks.prompt_templates import rendered
from mismatch_cli.probe.tasks.prompts import Problem, plain_text, token_ids
from mismatch_cli.rules.batch import Rollout
from mismatch_cli.train.environment import Observation

_TURN = "THE-TURN-OF-THE-MODEL"  # a text that no template contains
_BEFORE = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _TURN}]


class Turns:
    """Renders observations after turns with `template`: "chat", or "raw" for the bare text."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        chat = template == "chat" and getattr(tokenizer, "chat_template", None) is not None
        self._tokenizer, self._chat = tokenizer, chat
        self._known: dict[str, list[int]] = {}  # observations often repeat

    def after(
        self, turns: Sequence[Rollout], observations: Sequence[Observation]
    ) -> list[list[int]]:
        """The token ids that follow each turn."""
        keys = [json.dumps(observation) for observation in observations]
        unknown = {
            key: said
            for key, said in zip(keys, observations, strict=True)
            if key not in self._known
        }
        # Of the last turn only
        self._known = {key: self._known[key] for key in keys if key in self._known}
        for number, (key, text) in enumerate(
            zip(unknown, self._texts(list(unknown.values())), strict=True)
        ):
            # The model's text, tokenised again, may give tokens to which its log μ does not belong.
            # So only what follows a turn is rendered and tokenised, never the whole conversation.
            self._known[key] = token_ids(self._tokenizer, text, number, special=False)
        return [
            self._without_end(turn, self._known[key]) for turn, key in zip(turns, keys, strict=True)
        ]

    def _without_end(self, turn: Rollout, ids: list[int]) -> list[int]:
        """Drop the template's end-of-turn token if the model has already sampled it."""
        ended = self._chat and turn.finish_reason == "stop" and ids[:1] == turn.response_ids[-1:]
        return ids[1:] if ended else ids

    def _texts(self, observations: Sequence[Observation]) -> list[str]:
        if not observations or not self._chat:
            return [
                plain_text(Problem(i, said, None), "raw") for i, said in enumerate(observations)
            ]
        chats = {i: [*_BEFORE, *_as_messages(said)] for i, said in enumerate(observations)}
        return [_after_the_turn(text) for text in rendered(self._tokenizer, chats)]


def _as_messages(observation: Observation) -> list[dict[str, str]]:
    return (
        [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    )


def _after_the_turn(text: str) -> str:
    _, found, rest = text.partition(_TURN)
    if not found:
        raise MismatchError(
            "The model's chat template drops earlier assistant messages, so nothing can follow a "
            "turn. Use --prompt-template raw, or fix the template (chat_template.jinja next to "
            "the tokenizer)."
        )
    return rest
