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
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    return ExplorerView(_text(explored), packed(explored))


def _text(explored: Exploration) -> str:
    """What the tokens on the page are, and how to explore them."""
    policy = _POLICIES[explored.pair.name]
    sentences = [_number_of_tokens(explored), *_settings(explored), f"π is {policy}."]
    if explored.judged and not explored.judged_alike:
        sentences.append("A and B judge the trainer as it is now, some optimiser steps ahead.")
    sentences += _unmoved(explored)
    sentences.append(
        "Point at a token, or step through them with ← and →. Click a dot to find its token; "
        "drag a frame around dots to show only those."
    )
    return " ".join(sentences)


def _unmoved(explored: Exploration) -> Iterator[str]:
    """How many algorithms would need too many levels for thresholds that move."""
    names = {judged.algorithm for judged in explored.judged if judged.unmoved == STAYS}
    if names:
        yield (
            f"{numbers.things(len(names), 'algorithm')} without a slider, as the trace is long: "
            "--compare names the two that have one."
        )


def _settings(explored: Exploration) -> Iterator[str]:
    """The two runs, and the likeliest of the settings in which they differ."""
    if not explored.runs:
        return
    first, other = explored.runs
    changes = []
    for row in explored.settings[:_MOST_SETTINGS]:
        before, after = numbers.setting_text(row.first), numbers.setting_text(row.other)
        changes.append(f"{row.setting} {before} → {after}")
    others = len(explored.settings) - len(changes)
    if others:
        changes.append(f"and {others} more")
    yield f"{first} → {other}: {', '.join(changes) or 'no recorded setting differs'}."


def _number_of_tokens(explored: Exploration) -> str:
    """How many tokens are on the page, and what is not."""
    tokens, responses = len(explored.tokens.text_T), len(explored.response_S)
    where = _where(explored)
    unlisted = explored.total_responses - responses
    if tokens == explored.total_tokens and not unlisted:
        of_responses = numbers.things(responses, "response")
        return f"All {numbers.things(tokens, 'token')} of {of_responses}{where}."
    whole = int(np.count_nonzero(explored.whole_P))
    windows = len(explored.prompts) - whole
    groups: list[str] = []
    for number, words in (
        (whole, "whole"),
        (windows, f"in windows of {WINDOW} tokens around those in the lists"),
        (responses - whole - windows, "without a token here"),
    ):
        if number:
            # The noun is said once, with the first number.
            of_group = numbers.count(number) if groups else numbers.things(number, "response")
            groups.append(f"{of_group} {words}")
    total = numbers.things(explored.total_tokens, "token")
    text = f"{numbers.count(tokens)} of {total}{where}: {', '.join(groups)}."
    if unlisted:
        text += f" {numbers.things(unlisted, 'more response')} not listed."
    return text


def _where(explored: Exploration) -> str:
    """Which of the traces the tokens are in, where there are several."""
    if explored.paired:
        return " that both traces have"
    if explored.runs:
        return " to prompts in both traces"
    if len(explored.traces) > 1:
        return f" in {len(explored.traces)} traces"
    return ""


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
    prompt_numbers = prompts.numbers(explored.prompts.values())
    longest = min(_LONGEST_PROMPT, MOST_OF_PROMPTS // max(1, len(prompts.number)))
    head: dict[str, Any] = {
        "traces": [_shown(name, _LONGEST) for name in explored.traces],
        "gap": _GAP,
        "ranks": 0 if ranks is None else ranks.logq_UK.shape[1],
        "colour": _colour(explored),
        "compared": _compared(explored),
        "notJudged": NOT_JUDGED,
        "responses": _responses(explored, prompt_numbers),
        "prompts": prompts.shown(longest),
        "texts": texts.shown(_LONGEST),
        "algorithms": list(map(_algorithm, explored.judged)),
        "fixed": [n for n, judged in enumerate(explored.judged) if not judged.moves],
        "lists": [_list(tokens, explored) for tokens in explored.lists],
    }
    if explored.runs:
        head["runs"] = [_shown(name, _LONGEST) for name in explored.runs]
    head["paired"] = explored.paired
    return head


def _colour(explored: Exploration) -> str:
    if explored.paired:
        return "change"
    if explored.pair.name == "total":
        return "blocked"
    return "d"


def _responses(explored: Exploration, prompt_numbers: np.ndarray) -> dict[str, list[Any]]:
    """What identifies each response, with the number of its prompt's text, or −1 without one."""
    response_S = explored.response_S
    number_of = dict(zip(explored.prompts, prompt_numbers.tolist(), strict=True))
    return {
        "trace": response_S.trace_index.tolist(),
        "step": _exact(response_S.step),
        "prompt": _exact(response_S.prompt_id),
        "sample": _exact(response_S.sample_index),
        "reward": list(map(_finite, response_S.reward.tolist())),
        "length": response_S.length.tolist(),
        "words": [number_of.get(n, -1) for n in range(len(response_S))],
    }


def _of_responses(explored: Exploration) -> dict[str, np.ndarray]:
    """The columns of responses and passages."""
    response_S, passage_P = explored.response_S, explored.passage_P
    # Tokens of a response that share an advantage do not repeat it.
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
    columns = {
        "text": _smallest(texts.numbers(tokens.text_T)),
        **_gap("", tokens.logq_T, tokens.logp_T),
        **_gap("_b", tokens.logq_b_T, tokens.logp_b_T),
    }
    if tokens.entropy_T is not None:
        columns["entropy"] = _half(_rounded(tokens.entropy_T, _ENTROPY_DIGITS))
    if not explored.one_advantage:
        columns |= _if_any("advantage", tokens.advantage_T)
    return columns | _levels(explored.judged)


def _levels(algorithms: Sequence[BlockedLevels]) -> dict[str, np.ndarray]:
    """The levels of algorithms whose thresholds move; those of the others, which have few
    combinations, as rows of a table.
    """
    columns = {}
    fixed = []
    for n, judged in enumerate(algorithms):
        if judged.moves:
            columns[f"level{n}"] = judged.level_T
        else:
            fixed.append(judged.level_T)
    if not fixed:
        return columns
    # The number of a token's row, renumbered with each algorithm: a number in base 256 of all its
    # levels would overflow.
    row_T, first = np.zeros(len(fixed[0]), dtype=np.int64), np.zeros(0, dtype=np.int64)
    for level_T in fixed:
        _, first, row_T = np.unique(256 * row_T + level_T, return_index=True, return_inverse=True)
    columns["fixed_rows"] = np.stack([level_T[first] for level_T in fixed], axis=1)
    columns["fixed"] = _smallest(row_T.astype(np.uint32))
    return columns


def _gap(
    suffix: str, logq_T: np.ndarray | None, logp_T: np.ndarray | None
) -> dict[str, np.ndarray]:
    if logq_T is None or logp_T is None:
        return {}
    with np.errstate(invalid="ignore"):  # −∞ − (−∞)
        d_T = logp_T - logq_T
    return {f"logq{suffix}": _half(logq_T), f"d{suffix}": _half(_rounded(d_T, _GAP_DIGITS))}


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
    """A column by its name; nothing where there is none."""
    return {} if column is None else {name: column}


def _smallest(numbers: np.ndarray) -> np.ndarray:
    """Numbers in 16 bits if they fit."""
    if numbers.max(initial=0) < 2**16:
        return numbers.astype(np.uint16)
    return numbers


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
    if len(text) > longest:
        text = f"{text[:longest]}…"
    return for_html(text)


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
        "thresholds": list(map(_threshold, judged.thresholds)),
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
    if title is not None:
        note = f"the {number} largest of {population}"
    else:
        who = " or ".join(explored.compared)
        if tokens.name == "only":
            who = f"only one of {' and '.join(explored.compared)}"
        title = f"blocked by {who}"
        blocked = f"{population} that {who} blocks"
        note = f"{number} of {blocked}, drawn at random"
        if len(tokens.token_U) == tokens.population:
            note = f"all {blocked}"
    return {"name": tokens.name, "title": for_html(title), "note": for_html(note)}


def _titles(explored: Exploration) -> dict[str, str]:
    """The titles of the lists of what is largest, by their names."""
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
    compared = [n for n, row in enumerate(explored.judged) if row.algorithm in explored.compared]
    return compared[:2]


def _threshold(at: Mapping[str, float]) -> str:
    """`δ = 0.15`, or `ε = 0.2 / 0.28` for two sides that differ."""
    values = {name: f"{value:.9g}" for name, value in at.items()}
    two_sided = set()
    for name in at:
        stem, _, end = name.rpartition("_")
        if stem and end in ("low", "high"):
            two_sided.add(stem)
    if len(at) == 2 and len(two_sided) == 1:
        return f"{two_sided.pop()} = {' / '.join(dict.fromkeys(values.values()))}"
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def _laid_out(head: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> bytes:
    """Head and columns; the head has the type, offset and size of each column.

    Equal columns are written once, such as the levels of algorithms with the same mask.
    """
    starts: dict[bytes, int] = {}
    laid_out: dict[str, Sequence[Any]] = {}
    end = 0
    for name, column in columns.items():
        content = _padded(_bytes_of(column))
        start = starts.setdefault(content, end)
        laid_out[name] = [_TYPES[column.dtype.name], start, column.size]
        end = max(end, start + len(content))
    head_json = json.dumps({**head, "columns": laid_out}, ensure_ascii=True, allow_nan=False)
    text = _padded(head_json.encode(), b" ")
    return b"".join((len(text).to_bytes(4, "little"), text, *starts))


def _bytes_of(column: np.ndarray) -> bytes:
    """Little-endian; of 16 bits, all low bytes before all high ones, which compresses better."""
    flat = np.ascontiguousarray(column.reshape(-1), column.dtype.newbyteorder("<"))
    if flat.itemsize != 2:
        return flat.tobytes()
    return flat.view(np.uint8).reshape(-1, 2).T.tobytes()


def _padded(content: bytes, by: bytes = b"\0") -> bytes:
    return content + by * (-len(content) % 4)
