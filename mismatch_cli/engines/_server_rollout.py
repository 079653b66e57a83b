"""The completions API: requests for responses with everything that was sampled, and their answers made `Rollout`s."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np

from mismatch_cli.batch import Rollout
from mismatch_cli.engines import Request
from mismatch_cli.engines._server_http import Server
from mismatch_cli.errors import MismatchError
from mismatch_cli.sampling import SamplingSettings
from mismatch_cli.trace.foreign import are_token_ids

_MINUS_INFINITY = -9999.0  # JSON has no -inf: vLLM clips there
_MOST_PROBABILITY = 1 + 1e-3  # of distinct tokens together, with room for float32
_ID_PREFIX = "token_id:"
WITHOUT_IDS = (
    "The server does not return token ids, and ids made from its text would not be those that were sampled. "
    "Use vLLM 0.10.2 or newer, whose /v1/completions knows return_token_ids and return_tokens_as_token_ids."
)


@dataclass(frozen=True)
class Completions:
    """One model of a server, as something to sample from."""

    server: Server
    model: str
    vocabulary: int
    context: int

    async def sample(
        self,
        requests: Sequence[Request],
        sampling: SamplingSettings,
        top_logprobs: int,
        on_finished: Callable[[int], None] = lambda _: None,
    ) -> list[Rollout]:
        """One response per request, in their order; the first failure ends them all."""
        salt = secrets.token_hex(16)

        async def one(request: Request) -> Rollout:
            room = min(sampling.max_tokens, self.context - len(request.prompt_ids))
            asked = payload(request, self.model, sampling, top_logprobs, room, salt)
            answer = await self.server.post("/v1/completions", asked)
            rollout = to_rollout(request, answer, top_logprobs, room, self.vocabulary)
            on_finished(1)
            return rollout

        return list(await asyncio.gather(*map(one, requests)))


def payload(
    request: Request, model: str, sampling: SamplingSettings, top_logprobs: int, max_tokens: int, salt: str
) -> dict[str, Any]:
    """Every setting by name: what is left out, a server fills in from the model's generation_config.

    `salt` keeps the prefix cache apart from what others, and earlier shards, left there.
    """
    return {
        "model": model,
        "prompt": request.prompt_ids,
        "add_special_tokens": False,
        "max_tokens": max_tokens,
        "seed": request.seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "cache_salt": salt,
    }


def to_rollout(request: Request, answer: Any, top_logprobs: int, max_tokens: int, vocabulary: int) -> Rollout:
    """Check an answer whole and take it over; whether log μ is one is checked where every engine's is.

    The API tells no ranks: the sampled token's is known where it is among the top K, else it is -1, not measured.
    """
    choice = _only_choice(answer)
    ids = choice.get("token_ids")
    if ids is None or choice.get("prompt_token_ids") is None:
        raise MismatchError(WITHOUT_IDS)
    if choice["prompt_token_ids"] != request.prompt_ids:
        raise _unusable("it sampled from another prompt than it was given")
    if not are_token_ids(ids, vocabulary):
        raise _unusable(f"it holds token ids that are none of the model's {vocabulary}")
    _check_end(choice.get("finish_reason"), len(ids), max_tokens)
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        raise _unusable("it holds no log-probs")
    columns: list[Any] = [logprobs.get(name) for name in ("tokens", "token_logprobs", "top_logprobs")]
    if not all(isinstance(column, list) and len(column) == len(ids) for column in columns):
        raise _unusable(f"it does not hold {len(ids)} log-probs for {len(ids)} tokens")
    tokens, logp_T, top = columns
    if any(_id_of(token) != i for token, i in zip(tokens, ids, strict=True)):
        raise _unusable("its log-probs are of other tokens than it returns")
    rows = [_ranked(*each, top_logprobs, vocabulary) for each in zip(ids, logp_T, top, strict=True)]
    return Rollout(
        prompt_ids=request.prompt_ids,
        response_ids=ids,
        logp_rollout_T=np.array([_finite(logp) for logp in logp_T], dtype=np.float32),
        rank_rollout_T=np.array([rank for rank, _, _ in rows], dtype=np.int32),
        topk_ids_TK=np.array([ids for _, ids, _ in rows], dtype=np.int32) if top_logprobs else None,
        topk_logp_rollout_TK=np.array([logp for _, _, logp in rows], dtype=np.float32) if top_logprobs else None,
        finish_reason=choice["finish_reason"],
    )


def _only_choice(answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise _unusable("it is not one completion")
    return choices[0]


def _check_end(reason: Any, length: int, max_tokens: int) -> None:
    if reason not in ("stop", "length"):
        raise MismatchError(
            f"The server ended a response with {str(reason)[:40]!r}: it was stopped, paused or failed in the middle. "
            "Go on with --resume when it runs again."
        )
    if not 0 < length <= max_tokens:
        raise _unusable(f"it holds {length} tokens where 1 to {max_tokens} were asked for")
    if reason == "length" and length < max_tokens:
        raise MismatchError(
            f"The server cut a response at {length} tokens where {max_tokens} were asked for: it has a limit of its "
            f"own (max_new_tokens in a generation config). Start it with --generation-config vllm, or use "
            f"--max-tokens {length}."
        )


def _ranked(
    sampled: int, sampled_logp: Any, entries: Any, top_logprobs: int, vocabulary: int
) -> tuple[int, list[int], list[float]]:
    """The sampled token's rank (-1: outside the top K) and the engine's ranks 1…K, most probable first.

    The server lists the sampled token first, then ranks 1…K without it: K entries where it is among them, else K + 1.
    """
    if not isinstance(entries, dict):
        raise _unusable("it holds no top log-probs")
    logp = {_id_of(token): _finite(value) for token, value in entries.items()}
    if not sum(exp(min(value, 1.0)) for value in logp.values()) <= _MOST_PROBABILITY:
        raise MismatchError(
            f"The server's log-probs are none: the probabilities of {len(logp)} tokens add up to more than 1. "
            "Start it with --logprobs-mode processed_logprobs."
        )
    if sampled not in logp or logp[sampled] != _finite(sampled_logp) or not all(0 <= i < vocabulary for i in logp):
        raise _unusable("its top log-probs do not belong to its tokens")
    if len(logp) == top_logprobs + 1:  # the sampled token came on top of K
        ranked = sorted((i for i in logp if i != sampled), key=lambda i: -logp[i])
        known = bool(ranked) and logp[sampled] >= logp[ranked[-1]]  # a tie with rank K
    elif len(logp) == top_logprobs:
        ranked, known = sorted(logp, key=lambda i: -logp[i]), True
    else:
        raise _unusable(f"it holds {len(logp)} log-probs for a token where {top_logprobs} were asked for")
    rank = 1 + sum(value > logp[sampled] for value in logp.values()) if known else -1
    return rank, ranked, [logp[i] for i in ranked]


def _id_of(token: Any) -> int:
    if not isinstance(token, str) or not token.startswith(_ID_PREFIX) or not token[len(_ID_PREFIX) :].isdecimal():
        raise MismatchError(WITHOUT_IDS)
    return int(token[len(_ID_PREFIX) :])


def _finite(logp: Any) -> float:
    """A log-prob as the server means it; NaN, which no later check lets pass, for what is no number."""
    if isinstance(logp, bool) or not isinstance(logp, int | float):
        return float("nan")
    return float("-inf") if logp <= _MINUS_INFINITY else float(logp)


def _unusable(what: str) -> MismatchError:
    return MismatchError(
        f"An answer of the server cannot be used: {what}. Check that --engine-url names a vLLM server and not a "
        "proxy that rewrites answers."
    )
