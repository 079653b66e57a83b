"""The completions API: requests for responses with all their log-probs, and answers turned into
`Rollout`s.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, inf
from typing import Any, NamedTuple

import numpy as np

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import OnFinished, Request
from mismatch_cli.models.engines._server_http import Server, lookup
from mismatch_cli.rules.batch import Rollout
from mismatch_cli.trace.foreign_values import are_token_ids

_MINUS_INFINITY = -9999.0  # JSON has no -inf: vLLM clips there
_MOST_PROBABILITY = 1 + 1e-3  # total of distinct tokens, with room for float32
_TOO_LITTLE = 1 - 1e-2  # total of all tokens
_LARGEST = 1e-6  # largest log-prob: float32 may round it to above 0
_ID_PREFIX = "token_id:"
_DIGITS = 20
_SHOWN = 60  # characters of a name that a server gave
WITHOUT_IDS = (
    "The server does not return token ids, and ids made from its text may not be the sampled "
    "ones. Use vLLM 0.10.2 or newer: its /v1/completions knows return_token_ids and "
    "return_tokens_as_token_ids."
)


@dataclass(frozen=True)
class Completions:
    """One model of a server, to sample from."""

    server: Server
    model: str
    names: frozenset[str]  # all names of this model, including `model`
    vocabulary: int
    context: int

    async def sample(
        self,
        requests: Sequence[Request],
        sampling: SamplingSettings,
        top_logprobs: int,
        on_finished: OnFinished = lambda _: None,
    ) -> list[Rollout]:
        """One response per request, in their order; the first failure cancels the rest."""
        salt = secrets.token_hex(16)
        answer_ids: set[str] = set()

        async def sample_one(request: Request) -> Rollout:
            settings = request.sampling or sampling
            room = min(request.longest(sampling), self.context - len(request.prompt_ids))
            body = payload(request, self.model, settings, top_logprobs, room, salt)
            # An honest answer stays far below: a server that never stops is noticed soon.
            most_bytes = 2**20 + 16 * len(request.prompt_ids) + 100 * room * (top_logprobs + 10)
            answer, content = await self.server.post("/v1/completions", body, most_bytes)
            self.check_source(answer, answer_ids)
            rollout = to_rollout(request, answer, top_logprobs, room, self.vocabulary)
            _check_no_token_twice(answer, content)
            on_finished(1)
            return rollout

        return list(await asyncio.gather(*map(sample_one, requests)))

    def check_source(self, answer: Any, answer_ids: set[str]) -> None:
        """Check that an answer is from this model and new: a proxy may ignore seeds, and repeat it.

        `answer_ids` are those of earlier answers; the id of this one is added.
        """
        model = lookup(answer, "model")
        if not isinstance(model, str) or model not in self.names:
            raise unusable(
                f"it comes from the model {str(model)[:_SHOWN]!r} instead of {self.model!r}"
            )
        answer_id = lookup(answer, "id")
        if not isinstance(answer_id, str):
            return
        if answer_id in answer_ids:
            raise unusable(f"it repeats the answer {answer_id[:_SHOWN]!r}")
        answer_ids.add(answer_id)


def _check_no_token_twice(answer: dict[str, Any], content: bytes) -> None:
    """Parsing loses a key that occurs twice in an object, so the names are counted in the bytes."""
    logprobs = answer["choices"][0]["logprobs"]
    names = len(logprobs["tokens"]) + sum(map(len, logprobs["top_logprobs"]))
    # Within a text the quote is escaped
    if content.count(b'"token_id:') - content.count(b'\\"token_id:') > names:
        raise unusable("it gives one token two log-probs")


def payload(
    request: Request,
    model: str,
    sampling: SamplingSettings,
    top_logprobs: int,
    max_tokens: int,
    salt: str,
) -> dict[str, Any]:
    """Every setting by name: a server fills in missing ones from the model's generation_config.

    `salt` separates the prefix cache from what other clients, and earlier shards, left there.
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
        # What is not sent, the model's generation_config fills in: μ would be another distribution.
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": top_logprobs,
        # Without it there is only text, whose tokens may not be those that were sampled.
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "cache_salt": salt,
    }


def to_rollout(
    request: Request, answer: Any, top_logprobs: int, max_tokens: int, vocabulary: int
) -> Rollout:
    """Check an answer and convert it; whether log μ is possible is checked later, as for every
    engine.

    The API has no ranks: the sampled token's is known if it is among the top K, otherwise it is -1,
    not measured.
    """
    choice = only_choice(answer)
    ids = _read_ids(choice, request.prompt_ids, max_tokens, vocabulary)
    logp_T, entries_T = _read_logprobs(choice.get("logprobs"), ids)
    ranked_T = [
        _rank_token(*position, top_logprobs, vocabulary)
        for position in zip(ids, logp_T, entries_T, strict=True)
    ]
    topk_ids_TK = topk_logp_TK = None
    if top_logprobs:
        topk_ids_TK = np.array([ranked.topk_ids for ranked in ranked_T], dtype=np.int32)
        topk_logp_TK = np.array([ranked.topk_logp for ranked in ranked_T], dtype=np.float32)
    return Rollout(
        prompt_ids=request.prompt_ids,
        response_ids=ids,
        logp_rollout_T=np.array(list(map(finite, logp_T)), dtype=np.float32),
        rank_rollout_T=np.array([ranked.rank for ranked in ranked_T], dtype=np.int32),
        topk_ids_TK=topk_ids_TK,
        topk_logp_rollout_TK=topk_logp_TK,
        finish_reason=choice["finish_reason"],
    )


def _read_ids(
    choice: dict[str, Any], prompt_ids: list[int], max_tokens: int, vocabulary: int
) -> list[int]:
    """The tokens of a response that continues this prompt, and has ended as it may end."""
    ids: Any = choice.get("token_ids")
    if ids is None or choice.get("prompt_token_ids") is None:
        raise MismatchError(WITHOUT_IDS)
    if choice["prompt_token_ids"] != prompt_ids:
        raise unusable("it does not start from the prompt that was sent")
    if not are_token_ids(ids, vocabulary):
        raise unusable(f"it has token ids outside the model's {vocabulary}")
    _check_end(choice.get("finish_reason"), len(ids), max_tokens)
    return list(ids)


def _read_logprobs(logprobs: Any, ids: list[int]) -> tuple[list[Any], list[Any]]:
    """The log-prob of each of these tokens, and its top log-probs; the values are not checked."""
    if not isinstance(logprobs, dict):
        raise unusable("it has no log-probs")
    names_T = lookup(logprobs, "tokens")
    logp_T = lookup(logprobs, "token_logprobs")
    entries_T = lookup(logprobs, "top_logprobs")
    for column_T in (names_T, logp_T, entries_T):
        if not isinstance(column_T, list) or len(column_T) != len(ids):
            raise unusable(f"it does not have {len(ids)} log-probs for {len(ids)} tokens")
    for name, token in zip(names_T, ids, strict=True):
        if _parse_id(name) != token:
            raise unusable("its log-probs do not belong to the tokens that it returns")
    return logp_T, entries_T


def only_choice(answer: Any) -> dict[str, Any]:
    """The one completion that was requested."""
    choices = lookup(answer, "choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise unusable("it is not one completion")
    if choices[0].get("index", 0) != 0:
        raise unusable("it is not the completion that was requested")
    return choices[0]


def _check_end(reason: Any, length: int, max_tokens: int) -> None:
    if reason not in ("stop", "length"):
        raise MismatchError(
            f"The server ended a response with {str(reason)[:40]!r}: it was stopped or paused, "
            "or it failed. Continue with --resume when it runs again."
        )
    if not 0 < length <= max_tokens:
        raise unusable(f"it has {length} tokens instead of 1 to {max_tokens}")
    if reason == "length" and length < max_tokens:
        raise MismatchError(
            f"The server cut a response at {length} of {max_tokens} tokens: it has its own limit "
            "(max_new_tokens in a generation config). Start it with --generation-config vllm, or "
            f"use --max-tokens {length}."
        )


class _RankedToken(NamedTuple):
    """A sampled token's rank (-1: outside the top K), and ranks 1…K, most probable first."""

    rank: int
    topk_ids: list[int]
    topk_logp: list[float]


def _rank_token(
    sampled: int, sampled_logp: Any, entries: Any, top_logprobs: int, vocabulary: int
) -> _RankedToken:
    """Rank a sampled token among its top log-probs.

    The server lists the sampled token first, then ranks 1…K without it: K entries if it is among
    them, otherwise K + 1.
    """
    logp, total = _read_entries(entries)
    if logp.get(sampled) != finite(sampled_logp) or max(logp) >= vocabulary:
        raise unusable("its top log-probs do not belong to its tokens")
    topk_ids = sorted(logp, key=logp.__getitem__, reverse=True)
    if len(logp) == top_logprobs + 1:
        topk_ids.remove(sampled)
    elif len(logp) != top_logprobs:
        raise unusable(f"it has {len(logp)} log-probs for a token instead of {top_logprobs}")
    # No token outside the top K is more probable than rank K; with K = 0 this says nothing.
    lowest = logp[topk_ids[-1]] if topk_ids else inf
    if sampled not in topk_ids and logp[sampled] > lowest:
        raise unusable("a token outside its top log-probs is more probable than one of them")
    if total + (vocabulary - len(logp)) * exp(lowest) < _TOO_LITTLE:
        raise unusable("its probabilities of all tokens cannot add up to 1")
    rank = -1
    # Outside the top K, only a tie with rank K shows the rank.
    if logp[sampled] >= lowest:
        rank = 1 + sum(value > logp[sampled] for value in logp.values())
    return _RankedToken(rank, topk_ids, list(map(logp.__getitem__, topk_ids)))


def _read_entries(entries: Any) -> tuple[dict[int, float], float]:
    """The log-probs of distinct tokens by their ids, and the sum of their probabilities."""
    if not isinstance(entries, dict):
        raise unusable("it has no top log-probs")
    logp = {_parse_id(name): finite(value) for name, value in entries.items()}
    if len(logp) < len(entries):
        raise unusable("it gives one token two log-probs")
    # Logits in place of log-probs may be large enough for exp to overflow.
    total = sum(exp(min(value, 1.0)) for value in logp.values())
    # A NaN makes the total NaN, of which no comparison is true.
    if not total <= _MOST_PROBABILITY or max(logp.values(), default=0.0) > _LARGEST:
        raise MismatchError(
            f"The server's log-probs are invalid: the probabilities of {len(logp)} tokens add up "
            "to more than 1. Start it with --logprobs-mode processed_logprobs."
        )
    return logp, total


def _parse_id(name: Any) -> int:
    """The id in the server's name of a token, `token_id:42`."""
    digits = name.removeprefix(_ID_PREFIX) if isinstance(name, str) else ""
    decimal = digits.isascii() and digits.isdecimal() and len(digits) < _DIGITS
    # One token has one name: an id with leading zeros is another server's.
    if not decimal or name != f"{_ID_PREFIX}{int(digits)}":
        raise MismatchError(WITHOUT_IDS)
    return int(digits)


def finite(logp: Any) -> float:
    """A log-prob as the server means it; NaN, which every later check refuses, for anything but
    a number.
    """
    if isinstance(logp, bool) or not isinstance(logp, int | float):
        return float("nan")
    if logp <= _MINUS_INFINITY:
        return float("-inf")
    return float(logp)


def unusable(reason: str) -> MismatchError:
    return MismatchError(
        f"An answer of the server cannot be used: {reason}. Check that --engine-url names a vLLM "
        "server, not a proxy that rewrites answers."
    )
