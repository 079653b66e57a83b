"""The tokens of an exploration, packed for a page: columns as JavaScript typed arrays, compressed,
as text.

    4 bytes       how long the head is (little-endian)
    head          JSON: responses, texts, algorithms, lists, and where each column is
    columns       each at a multiple of 4 bytes

Log-probabilities have half precision: a card shows three digits. Which tokens are blocked is in
whole numbers, made from what was recorded.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np

from mismatch_cli import numbers
from mismatch_cli.studies.exploration.explored import (
    NOT_JUDGED,
    Exploration,
    Judged,
    TokenList,
)
from mismatch_cli.studies.exploration.passages import WINDOW
from mismatch_cli.text import for_html

_LONGEST = 120  # characters of a token
_LONGEST_PROMPT, _MOST_OF_PROMPTS = 2_000, 400_000  # characters of one, and of all together
_COMPRESSED = 6  # of 9, which takes eight times as long for 2 % less
_LARGEST_EXACT = 2**53  # integer of a JavaScript number
_LARGEST_HALF = float(np.finfo(np.float16).max)
_TYPES = {"uint8": "u1", "uint16": "u2", "uint32": "u4", "float16": "f2", "float32": "f4"}


class _Letters(NamedTuple):
    pi: str  # what π is in a pair
    gap: str
    change: str  # of the probability


_LETTERS = {
    "mismatch": _Letters("the same weights in the trainer", "log π − log μ", "π − μ"),
    "total": _Letters("the trainer as it is now", "log π − log μ", "π − μ"),
    "staleness": _Letters(
        "the trainer as it is now, against the weights that sampled", "log π − log π′", "π − π′"
    ),
}


@dataclass(frozen=True)
class ExplorerView:
    """An exploration as a page has it: a sentence about it, and its packed tokens."""

    text: str
    data: str  # base64


def explorer_view(explored: Exploration) -> ExplorerView:
    """The view of an exploration."""
    return ExplorerView(_sentence(explored), packed(explored))


def _sentence(explored: Exploration) -> str:
    behind = explored.judged and not explored.judged_alike
    ahead = " A and B judge the trainer as it is now, some optimiser steps ahead." if behind else ""
    return (
        f"{_which(explored)} π is {_LETTERS[explored.pair.name].pi}.{ahead} "
        "Point at a token, or step through them with ← and →. Click a dot to find its token; "
        "drag a frame around dots to show only those."
    )


def _which(explored: Exploration) -> str:
    """How many tokens are on the page, and what is not."""
    tokens, responses = len(explored.text_T), len(explored.response_S)
    traces = f" of {len(explored.traces)} traces" if len(explored.traces) > 1 else ""
    if tokens == explored.total_tokens and responses == explored.total_responses:
        return (
            f"{numbers.things(tokens, 'token')} of {numbers.things(responses, 'response')}{traces}."
        )
    whole = int(np.count_nonzero(explored.whole_P))
    windows = len(explored.prompts) - whole
    parts = {
        f"{numbers.things(whole, 'response')} whole": whole,
        f"windows of {WINDOW} tokens around notable ones in {numbers.count(windows)}": windows,
        f"no token of {numbers.count(responses - whole - windows)}": responses - whole - windows,
    }
    unlisted = explored.total_responses - responses
    more = f" {numbers.things(unlisted, 'response')} more are not listed." if unlisted else ""
    return (
        f"{numbers.count(tokens)} of {numbers.count(explored.total_tokens)} tokens{traces}: "
        f"{', '.join(words for words, count in parts.items() if count)}.{more}"
    )


class _Texts:
    """Distinct texts, numbered in order of appearance."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}

    def numbers(self, texts: Iterable[str]) -> np.ndarray:
        """The number of each text; new ones get the next."""
        numbers = [self.number.setdefault(text, len(self.number)) for text in texts]
        return np.array(numbers, dtype=np.uint32)

    def shown(self, longest: int) -> list[str]:
        return [_shown(text, longest) for text in self.number]


def packed(explored: Exploration) -> str:
    """All data for the script, as base64 of gzip."""
    texts, prompts = _Texts(), _Texts()
    columns = {**_of_responses(explored), **_of_tokens(explored, texts)}
    words = prompts.numbers(explored.prompts.values()).tolist()
    longest = min(_LONGEST_PROMPT, _MOST_OF_PROMPTS // max(1, len(prompts.number)))
    of_response = dict(zip(explored.prompts, words, strict=True))
    response_S = explored.response_S
    head = {
        "traces": [_shown(name, _LONGEST) for name in explored.traces],
        "gap": _LETTERS[explored.pair.name].gap,
        "ranks": 0 if explored.ranks is None else explored.ranks.logq_UK.shape[1],
        "colour": "d" if explored.pair.name != "total" else "blocked",
        "compared": _compared(explored),
        "notJudged": NOT_JUDGED,
        "totals": {"tokens": explored.total_tokens, "responses": explored.total_responses},
        "responses": {
            "trace": response_S.trace_index.tolist(),
            "step": _exact(response_S.step),
            "prompt": _exact(response_S.prompt_id),
            "sample": _exact(response_S.sample_index),
            "reward": [_finite(reward) for reward in response_S.reward.tolist()],
            "length": response_S.length.tolist(),
            "words": [of_response.get(place, -1) for place in range(len(response_S))],
        },
        "prompts": prompts.shown(longest),
        "texts": texts.shown(_LONGEST),
        "algorithms": [_algorithm(judged) for judged in explored.judged],
        "lists": [_list(tokens, explored) for tokens in explored.lists],
        "paired": False,
    }
    return base64.b64encode(gzip.compress(_laid_out(head, columns), _COMPRESSED, mtime=0)).decode()


def _of_responses(explored: Exploration) -> dict[str, np.ndarray]:
    """The columns of responses and passages."""
    response_S, passage_P = explored.response_S, explored.passage_P
    columns = {
        "response_absolute": response_S.absolute.astype(np.float32),
        "response_signed": response_S.signed.astype(np.float32),
        "response_largest": _half(response_S.largest),
        "passage_response": passage_P.response.astype(np.uint32),
        "passage_start": passage_P.start.astype(np.uint32),
        "passage_tokens": passage_P.tokens.astype(np.uint32),
        "profile_response": explored.profile_response_R.astype(np.uint32),
        "profile": _half(explored.profile_RB),
    }
    if explored.advantage_T is not None and explored.one_advantage:
        columns["response_advantage"] = response_S.advantage
    return columns


def _of_tokens(explored: Exploration, texts: _Texts) -> dict[str, np.ndarray]:
    """The columns of tokens, lists and ranks."""
    text_T = texts.numbers(explored.text_T)
    with np.errstate(invalid="ignore"):  # −∞ − (−∞)
        d_T = explored.logp_T - explored.logq_T
    columns = {"logq": _half(explored.logq_T), "d": _half(d_T)}
    if explored.entropy_T is not None:
        columns["entropy"] = _half(explored.entropy_T)
    if explored.advantage_T is not None and not explored.one_advantage:
        columns["advantage"] = explored.advantage_T
    columns |= {f"level{place}": judged.level_T for place, judged in enumerate(explored.judged)}
    columns |= {
        f"list_{tokens.name}": tokens.token_U.astype(np.uint32) for tokens in explored.lists
    }
    if (ranks := explored.ranks) is not None:
        columns["rank_token"] = ranks.token_U.astype(np.uint32)
        columns["rank_text"] = texts.numbers(text for row in ranks.text_UK for text in row)
        columns["rank_logq"], columns["rank_logp"] = _half(ranks.logq_UK), _half(ranks.logp_UK)
    short = np.uint16 if len(texts.number) < 2**16 else np.uint32
    return {"text": text_T.astype(short)} | columns


def _half(values: np.ndarray) -> np.ndarray:
    """Half precision of ten bits: noise in the last one does not compress; finite values stay
    finite.
    """
    bits = values.astype(np.float32).view(np.uint32) + np.uint32(2**13)
    rounded = (bits & np.uint32(2**32 - 2**14)).view(np.float32)
    within = np.clip(rounded, -_LARGEST_HALF, _LARGEST_HALF)
    return np.where(np.isfinite(values), within, values).astype(np.float16)


def _shown(text: str, longest: int) -> str:
    """Escaped text with its line breaks, cut to a readable length."""
    return for_html(text if len(text) <= longest else f"{text[:longest]}…")


def _finite(value: float) -> float | str | None:
    """A number for JSON; infinities become words that the script turns back into numbers, NaN
    becomes null.
    """
    if isfinite(value):
        return value
    return {inf: "Infinity", -inf: "-Infinity"}.get(value)


def _exact(values: np.ndarray) -> list[int | str]:
    """Integers for JSON: beyond 2⁵³ JavaScript rounds one, so it becomes text, which the script
    only shows.
    """
    return [value if abs(value) <= _LARGEST_EXACT else str(value) for value in values.tolist()]


def _algorithm(judged: Judged) -> dict[str, Any]:
    when = f", if A {judged.sign} 0" if judged.sign else ""
    return {
        "name": f"{judged.algorithm}{when}",
        "thresholds": [_threshold(at) for at in judged.thresholds],
        "published": judged.published,
        "unmoved": judged.unmoved,
        "judged": judged.judged.tolist(),
        "blocked": judged.blocked.tolist(),
    }


def _list(tokens: TokenList, explored: Exploration) -> dict[str, str]:
    """A list's name, its title, and of what it was taken."""
    letters, names = _LETTERS[explored.pair.name], explored.compared
    number = len(tokens.token_U)
    population = numbers.things(tokens.population, "token")
    sizes = {"gap": letters.gap, "probability": letters.change}
    if tokens.name in sizes:
        title = f"largest |{sizes[tokens.name]}|"
        note = f"the {numbers.count(number)} largest of {population}"
    else:
        one = tokens.name == "only"
        who = f"only one of {' and '.join(names)}" if one else " or ".join(names)
        which = f"{population} that {who} blocks"
        every = number == tokens.population
        title = f"blocked by {who}"
        note = f"all {which}" if every else f"{numbers.count(number)} of {which}, drawn at random"
    return {"name": tokens.name, "title": for_html(title), "note": for_html(note)}


def _compared(explored: Exploration) -> list[int]:
    """The indices of the two initial algorithms; without advantages, one algorithm under both
    signs.
    """
    places = [
        place
        for place, judged in enumerate(explored.judged)
        if judged.algorithm in explored.compared
    ]
    return places[:2]


def _threshold(at: Mapping[str, float]) -> str:
    """`δ = 0.15`, or `ε = 0.2 / 0.28` for two sides that differ."""
    sides = {
        name.removesuffix(side) for name in at for side in ("_low", "_high") if name.endswith(side)
    }
    if len(at) == 2 and len(sides) == 1:
        return (
            f"{sides.pop()} = {' / '.join(dict.fromkeys(f'{value:.9g}' for value in at.values()))}"
        )
    return ", ".join(f"{name} = {value:.9g}" for name, value in at.items())


def _laid_out(head: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> bytes:
    """Head and columns; the head has the type, offset and size of each column.

    Equal columns are written once, such as the levels of algorithms with the same mask.
    """
    starts: dict[bytes, int] = {}
    places: dict[str, Sequence[Any]] = {}
    end = 0
    for name, column in columns.items():
        content = _padded(np.ascontiguousarray(column, column.dtype.newbyteorder("<")).tobytes())
        start = starts.setdefault(content, end)
        places[name] = [_TYPES[column.dtype.name], start, column.size]
        end = max(end, start + len(content))
    text = _padded(
        json.dumps({**head, "columns": places}, ensure_ascii=True, allow_nan=False).encode(), b" "
    )
    return b"".join((len(text).to_bytes(4, "little"), text, *starts))


def _padded(content: bytes, by: bytes = b"\0") -> bytes:
    return content + by * (-len(content) % 4)
