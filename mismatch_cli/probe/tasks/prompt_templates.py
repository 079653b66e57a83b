"""Renders chat templates, which are programs, with limits: 10 s per prompt, half a GiB, and a
text of similar size.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mismatch_cli.base import memory
from mismatch_cli.base.errors import MismatchError, first_line
from mismatch_cli.processes.child_worker import die_with_parent

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_SECONDS = 10.0  # for one prompt; an ordinary one takes a millisecond
_MEMORY = 2**29
_MOST_TEXT, _TIMES = 2**22, 16  # characters of text, plus this many times the prompt's length
_SHOWN = 200
_WELL, _ILL = b"=", b"!"
Messages = list[dict[str, str]]


def rendered(tokenizer: Any, conversations: Mapping[int, Messages]) -> Iterator[str]:
    """Each conversation as the tokenizer's chat template renders it; a `MismatchError` where the
    template fails.
    """
    # A chat template is a program that comes with a model, and may loop in C for hours.
    # Nothing interrupts that but a system timer, which ends the process: so a fork renders.
    from multiprocessing.connection import Pipe  # which `--help` need not pay for

    answers, child_end = Pipe(duplex=False)
    child: int | None = os.fork()
    if not child:
        try:
            answers.close()
            _render(tokenizer, conversations.values(), child_end)
        finally:
            os._exit(0)
    child_end.close()
    try:
        for prompt_id in conversations:
            try:
                answer = answers.recv_bytes()
            except EOFError:
                (_, status), child = os.waitpid(child, 0), None
                late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
                raise _failed(
                    f"takes over {_SECONDS:g} s" if late else "crashes its process", prompt_id
                ) from None
            text = answer[1:].decode(errors="surrogatepass")
            if answer[:1] == _ILL:
                raise _failed(text, prompt_id)
            yield text
    finally:
        answers.close()
        if child is not None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _failed(fault: str, prompt_id: int) -> MismatchError:
    return MismatchError(
        f"The model's chat template {fault} on prompt {prompt_id}. Use --prompt-template raw, or "
        "fix the template (chat_template.jinja next to the tokenizer)."
    )


def _render(tokenizer: Any, conversations: Iterable[Messages], answers: Connection) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    with memory.limited(_MEMORY):
        for messages in conversations:
            signal.setitimer(signal.ITIMER_REAL, _SECONDS)
            answer = _put(tokenizer, messages)
            signal.setitimer(signal.ITIMER_REAL, 0)
            answers.send_bytes(answer)
            if answer[:1] == _ILL:
                return


def _put(tokenizer: Any, messages: Messages) -> bytes:
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        most = _MOST_TEXT + _TIMES * len(json.dumps(messages))
        if len(text) > most:
            return _ILL + f"renders {len(text):,} characters".encode()
        return _WELL + text.encode(errors="surrogatepass")
    except MemoryError:
        return _ILL + f"takes over {_MEMORY // 2**20} MiB of memory".encode()
    except Exception as error:  # the template's own raise_exception, the sandbox, any filter
        why = f"{type(error).__name__}: {first_line(error)}"[:_SHOWN]
        return _ILL + f"fails ({why})".encode(errors="backslashreplace")
