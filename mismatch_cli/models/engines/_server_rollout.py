"""The completions API: requests for responses with all their log-probs, and answers turned into
`Rollout`s.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.engines import Request
from mismatch_cli.models.engines._server_http import Server
from mismatch_cli.rules.batch import Rollout
from mismatch_cli.trace.foreign_values import are_token_ids

_MINUS_INFINITY = -9999.0  # JSON has no -inf: vLLM clips there
_MOST_PROBABILITY = 1 + 1e-3  # total of distinct tokens, with room for float32
_TOO_LITTLE = 1 - 1e-2  # total of all tokens
_LARGEST = 1e-6  # largest log-prob: float32 may round it to above 0
_ID_PREFIX = "token_id:"
_DIGITS = 20
_SHOWN = 60  # characters of a server's name for something
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
        on_finished: Callable[[int], None] = lambda _: None,
    ) -> list[Rollout]:
        """One response per request, in their order; the first failure cancels the rest."""
        salt = secrets.token_hex(16)
        given: set[str] = set()

        async def rollout_of(request: Request) -> Rollout:
            settings = request.sampling or sampling
            room = min(request.longest(sampling), self.context - len(request.prompt_ids))
            asked = payload(request, self.model, settings, top_logprobs, room, salt)
            # An honest answer stays far below: a server that never stops is noticed soon.
            most = 2**20 + 16 * len(request.prompt_ids) + 100 * room * (top_logprobs + 10)
            answer, sent = await self.server.post("/v1/completions", asked, most)
            self.check_whose(answer, given)
            rollout = to_rollout(request, answer, top_logprobs, room, self.vocabulary)
            _check_no_token_twice(answer, sent)
            on_finished(1)
            return rollout

        return list(await asyncio.gather(*map(rollout_of, requests)))

    def check_whose(self, answer: Any, given: set[str]) -> None:
        """Check that an answer is from this model and not repeated: a proxy may ignore seeds."""
        told = answer if isinstance(answer, dict) else {}
        model = told.get("model")
        if not isinstance(model, str) or model not in self.names:
            raise unusable(
                f"it comes from the model {str(model)[:_SHOWN]!r} instead of {self.model!r}"
            )
        if isinstance(name := told.get("id"), str):
            if name in given:
                raise unusable(f"it repeats the answer {name[:_SHOWN]!r}")
            given.add(name)


def _check_no_token_twice(answer: dict[str, Any], sent: bytes) -> None:
    """Parsing loses a key that occurs twice in an object, so the names are counted in the bytes."""
    logprobs = answer["choices"][0]["logprobs"]
    names = len(logprobs["tokens"]) + sum(len(entries) for entries in logprobs["top_logprobs"])
    # Within a text the quote is escaped
    if sent.count(b'"token_id:') - sent.count(b'\\"token_id:') > names:
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
    ids = choice.get("token_ids")
    if ids is None or choice.get("prompt_token_ids") is None:
        raise MismatchError(WITHOUT_IDS)
    if choice["prompt_token_ids"] != request.prompt_ids:
        raise unusable("it does not start from the prompt that was sent")
    if not are_token_ids(ids, vocabulary):
        raise unusable(f"it has token ids outside the model's {vocabulary}")
    _check_end(choice.get("finish_reason"), len(ids), max_tokens)
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        raise unusable("it has no log-probs")
    columns: list[Any] = [
        logprobs.get(name) for name in ("tokens", "token_logprobs", "top_logprobs")
    ]
    if not all(isinstance(column, list) and len(column) == len(ids) for column in columns):
        raise unusable(f"it does not have {len(ids)} log-probs for {len(ids)} tokens")
    tokens, logp_T, top = columns
    if any(_id_of(token) != i for token, i in zip(tokens, ids, strict=True)):
        raise unusable("its log-probs do not belong to the tokens that it returns")
    rows = [
        _ranked(*position, top_logprobs, vocabulary)
        for position in zip(ids, logp_T, top, strict=True)
    ]
    return Rollout(
        prompt_ids=request.prompt_ids,
        response_ids=ids,
        logp_rollout_T=np.array([finite(logp) for logp in logp_T], dtype=np.float32),
        rank_rollout_T=np.array([rank for rank, _, _ in rows], dtype=np.int32),
        topk_ids_TK=np.array([ids for _, ids, _ in rows], dtype=np.int32) if top_logprobs else None,
        topk_logp_rollout_TK=np.array([logp for _, _, logp in rows], dtype=np.float32)
        if top_logprobs
        else None,
        finish_reason=choice["finish_reason"],
    )


def only_choice(answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
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


def _ranked(
    sampled: int, sampled_logp: Any, entries: Any, top_logprobs: int, vocabulary: int
) -> tuple[int, list[int], list[float]]:
    """The sampled token's rank (-1: outside the top K) and the engine's ranks 1…K, most probable
    first.

    The server lists the sampled token first, then ranks 1…K without it: K entries if it is among
    them, otherwise K + 1.
    """
    if not isinstance(entries, dict):
        raise unusable("it has no top log-probs")
    logp = {_id_of(token): finite(value) for token, value in entries.items()}
    if len(logp) < len(entries):
        raise unusable("it gives one token two log-probs")
    total = sum(exp(min(value, 1.0)) for value in logp.values())
    if not total <= _MOST_PROBABILITY or max(logp.values(), default=0.0) > _LARGEST:
        raise MismatchError(
            f"The server's log-probs are invalid: the probabilities of {len(logp)} tokens add up "
            "to more than 1. Start it with --logprobs-mode processed_logprobs."
        )
    if (
        sampled not in logp
        or logp[sampled] != finite(sampled_logp)
        or not all(0 <= i < vocabulary for i in logp)
    ):
        raise unusable("its top log-probs do not belong to its tokens")
    if len(logp) == top_logprobs + 1:  # the sampled token came on top of K
        ranked = sorted((i for i in logp if i != sampled), key=lambda i: -logp[i])
        if ranked and logp[sampled] > logp[ranked[-1]]:
            raise unusable("a token outside its top log-probs is more probable than one of them")
        known = bool(ranked) and logp[sampled] == logp[ranked[-1]]  # a tie with rank K
    elif len(logp) == top_logprobs:
        ranked, known = sorted(logp, key=lambda i: -logp[i]), True
    else:
        raise unusable(f"it has {len(logp)} log-probs for a token instead of {top_logprobs}")
    if ranked and total + (vocabulary - len(logp)) * exp(logp[ranked[-1]]) < _TOO_LITTLE:
        raise unusable("its probabilities of all tokens cannot add up to 1")
    rank = 1 + sum(value > logp[sampled] for value in logp.values()) if known else -1
    return rank, ranked, [logp[i] for i in ranked]


def _id_of(token: Any) -> int:
    number = (
        token[len(_ID_PREFIX) :] if isinstance(token, str) and token.startswith(_ID_PREFIX) else ""
    )
    if not (number.isascii() and number.isdecimal() and len(number) < _DIGITS) or number != str(
        int(number)
    ):
        raise MismatchError(WITHOUT_IDS)
    return int(number)


def finite(logp: Any) -> float:
    """A log-prob as the server means it; NaN, which every later check refuses, for anything but
    a number.
    """
    if isinstance(logp, bool) or not isinstance(logp, int | float):
        return float("nan")
    return float("-inf") if logp <= _MINUS_INFINITY else float(logp)


def unusable(what: str) -> MismatchError:
    return MismatchError(
        f"An answer of the server cannot be used: {what}. Check that --engine-url names a vLLM "
        "server, not a proxy that rewrites answers."
    )
