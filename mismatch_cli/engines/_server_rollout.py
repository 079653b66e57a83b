"""The completions API: requests for responses with everything that was sampled, and their answers made `Rollout`s."""

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
_TOO_LITTLE = 1 - 1e-2  # of all tokens together
_LARGEST = 1e-6  # a log-prob, which float32 may round to above 0
_ID_PREFIX = "token_id:"
_DIGITS = 20
_SHOWN = 60  # characters of what a server calls something
WITHOUT_IDS = (
    "The server does not return token ids, and ids made from its text would not be those that were sampled. "
    "Use vLLM 0.10.2 or newer, whose /v1/completions knows return_token_ids and return_tokens_as_token_ids."
)


@dataclass(frozen=True)
class Completions:
    """One model of a server, as something to sample from."""

    server: Server
    model: str
    names: frozenset[str]  # of the same model, the one that was asked for among them
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
        given: set[str] = set()

        async def rollout_of(request: Request) -> Rollout:
            own = request.sampling or sampling
            room = min(request.longest(sampling), self.context - len(request.prompt_ids))
            asked = payload(request, self.model, own, top_logprobs, room, salt)
            # An honest answer stays far below: a server that talks without end is noticed soon.
            most = 2**20 + 16 * len(request.prompt_ids) + 100 * room * (top_logprobs + 10)
            answer, sent = await self.server.post("/v1/completions", asked, most)
            self.check_whose(answer, given)
            rollout = to_rollout(request, answer, top_logprobs, room, self.vocabulary)
            _check_no_token_twice(answer, sent)
            on_finished(1)
            return rollout

        return list(await asyncio.gather(*map(rollout_of, requests)))

    def check_whose(self, answer: Any, given: set[str]) -> None:
        """Of the model that was asked, and not the answer to another request: a proxy may know nothing of seeds."""
        told = answer if isinstance(answer, dict) else {}
        model = told.get("model")
        if not isinstance(model, str) or model not in self.names:
            raise unusable(f"it is of the model {str(model)[:_SHOWN]!r} where {self.model!r} was asked")
        if isinstance(name := told.get("id"), str):
            if name in given:
                raise unusable(f"it has been given before, as {name[:_SHOWN]!r}")
            given.add(name)


def _check_no_token_twice(answer: dict[str, Any], sent: bytes) -> None:
    """A key that stands twice in an object is lost in reading it, so the names are counted as they were sent."""
    logprobs = answer["choices"][0]["logprobs"]
    names = len(logprobs["tokens"]) + sum(len(entries) for entries in logprobs["top_logprobs"])
    if sent.count(b'"token_id:') - sent.count(b'\\"token_id:') > names:  # within a text the quote is escaped
        raise unusable("it gives two log-probs to one token")


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
    choice = only_choice(answer)
    ids = choice.get("token_ids")
    if ids is None or choice.get("prompt_token_ids") is None:
        raise MismatchError(WITHOUT_IDS)
    if choice["prompt_token_ids"] != request.prompt_ids:
        raise unusable("it sampled from another prompt than it was given")
    if not are_token_ids(ids, vocabulary):
        raise unusable(f"it holds token ids that are none of the model's {vocabulary}")
    _check_end(choice.get("finish_reason"), len(ids), max_tokens)
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        raise unusable("it holds no log-probs")
    columns: list[Any] = [logprobs.get(name) for name in ("tokens", "token_logprobs", "top_logprobs")]
    if not all(isinstance(column, list) and len(column) == len(ids) for column in columns):
        raise unusable(f"it does not hold {len(ids)} log-probs for {len(ids)} tokens")
    tokens, logp_T, top = columns
    if any(_id_of(token) != i for token, i in zip(tokens, ids, strict=True)):
        raise unusable("its log-probs are of other tokens than it returns")
    rows = [_ranked(*position, top_logprobs, vocabulary) for position in zip(ids, logp_T, top, strict=True)]
    return Rollout(
        prompt_ids=request.prompt_ids,
        response_ids=ids,
        logp_rollout_T=np.array([finite(logp) for logp in logp_T], dtype=np.float32),
        rank_rollout_T=np.array([rank for rank, _, _ in rows], dtype=np.int32),
        topk_ids_TK=np.array([ids for _, ids, _ in rows], dtype=np.int32) if top_logprobs else None,
        topk_logp_rollout_TK=np.array([logp for _, _, logp in rows], dtype=np.float32) if top_logprobs else None,
        finish_reason=choice["finish_reason"],
    )


def only_choice(answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise unusable("it is not one completion")
    if choices[0].get("index", 0) != 0:
        raise unusable("it is another completion than the one that was asked for")
    return choices[0]


def _check_end(reason: Any, length: int, max_tokens: int) -> None:
    if reason not in ("stop", "length"):
        raise MismatchError(
            f"The server ended a response with {str(reason)[:40]!r}: it was stopped, paused or failed in the middle. "
            "Go on with --resume when it runs again."
        )
    if not 0 < length <= max_tokens:
        raise unusable(f"it holds {length} tokens where 1 to {max_tokens} were asked for")
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
        raise unusable("it holds no top log-probs")
    logp = {_id_of(token): finite(value) for token, value in entries.items()}
    if len(logp) < len(entries):
        raise unusable("it gives two log-probs to one token")
    total = sum(exp(min(value, 1.0)) for value in logp.values())
    if not total <= _MOST_PROBABILITY or max(logp.values(), default=0.0) > _LARGEST:
        raise MismatchError(
            f"The server's log-probs are none: the probabilities of {len(logp)} tokens add up to more than 1. "
            "Start it with --logprobs-mode processed_logprobs."
        )
    if sampled not in logp or logp[sampled] != finite(sampled_logp) or not all(0 <= i < vocabulary for i in logp):
        raise unusable("its top log-probs do not belong to its tokens")
    if len(logp) == top_logprobs + 1:  # the sampled token came on top of K
        ranked = sorted((i for i in logp if i != sampled), key=lambda i: -logp[i])
        if ranked and logp[sampled] > logp[ranked[-1]]:
            raise unusable("a token that is none of its most probable ones is more probable than they are")
        known = bool(ranked) and logp[sampled] == logp[ranked[-1]]  # a tie with rank K
    elif len(logp) == top_logprobs:
        ranked, known = sorted(logp, key=lambda i: -logp[i]), True
    else:
        raise unusable(f"it holds {len(logp)} log-probs for a token where {top_logprobs} were asked for")
    if ranked and total + (vocabulary - len(logp)) * exp(logp[ranked[-1]]) < _TOO_LITTLE:
        raise unusable("its probabilities of all tokens cannot add up to 1")
    rank = 1 + sum(value > logp[sampled] for value in logp.values()) if known else -1
    return rank, ranked, [logp[i] for i in ranked]


def _id_of(token: Any) -> int:
    number = token[len(_ID_PREFIX) :] if isinstance(token, str) and token.startswith(_ID_PREFIX) else ""
    if not (number.isascii() and number.isdecimal() and len(number) < _DIGITS) or number != str(int(number)):
        raise MismatchError(WITHOUT_IDS)
    return int(number)


def finite(logp: Any) -> float:
    """A log-prob as the server means it; NaN, which no later check lets pass, for what is no number."""
    if isinstance(logp, bool) or not isinstance(logp, int | float):
        return float("nan")
    return float("-inf") if logp <= _MINUS_INFINITY else float(logp)


def unusable(what: str) -> MismatchError:
    return MismatchError(
        f"An answer of the server cannot be used: {what}. Check that --engine-url names a vLLM server and not a "
        "proxy that rewrites answers."
    )
