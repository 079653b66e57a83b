"""The tokens of an exploration, packed for a page: columns as JavaScript typed arrays, compressed,
as text.

    4 bytes       how long the head is (little-endian)
    head          JSON: responses, texts, algorithms, lists, and where each column is
    columns       each at a multiple of 4 bytes; of 16 bits, all low bytes before all high ones

Log-probabilities have half precision, their gap 9 binary digits: a card shows three decimal ones.
Which tokens are blocked is in whole numbers, made from what was recorded.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, isfinite
from typing import Any

import numpy as np

from mismatch_cli.base import numbers
from mismatch_cli.base.text import for_html
from mismatch_cli.studies.exploration.explored import (
    NOT_JUDGED,
    BlockedLevels,
    Exploration,
    TokenList,
)
from mismatch_cli.studies.exploration.passages import WINDOW
from mismatch_cli.studies.exploration.slider_levels import STAYS

_LONGEST = 120  # characters of a token
_LONGEST_PROMPT, MOST_OF_PROMPTS = 2_000, 400_000  # characters of one, and of all together
_MOST_SETTINGS = 3  # named
_SUM_DIGITS, _GAP_DIGITS, _ENTROPY_DIGITS = 12, 9, 5  # binary, of which a card shows three decimal
_COMPRESSED = 6  # of 9, which takes eight times as long for 2 % less
_SAFE = bytes.maketrans(b"&<>", b".,/")  # base 85, which is 6 % shorter than 64
_LARGEST_EXACT = 2**53  # integer of a JavaScript number
_LARGEST_HALF = float(np.finfo(np.float16).max)
_TYPES = {"uint8": "u1", "uint16": "u2", "uint32": "u4", "float16": "f2", "float32": "f4"}


# What π is in each pair, and μ unless it is the engine
_POLICIES = {
    "mismatch": "the same weights in the trainer",
    "total": "the trainer as it is now",
    "staleness": "the trainer as it is now, and μ the trainer at the weights that sampled",
    "floor": "the trainer again, and μ the trainer",
}
_GAP = "log π − log μ"


@dataclass(frozen=True)
class ExplorerView:
    """An exploration as a page has it: a sentence about it, and its packed tokens."""

    text: str
    data: str


def explorer_view(explored: Exploration) -> ExplorerView:
    """The view of an exploration."""
    return ExplorerView(_sentence(explored), packed(explored))


def _sentence(explored: Exploration) -> str:
    behind = explored.judged and not explored.judged_alike
    ahead = " A and B judge the trainer as it is now, some optimiser steps ahead." if behind else ""
    return (
        f"{_which(explored)}{_settings(explored)} π is {_POLICIES[explored.pair.name]}.{ahead}"
        f"{_still(explored)} "
        "Point at a token, or step through them with ← and →. Click a dot to find its token; "
        "drag a frame around dots to show only those."
    )


def _still(explored: Exploration) -> str:
    """How many algorithms would need too many levels for thresholds that move."""
    still = {judged.algorithm for judged in explored.judged if judged.unmoved == STAYS}
    if not still:
        return ""
    return (
        f" {numbers.things(len(still), 'algorithm')} without a slider, as the trace is long: "
        "--compare names the two that have one."
    )


def _settings(explored: Exploration) -> str:
    """The two runs, and the likeliest of the settings in which they differ."""
    if not explored.runs:
        return ""
    first, other = explored.runs
    changes = [
        f"{row.setting} {numbers.setting_text(row.first)} → {numbers.setting_text(row.other)}"
        for row in explored.settings
    ]
    words = ", ".join(changes[:_MOST_SETTINGS]) or "no recorded setting differs"
    others = len(changes) - _MOST_SETTINGS
    more = f", and {others} more" if others > 0 else ""
    return f" {first} → {other}: {words}{more}."


def _which(explored: Exploration) -> str:
    """How many tokens are on the page, and what is not."""
    tokens, responses = len(explored.tokens.text_T), len(explored.response_S)
    traces = f" in {len(explored.traces)} traces" if len(explored.traces) > 1 else ""
    if explored.runs:
        traces = " that both traces have" if explored.paired else " to prompts in both traces"
    unlisted = explored.total_responses - responses
    if tokens == explored.total_tokens and not unlisted:
        return (
            f"All {numbers.things(tokens, 'token')} of "
            f"{numbers.things(responses, 'response')}{traces}."
        )
    whole = int(np.count_nonzero(explored.whole_P))
    windows = len(explored.prompts) - whole
    parts = {
        "whole": whole,
        f"in windows of {WINDOW} tokens around those in the lists": windows,
        "without a token here": responses - whole - windows,
    }
    first, *others = [(count, words) for words, count in parts.items() if count]
    named = [
        f"{numbers.things(first[0], 'response')} {first[1]}",
        *(f"{numbers.count(count)} {words}" for count, words in others),
    ]
    more = f" {numbers.things(unlisted, 'more response')} not listed." if unlisted else ""
    return (
        f"{numbers.count(tokens)} of {numbers.things(explored.total_tokens, 'token')}{traces}: "
        f"{', '.join(named)}.{more}"
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
    """All data for the script: gzip as text, in letters that HTML needs no escape for."""
    texts = _Texts()
    columns = _of_responses(explored) | _of_tokens(explored, texts) | _of_lists(explored, texts)
    content = _laid_out(_head(explored, texts), columns)
    letters = base64.b85encode(gzip.compress(content, _COMPRESSED, mtime=0))
    return letters.translate(_SAFE).decode()


def _head(explored: Exploration, texts: _Texts) -> dict[str, Any]:
    prompts, ranks = _Texts(), explored.tokens.ranks
    words = prompts.numbers(explored.prompts.values()).tolist()
    longest = min(_LONGEST_PROMPT, MOST_OF_PROMPTS // max(1, len(prompts.number)))
    return {
        "traces": [_shown(name, _LONGEST) for name in explored.traces],
        "gap": _GAP,
        "ranks": 0 if ranks is None else ranks.logq_UK.shape[1],
        "colour": _colour(explored),
        "compared": _compared(explored),
        "notJudged": NOT_JUDGED,
        "responses": _responses(explored, dict(zip(explored.prompts, words, strict=True))),
        "prompts": prompts.shown(longest),
        "texts": texts.shown(_LONGEST),
        "algorithms": [_algorithm(judged) for judged in explored.judged],
        "fixed": [place for place, judged in enumerate(explored.judged) if not judged.moves],
        "lists": [_list(tokens, explored) for tokens in explored.lists],
        **({"runs": [_shown(name, _LONGEST) for name in explored.runs]} if explored.runs else {}),
        "paired": explored.paired,
    }


def _colour(explored: Exploration) -> str:
    if explored.paired:
        return "change"
    return "d" if explored.pair.name != "total" else "blocked"


def _responses(explored: Exploration, words: Mapping[int, int]) -> dict[str, list[Any]]:
    """What identifies each response, with the number of its prompt's text."""
    response_S = explored.response_S
    return {
        "trace": response_S.trace_index.tolist(),
        "step": _exact(response_S.step),
        "prompt": _exact(response_S.prompt_id),
        "sample": _exact(response_S.sample_index),
        "reward": [_finite(reward) for reward in response_S.reward.tolist()],
        "length": response_S.length.tolist(),
        "words": [words.get(place, -1) for place in range(len(response_S))],
    }


def _of_responses(explored: Exploration) -> dict[str, np.ndarray]:
    """The columns of responses and passages."""
    response_S, passage_P = explored.response_S, explored.passage_P
    has_advantage = explored.tokens.advantage_T is not None and explored.one_advantage
    return {
        "response_absolute": _sums(response_S.absolute),
        "response_signed": _sums(response_S.signed),
        "response_largest": _half(response_S.largest),
        **_if_any("response_advantage", response_S.advantage if has_advantage else None),
        "passage_response": passage_P.response.astype(np.uint32),
        "passage_start": passage_P.start.astype(np.uint32),
        "passage_tokens": passage_P.tokens.astype(np.uint32),
        "profile_response": explored.profile_response_R.astype(np.uint32),
        "profile": _half(explored.profile_RB),
    }


def _of_tokens(explored: Exploration, texts: _Texts) -> dict[str, np.ndarray]:
    """The columns of tokens."""
    tokens = explored.tokens
    entropy_T = (
        None if tokens.entropy_T is None else _half(_rounded(tokens.entropy_T, _ENTROPY_DIGITS))
    )
    advantage_T = None if explored.one_advantage else tokens.advantage_T
    return {
        "text": _smallest(texts.numbers(tokens.text_T)),
        **_gap("", tokens.logq_T, tokens.logp_T),
        **_gap("_b", tokens.logq_b_T, tokens.logp_b_T),
        **_if_any("entropy", entropy_T),
        **_if_any("advantage", advantage_T),
        **_levels(explored.judged),
    }


def _levels(algorithms: Sequence[BlockedLevels]) -> dict[str, np.ndarray]:
    """The levels of algorithms whose thresholds move; those of the others, which have few
    combinations, as rows of a table.
    """
    moved = {
        f"level{place}": judged.level_T for place, judged in enumerate(algorithms) if judged.moves
    }
    fixed = [judged.level_T for judged in algorithms if not judged.moves]
    if not fixed:
        return moved
    row_T, first = np.zeros(len(fixed[0]), dtype=np.int64), np.zeros(0, dtype=np.int64)
    for level_T in fixed:
        _, first, row_T = np.unique(256 * row_T + level_T, return_index=True, return_inverse=True)
    table = np.stack([level_T[first] for level_T in fixed], axis=1)
    return moved | {"fixed_rows": table, "fixed": _smallest(row_T.astype(np.uint32))}


def _gap(side: str, logq_T: np.ndarray | None, logp_T: np.ndarray | None) -> dict[str, np.ndarray]:
    if logq_T is None or logp_T is None:
        return {}
    with np.errstate(invalid="ignore"):  # −∞ − (−∞)
        d_T = logp_T - logq_T
    return {f"logq{side}": _half(logq_T), f"d{side}": _half(_rounded(d_T, _GAP_DIGITS))}


def _of_lists(explored: Exploration, texts: _Texts) -> dict[str, np.ndarray]:
    """The columns of lists, and of the ranks at their tokens."""
    lists = {f"list_{each.name}": each.token_U.astype(np.uint32) for each in explored.lists}
    ranks = explored.tokens.ranks
    if ranks is None:
        return lists
    return lists | {
        "rank_token": ranks.token_U.astype(np.uint32),
        "rank_text": texts.numbers(chain.from_iterable(ranks.text_UK)),
        "rank_logq": _half(ranks.logq_UK),
        "rank_logp": _half(ranks.logp_UK),
    }


def _if_any(name: str, column: np.ndarray | None) -> dict[str, np.ndarray]:
    return {} if column is None else {name: column}


def _smallest(numbers: np.ndarray) -> np.ndarray:
    """Numbers in 16 bits if they fit."""
    return numbers.astype(np.uint16) if numbers.max(initial=0) < 2**16 else numbers


def _half(values: np.ndarray) -> np.ndarray:
    """Half precision; finite values stay finite."""
    within = np.clip(values, -_LARGEST_HALF, _LARGEST_HALF)
    return np.where(np.isfinite(values), within, values).astype(np.float16)


def _sums(values: np.ndarray) -> np.ndarray:
    """Single precision, beyond the range of half."""
    return _rounded(values, _SUM_DIGITS)


def _rounded(values: np.ndarray, digits: int) -> np.ndarray:
    """Rounded to so many binary digits: noise does not compress."""
    dropped = 2 ** (24 - digits)
    bits = values.astype(np.float32).view(np.uint32) + np.uint32(dropped // 2)
    return (bits & np.uint32(2**32 - dropped)).view(np.float32)


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


def _algorithm(judged: BlockedLevels) -> dict[str, Any]:
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
    number = numbers.count(len(tokens.token_U))
    population = numbers.things(tokens.population, "token")
    title = _titles(explored).get(tokens.name)
    note = f"the {number} largest of {population}"
    if title is None:
        who = " or ".join(explored.compared)
        if tokens.name == "only":
            who = f"only one of {' and '.join(explored.compared)}"
        title, which = f"blocked by {who}", f"{population} that {who} blocks"
        every = len(tokens.token_U) == tokens.population
        note = f"all {which}" if every else f"{number} of {which}, drawn at random"
    return {"name": tokens.name, "title": for_html(title), "note": for_html(note)}


def _titles(explored: Exploration) -> dict[str, str]:
    """Of the lists of what is largest."""
    gap = f"largest |{_GAP}|"
    titles = {"gap": gap, "probability": "largest |π − μ|", "change": f"largest change of {_GAP}"}
    if explored.paired:
        run_a, run_b = explored.runs
        titles |= {"gap": f"{gap} in {run_a}", "gap_b": f"{gap} in {run_b}"}
    return titles


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
        content = _padded(_bytes_of(column))
        start = starts.setdefault(content, end)
        places[name] = [_TYPES[column.dtype.name], start, column.size]
        end = max(end, start + len(content))
    text = _padded(
        json.dumps({**head, "columns": places}, ensure_ascii=True, allow_nan=False).encode(), b" "
    )
    return b"".join((len(text).to_bytes(4, "little"), text, *starts))


def _bytes_of(column: np.ndarray) -> bytes:
    """Little-endian; of 16 bits, all low bytes before all high ones, which compresses better."""
    flat = np.ascontiguousarray(column.reshape(-1), column.dtype.newbyteorder("<"))
    return flat.view(np.uint8).reshape(-1, 2).T.tobytes() if flat.itemsize == 2 else flat.tobytes()


def _padded(content: bytes, by: bytes = b"\0") -> bytes:
    return content + by * (-len(content) % 4)
