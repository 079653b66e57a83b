"""Recorded responses read in one pass by a server: as part of a prompt whose log-probs it
returns, checked.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import ForcedResponse, OnFinished
from mismatch_cli.models.engines._server_http import lookup
from mismatch_cli.models.engines._server_rollout import (
    WITHOUT_IDS,
    Completions,
    finite,
    only_choice,
    unusable,
)

_BYTES_PER_TOKEN = 300  # for a log-prob with its rank and text


def check_as_it_comes(sampling: SamplingSettings) -> None:
    """Refuse settings that a server ignores: its prompt log-probs are from before temperature
    and truncation.
    """
    if sampling.truncates or sampling.temperature != 1:
        raise MismatchError(
            "A server's log-probs of recorded tokens are from before temperature and truncation, "
            "so they are not those of the sampler. Use --engine vllm or --engine hf, or a trace "
            "sampled at temperature 1 without truncation."
        )


async def prefill(
    completions: Completions, responses: Sequence[ForcedResponse], on_finished: OnFinished
) -> list[np.ndarray]:
    """Log μ of each response's tokens, float32 [T]; the first failure cancels the rest."""
    salt = secrets.token_hex(16)
    answer_ids: set[str] = set()

    async def prefill_one(response: ForcedResponse) -> np.ndarray:
        sequence = response.prompt_ids + response.response_ids
        if len(sequence) >= completions.context:
            raise MismatchError(
                f"A prompt and its response have {len(sequence)} tokens, and the server must fit "
                f"one more into its context of {completions.context}. Start it with "
                f"vllm serve --max-model-len {len(sequence) + 1}."
            )
        body = _payload(sequence, completions.model, salt)
        most_bytes = 2**20 + _BYTES_PER_TOKEN * len(sequence)
        answer, _ = await completions.server.post("/v1/completions", body, most_bytes)
        completions.check_source(answer, answer_ids)
        logp_T = _read_logp(sequence, answer)[-len(response.response_ids) :]
        on_finished(1)
        return logp_T

    return list(await asyncio.gather(*map(prefill_one, responses)))


def _payload(token_ids: list[int], model: str, salt: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": token_ids,
        "add_special_tokens": False,
        # The API cannot draw none: this token is ignored.
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 0,  # of each token, without the most probable ones
        "return_token_ids": True,
        "cache_salt": salt,
    }


def _read_logp(token_ids: list[int], answer: Any) -> np.ndarray:
    """Log μ of every token but the first, which follows nothing."""
    choice = only_choice(answer)
    if choice.get("prompt_token_ids") is None:
        raise MismatchError(WITHOUT_IDS)
    if choice["prompt_token_ids"] != token_ids:
        raise unusable("it did not read the prompt that was sent")
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(token_ids):
        raise unusable("it does not have a log-prob for each token of its prompt")
    logps = map(_read_entry, token_ids[1:], entries[1:])
    return np.array(list(logps), dtype=np.float32)


def _read_entry(token: int, entry: Any) -> float:
    """The log-prob of one token; an entry always has it, and may have more probable ones."""
    own = lookup(entry, str(token))
    if not isinstance(own, dict):
        raise unusable("its log-probs do not belong to the tokens of its prompt")
    return finite(own.get("logprob"))
