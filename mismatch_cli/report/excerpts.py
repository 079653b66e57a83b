"""The worst tokens and responses in their context, looked up in the trace by their keys."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from math import exp, inf
from pathlib import Path
from typing import Protocol

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
    d_T: np.ndarray
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
    found = _look_up(traces, pair, {*map(_key, tokens), *map(_key, responses)})
    return (
        [_token_excerpt(row, found[_key(row)]) for row in tokens if _key(row) in found],
        [_response_excerpt(row, found[_key(row)]) for row in responses if _key(row) in found],
    )


def token_excerpts(
    traces: Sequence[Trace], pair: Pair, tokens: Sequence[TitledToken]
) -> list[Excerpt]:
    """Tokens in context, each under its title."""
    found = _look_up(traces, pair, {_key(each.token) for each in tokens})
    return [
        _token_excerpt(each.token, found[_key(each.token)], each.title, each.short)
        for each in tokens
        if _key(each.token) in found
    ]


def moved_excerpts(trace: Trace, tokens: Sequence[MovedPlace]) -> list[Excerpt]:
    """Tokens of a trace in context, with log π − log μ before and after a change."""
    found = _look_up([trace], PAIRS["total"], {_key(token) for token in tokens})
    return [_moved_excerpt(each, found[_key(each)]) for each in tokens if _key(each) in found]


def _key(place: ResponsePlace) -> Key:
    return place.trace, place.step, place.prompt_id, place.sample_index


def _keys(table: pa.Table, number: int) -> Iterator[Key]:
    return zip(repeat(number), *(table.column(name).to_pylist() for name in _KEY))


def _keys_in(trace: Trace, number: int, shard: Path) -> Iterator[Key]:
    return (key for table in trace.tables(_KEY, [shard]) for key in _keys(table, number))


def _may_hold(footer: Footer, steps: Sequence[int]) -> bool:
    """Whether a shard may have rows of these steps, according to its footer."""
    ranges = [group.get("step") for group in footer.ranges]
    return any(
        bounds is None or any(bounds[0] <= step <= bounds[1] for step in steps) for bounds in ranges
    )


def _look_up(traces: Sequence[Trace], pair: Pair, wanted: set[Key]) -> dict[Key, _Response]:
    found: dict[Key, _Response] = {}
    for number, trace in enumerate(traces):
        steps = [key[1] for key in wanted if key[0] == number]
        near = [path for path in trace.shards if _may_hold(trace.footers[path], steps)]
        shards = [path for path in near if not wanted.isdisjoint(_keys_in(trace, number, path))]
        for table in trace.tables(_COLUMNS, shards):
            rows = [(row, key) for row, key in enumerate(_keys(table, number)) if key in wanted]
            if not rows:
                continue
            batch = table_to_batch(table)
            reference, current = (getattr(batch, name) for name in (pair.reference, pair.current))
            if current is None or batch.response_ids_T is None or batch.prompt_length_S is None:
                continue
            rewards = [None] * len(table) if batch.reward_S is None else batch.reward_S.tolist()
            for row, key in rows:
                tokens = slice(int(batch.offset_S1[row]), int(batch.offset_S1[row + 1]))
                found[key] = _Response(
                    table.column(PROMPT_COLUMN)[row].as_py(),
                    batch.response_ids_T[tokens],
                    current[tokens] - reference[tokens],
                    rewards[row],
                    trace.vocabulary,
                )
    return found


def _token_excerpt(
    row: RetainedToken | DisputedToken, response: _Response, title: str = "", short: str = ""
) -> Excerpt:
    position = row.position
    token = response.text(position)
    logq, logp = row.logp_reference, row.logp_current
    d = -inf if logp is None else logp - logq  # a token out of support has no finite log π
    facts: Facts = (
        ("μ", numbers.number(exp(logq))),
        ("π", numbers.number(exp(logq + d))),
        ("π/μ", numbers.number(exp(d) if d < _LARGEST_EXPONENT else inf)),
        ("log π − log μ", numbers.number(d)),
        *_where(row),
        ("position", f"{position} of {len(response.ids_T)}"),
    )
    pieces = _around(response, position, float(response.d_T[position]))
    title, short = (f"{each}: “{token}”" if each else "" for each in (title, short))
    return Excerpt(title or f"“{token}”", facts, pieces, _prompt(response), short)


def _moved_excerpt(row: MovedPlace, response: _Response) -> Excerpt:
    position, before, after = row.position, row.before, row.after
    token = response.text(position)
    facts: Facts = (
        ("log π − log μ", f"{numbers.number(before)} → {numbers.number(after)}"),
        *_where(row),
        ("position", f"{position} of {len(response.ids_T)}"),
    )
    return Excerpt(f"“{token}”", facts, _around(response, position, before), _prompt(response))


def _around(response: _Response, position: int, d: float) -> tuple[TokenText, ...]:
    """A marked token between those before and after it."""
    start, stop = max(0, position - _BEFORE), min(len(response.ids_T), position + _AFTER + 1)
    marked = response.span(position)
    return (
        *_ellipsis(start > 0),
        *_plain(response, start, marked.start),
        TokenText(response.text(position), 4, f"log π − log μ = {numbers.number(d)}"),
        *_plain(response, marked.stop, stop),
        *_ellipsis(stop < len(response.ids_T)),
    )


def _response_excerpt(row: RetainedResponse, response: _Response) -> Excerpt:
    reward = response.reward
    facts: Facts = (
        ("Σ (log π − log μ)", numbers.number(row.d_sum)),
        ("tokens", numbers.count(row.length)),
        *(
            (("reward", numbers.number(reward)),)
            if reward is not None and not np.isnan(reward)
            else ()
        ),
    )
    stop = min(len(response.ids_T), _LONGEST)
    pieces = (*_weighted(response, stop), *_ellipsis(stop < len(response.ids_T)))
    title = ", ".join(f"{label} {value}" for label, value in _where(row))
    return Excerpt(title, facts, tuple(pieces), _prompt(response))


def _where(place: ResponsePlace) -> Facts:
    step = (("step", str(place.step)),) if place.step else ()
    return (*step, ("prompt", str(place.prompt_id)), ("sample", str(place.sample_index)))


def _prompt(response: _Response) -> str:
    cut = response.prompt_ids[-_LONGEST_PROMPT:]
    return ("… " if len(cut) < len(response.prompt_ids) else "") + response.vocabulary.decode(cut)


def _plain(response: _Response, start: int, stop: int) -> Iterable[TokenText]:
    return (
        [TokenText(response.vocabulary.decode(response.ids_T[start:stop]))] if stop > start else []
    )


def _weighted(response: _Response, stop: int) -> list[TokenText]:
    """Runs of plain tokens decoded together, highlighted ones one by one; tokens that share a
    character are highlighted as the one whose gap is largest.
    """
    weight_T = np.searchsorted(
        _WEIGHTS, np.nan_to_num(np.abs(response.d_T), posinf=np.inf), side="right"
    )
    pieces: list[TokenText] = []
    run = 0
    for span in response.vocabulary.spans(response.ids_T[:stop]):
        weight = int(weight_T[span].max())
        if weight:
            pieces += _plain(response, run, span.start)
            d_T = response.d_T[span]
            largest = float(d_T[np.nanargmax(np.abs(d_T))])
            hint = f"log π − log μ = {numbers.number(largest)}"
            pieces.append(TokenText(response.vocabulary.decode(response.ids_T[span]), weight, hint))
            run = span.stop
    return [*pieces, *_plain(response, run, stop)]


def _ellipsis(needed: bool) -> list[TokenText]:
    return [TokenText(" … ")] if needed else []
