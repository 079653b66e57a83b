"""The worst tokens and responses in their context, looked up in the trace by their keys."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat, starmap
from math import exp, inf
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa

from mismatch_cli.base import numbers
from mismatch_cli.metrics.clipping.overlap import DisputedToken
from mismatch_cli.metrics.pairs import PAIR_COLUMNS, PAIRS, Pair
from mismatch_cli.metrics.retained_rows import RetainedResponse, RetainedToken, WorstRows
from mismatch_cli.report.outline import Excerpt, Facts, TokenText
from mismatch_cli.trace.columns import ALWAYS_READ, PROMPT_COLUMN
from mismatch_cli.trace.reader import Trace, table_to_batch
from mismatch_cli.trace.shards import Footer
from mismatch_cli.trace.vocabulary import Vocabulary

_BEFORE, _AFTER = 40, 12  # tokens shown around a worst token
_LONGEST = 400  # tokens shown of a worst response
_LONGEST_PROMPT = 120
_LARGEST_EXPONENT = 700.0  # whose exponential fits a float
_WEIGHTS = (0.05, 0.2, 0.5, 1.0)  # |d| in nats from which each stronger highlight begins
_COLUMNS = (*ALWAYS_READ, *PAIR_COLUMNS, "reward")
_KEY = ("step", "prompt_id", "sample_index")

Key = tuple[int, int, int, int]  # trace, step, prompt_id, sample_index


class ResponsePlace(Protocol):
    """Where a response is: the number of its trace, and its key in there."""

    @property
    def trace(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def prompt_id(self) -> int: ...
    @property
    def sample_index(self) -> int: ...


P = TypeVar("P", bound=ResponsePlace)


@dataclass(frozen=True)
class TitledToken:
    """A token to show under a title; `short` is that on a screen, empty if it is not on one."""

    token: RetainedToken | DisputedToken
    title: str
    short: str = ""


@dataclass(frozen=True)
class MovedPlace:
    """A token with log π − log μ before and after a change, nats."""

    step: int
    prompt_id: int
    sample_index: int
    position: int
    before: float
    after: float
    trace: int = 0


@dataclass(frozen=True)
class _Response:
    """What it takes to show one response."""

    prompt_ids: list[int]
    ids_T: np.ndarray
    d_T: np.ndarray  # nats; NaN: not measured, or outside the loss
    reward: float | None
    vocabulary: Vocabulary

    @cached_property
    def _spans(self) -> list[slice]:
        return self.vocabulary.spans(self.ids_T)

    def span(self, position: int) -> slice:
        """The tokens that share characters with the one at a position."""
        return next(span for span in self._spans if position < span.stop)

    def text(self, position: int) -> str:
        """The text of a token, with all of a character that it shares with others."""
        return self.vocabulary.decode(self.ids_T[self.span(position)])


def worst_excerpts(
    traces: Sequence[Trace], pair: Pair, worst: WorstRows
) -> tuple[list[Excerpt], list[Excerpt]]:
    """The worst tokens (by |d|) and responses (by |Σd|), as excerpts."""
    tokens, responses = worst.abs_d, worst.responses
    read = _read_responses(traces, pair, {*map(_key, tokens), *map(_key, responses)})
    return (
        list(starmap(_token_excerpt, _with_responses(tokens, read))),
        list(starmap(_response_excerpt, _with_responses(responses, read))),
    )


def token_excerpts(
    traces: Sequence[Trace], pair: Pair, tokens: Sequence[TitledToken]
) -> list[Excerpt]:
    """Tokens in context, each under its title."""
    responses = _read_responses(traces, pair, {_key(each.token) for each in tokens})
    excerpts = []
    for each in tokens:
        response = responses.get(_key(each.token))
        if response is not None:
            excerpts.append(_token_excerpt(each.token, response, each.title, each.short))
    return excerpts


def moved_excerpts(trace: Trace, tokens: Sequence[MovedPlace]) -> list[Excerpt]:
    """Tokens of a trace in context, with log π − log μ before and after a change."""
    read = _read_responses([trace], PAIRS["total"], set(map(_key, tokens)))
    return list(starmap(_moved_excerpt, _with_responses(tokens, read)))


def _with_responses(
    rows: Iterable[P], responses: Mapping[Key, _Response]
) -> Iterator[tuple[P, _Response]]:
    """The rows whose response was read, each with it."""
    for row in rows:
        response = responses.get(_key(row))
        if response is not None:
            yield row, response


def _key(place: ResponsePlace) -> Key:
    return place.trace, place.step, place.prompt_id, place.sample_index


def _keys(table: pa.Table, number: int) -> Iterator[Key]:
    """The key of each row of a table, which is of the trace with this number."""
    return zip(repeat(number), *(table.column(name).to_pylist() for name in _KEY))


def _has_one(wanted: set[Key], trace: Trace, number: int, shard: Path) -> bool:
    """Whether a shard has one of the responses; reads its keys until it meets one."""
    tables = trace.tables(_KEY, [shard])
    return any(not wanted.isdisjoint(_keys(table, number)) for table in tables)


def _may_hold(footer: Footer, steps: Sequence[int]) -> bool:
    """Whether a shard may have rows of these steps, according to its footer."""
    for group in footer.ranges:
        bounds = group.get("step")
        if bounds is None:
            return True
        first, last = bounds
        if any(first <= step <= last for step in steps):
            return True
    return False


def _read_responses(traces: Sequence[Trace], pair: Pair, wanted: set[Key]) -> dict[Key, _Response]:
    """The responses with these keys, as far as the traces have them and can show them."""
    responses: dict[Key, _Response] = {}
    for number, trace in enumerate(traces):
        # A long trace has thousands of shards, and the excerpts are in a few of them.
        # Footers rule out most for nothing, keys alone most of the rest: only these are read.
        steps = [key[1] for key in wanted if key[0] == number]
        near = [path for path in trace.shards if _may_hold(trace.footers[path], steps)]
        shards = [path for path in near if _has_one(wanted, trace, number, path)]
        for table in trace.tables(_COLUMNS, shards):
            row_of = {key: row for row, key in enumerate(_keys(table, number)) if key in wanted}
            if row_of:
                responses |= _responses_in(table, row_of, pair, trace.vocabulary)
    return responses


def _responses_in(
    table: pa.Table, row_of: Mapping[Key, int], pair: Pair, vocabulary: Vocabulary
) -> dict[Key, _Response]:
    """The responses in these rows; none if the table lacks what it takes to show them."""
    batch = table_to_batch(table)
    logp_reference_T = getattr(batch, pair.reference)
    logp_current_T = getattr(batch, pair.current)
    if logp_current_T is None or batch.response_ids_T is None or batch.prompt_length_S is None:
        return {}
    # A token outside the loss has no part in the numbers, whatever was recorded for it.
    d_T = np.where(batch.loss_mask_T, logp_current_T - logp_reference_T, np.float32("nan"))
    responses = {}
    for key, row in row_of.items():
        tokens = slice(int(batch.offset_S1[row]), int(batch.offset_S1[row + 1]))
        responses[key] = _Response(
            table.column(PROMPT_COLUMN)[row].as_py(),
            batch.response_ids_T[tokens],
            d_T[tokens],
            None if batch.reward_S is None else batch.reward_S[row].item(),
            vocabulary,
        )
    return responses


def _token_excerpt(
    row: RetainedToken | DisputedToken, response: _Response, title: str = "", short: str = ""
) -> Excerpt:
    logq, logp = row.logp_reference, row.logp_current
    # A token outside the trainer's support was recorded without log π, which is −∞.
    d = -inf if logp is None else logp - logq
    gap = (
        ("μ", numbers.number(exp(logq))),
        ("π", numbers.number(exp(logq + d))),
        ("π/μ", numbers.number(exp(d) if d < _LARGEST_EXPONENT else inf)),
        ("log π − log μ", numbers.number(d)),
    )
    token = f"“{response.text(row.position)}”"
    return Excerpt(
        title=f"{title}: {token}" if title else token,
        facts=(*gap, *_place(row, response)),
        pieces=_around(response, row.position, float(response.d_T[row.position])),
        prompt=_prompt(response),
        short=f"{short}: {token}" if short else "",
    )


def _moved_excerpt(row: MovedPlace, response: _Response) -> Excerpt:
    change = f"{numbers.number(row.before)} → {numbers.number(row.after)}"
    return Excerpt(
        title=f"“{response.text(row.position)}”",
        facts=(("log π − log μ", change), *_place(row, response)),
        pieces=_around(response, row.position, row.before),
        prompt=_prompt(response),
    )


def _around(response: _Response, position: int, d: float) -> tuple[TokenText, ...]:
    """A marked token between those before and after it."""
    start = max(0, position - _BEFORE)
    stop = min(len(response.ids_T), position + _AFTER + 1)
    marked = response.span(position)
    return (
        *_ellipsis(start > 0),
        *_plain(response, start, marked.start),
        TokenText(response.text(position), 4, _gap_hint(d)),
        *_plain(response, marked.stop, stop),
        *_ellipsis(stop < len(response.ids_T)),
    )


def _response_excerpt(row: RetainedResponse, response: _Response) -> Excerpt:
    facts = [
        ("Σ (log π − log μ)", numbers.number(row.d_sum)),
        ("tokens", numbers.count(row.length)),
    ]
    if response.reward is not None and not np.isnan(response.reward):
        facts.append(("reward", numbers.number(response.reward)))
    stop = min(len(response.ids_T), _LONGEST)
    pieces = (*_weighted(response, stop), *_ellipsis(stop < len(response.ids_T)))
    title = ", ".join(f"{label} {value}" for label, value in _where(row))
    return Excerpt(title, tuple(facts), pieces, _prompt(response))


def _where(response: ResponsePlace) -> Facts:
    key = (("prompt", str(response.prompt_id)), ("sample", str(response.sample_index)))
    if not response.step:
        return key
    return (("step", str(response.step)), *key)


def _place(token: RetainedToken | DisputedToken | MovedPlace, response: _Response) -> Facts:
    """Which response a token is in, and where in it."""
    return (*_where(token), ("position", f"{token.position} of {len(response.ids_T)}"))


def _prompt(response: _Response) -> str:
    shown = response.prompt_ids[-_LONGEST_PROMPT:]
    text = response.vocabulary.decode(shown)
    return text if len(shown) == len(response.prompt_ids) else f"… {text}"


def _plain(response: _Response, start: int, stop: int) -> list[TokenText]:
    if start >= stop:
        return []
    return [TokenText(response.vocabulary.decode(response.ids_T[start:stop]))]


def _weighted(response: _Response, stop: int) -> list[TokenText]:
    """Runs of plain tokens decoded together, highlighted ones one by one; tokens that share a
    character are highlighted as the one whose gap is largest.
    """
    # searchsorted would sort NaN, a token that was not measured, after every weight.
    size_T = np.nan_to_num(np.abs(response.d_T), posinf=np.inf)
    weight_T = np.searchsorted(_WEIGHTS, size_T, side="right")
    pieces: list[TokenText] = []
    run = 0
    for span in response.vocabulary.spans(response.ids_T[:stop]):
        weight = int(weight_T[span].max())
        if weight:
            pieces += _plain(response, run, span.start)
            d_T = response.d_T[span]
            largest = float(d_T[np.nanargmax(np.abs(d_T))])
            text = response.vocabulary.decode(response.ids_T[span])
            pieces.append(TokenText(text, weight, _gap_hint(largest)))
            run = span.stop
    return [*pieces, *_plain(response, run, stop)]


def _gap_hint(d: float) -> str:
    return f"log π − log μ = {numbers.number(d)}"


def _ellipsis(needed: bool) -> list[TokenText]:
    return [TokenText(" … ")] if needed else []
