"""Recorded responses read at once by a server: log-probs of a prompt that they are part of, checked as answers are."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from mismatch_cli.engines import Forced, Told
from mismatch_cli.engines._server_rollout import WITHOUT_IDS, Completions, finite, only_choice, unusable
from mismatch_cli.errors import MismatchError
from mismatch_cli.sampling import SamplingSettings

_BYTES_PER_TOKEN = 300  # of a log-prob with its rank and text


def check_as_it_comes(sampling: SamplingSettings) -> None:
    """A server gives log-probs of a prompt before temperature and truncation, whatever its --logprobs-mode."""
    if sampling.truncates or sampling.temperature != 1:
        raise MismatchError(
            "A server gives log-probs of recorded tokens before temperature and truncation: they are not those of "
            "what was sampled. Use --engine vllm or --engine hf, or compare what was sampled at temperature 1 without "
            "truncation."
        )


async def prefilled(completions: Completions, responses: Sequence[Forced], on_finished: Told) -> list[np.ndarray]:
    """Log μ of each response's tokens, float32 [T]; the first failure ends them all."""
    salt = secrets.token_hex(16)
    given: set[str] = set()

    async def logp_of(response: Forced) -> np.ndarray:
        whole = response.prompt_ids + response.response_ids
        if len(whole) >= completions.context:
            raise MismatchError(
                f"A prompt and its response have {len(whole)} tokens, and the server's context {completions.context}: "
                f"a server reads them only where one more fits. Start it with --max-model-len {len(whole) + 1}."
            )
        most = 2**20 + _BYTES_PER_TOKEN * len(whole)
        answer, _ = await completions.server.post("/v1/completions", _payload(whole, completions.model, salt), most)
        completions.check_whose(answer, given)
        logp_T = _logp(whole, answer)[-len(response.response_ids) :]
        on_finished(1)
        return logp_T

    return list(await asyncio.gather(*map(logp_of, responses)))


def _payload(token_ids: list[int], model: str, salt: str) -> dict[str, Any]:
    """One token has to be drawn: nobody looks at it."""
    return {
        "model": model,
        "prompt": token_ids,
        "add_special_tokens": False,
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 0,
        "return_token_ids": True,
        "cache_salt": salt,
    }


def _logp(token_ids: list[int], answer: Any) -> np.ndarray:
    """Of every token but the first."""
    choice = only_choice(answer)
    if choice.get("prompt_token_ids") is None:
        raise MismatchError(WITHOUT_IDS)
    if choice["prompt_token_ids"] != token_ids:
        raise unusable("it read another prompt than it was given")
    entries = choice.get("prompt_logprobs")
    if not isinstance(entries, list) or len(entries) != len(token_ids):
        raise unusable("it does not hold a log-prob for each token of its prompt")
    return np.array([_of(*pair) for pair in zip(token_ids[1:], entries[1:], strict=True)], dtype=np.float32)


def _of(token: int, entry: Any) -> float:
    """The token itself is always there, and others where they are more probable."""
    told = entry.get(str(token)) if isinstance(entry, dict) else None
    if not isinstance(told, dict):
        raise unusable("its log-probs are of other tokens than its prompt's")
    return finite(told.get("logprob"))
