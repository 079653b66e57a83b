"""Renders chat templates, which are programs, with limits: 10 s per prompt, half a GiB, and a
text of similar size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from mismatch_cli.base import memory
from mismatch_cli.base.errors import MismatchError, first_line
from mismatch_cli.processes.child import DIED, LATE, Child

_SECONDS = 10.0  # for one prompt; an ordinary one takes a millisecond
_MEMORY = 2**29
_MOST_TEXT, _TIMES = 2**22, 16  # characters of text, plus this many times the prompt's length
_LONGEST = 2**28  # bytes of JSON
_SHOWN = 200
Messages = list[dict[str, str]]


def rendered(tokenizer: Any, conversations: Mapping[int, Messages]) -> Iterator[str]:
    """Each conversation as the tokenizer's chat template renders it; a `MismatchError` where the
    template fails.
    """
    # A chat template is a program that comes with a model, and may loop in C for hours.
    # Only the end of its process interrupts that, so a child renders; a fork has the tokenizer.
    child = Child(
        partial(_renderer, tokenizer),
        cannot_start="Chat templates are rendered in a fork of this process, which did not start. "
        "Free some memory.",
        longest_answer=_LONGEST,
        forks=True,
    )
    try:
        for prompt_id, messages in conversations.items():
            reply = child.ask(messages, _SECONDS)
            if reply is LATE:
                raise _failed(f"takes over {_SECONDS:g} s", prompt_id)
            if reply is DIED:
                raise _failed("crashes its process", prompt_id)
            if reply.error:
                raise _failed(reply.error, prompt_id)
            yield reply.value
    finally:
        child.stop()


def _failed(fault: str, prompt_id: int) -> MismatchError:
    return MismatchError(
        f"The model's chat template {fault} on prompt {prompt_id}. Use --prompt-template raw, or "
        "fix the template (chat_template.jinja next to the tokenizer)."
    )


def _renderer(tokenizer: Any) -> Callable[[Messages], str]:
    def render(messages: Messages) -> str:
        try:
            with memory.limited(_MEMORY):
                text: str = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False
                )
        except MemoryError:
            fault = f"takes over {_MEMORY // 2**20} MiB of memory"
            raise MismatchError(fault) from None
        except Exception as error:  # the template's own raise_exception, the sandbox, any filter
            fault = f"{type(error).__name__}: {first_line(error)}"[:_SHOWN]
            raise MismatchError(f"fails ({fault})") from error
        if len(text) > _MOST_TEXT + _TIMES * len(json.dumps(messages)):
            raise MismatchError(f"renders {len(text):,} characters")
        return text

    return render
