"""The first responses of traces, token by token: what a page needs to show each token and to move
thresholds.

A page repeats no formula: each algorithm's own masks are applied here, once per slider position. A
token is blocked at positions below its level, so a script only compares two integers, and agrees to
the token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mismatch_cli.algorithms.algorithm import Algorithm, keep_T
from mismatch_cli.algorithms.parts import Rule
from mismatch_cli.algorithms.sliders import sliders
from mismatch_cli.batch import TokenBatch
from mismatch_cli.batches import Found
from mismatch_cli.metrics.clipping.masked import Masked, Needs, apply_masks
from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.places import shown
from mismatch_cli.studies.study import name_of
from mismatch_cli.trace.foreign import single
from mismatch_cli.trace.reader import Trace, table_to_batch
from mismatch_cli.trace.schema import PROMPT_COLUMN, REQUIRED
from mismatch_cli.trace.vocabulary import Vocabulary

MOST_RESPONSES = 200  # on a page
MOST_TOKENS = 12_000  # on a page: about 300 KB
# The level of a token without an advantage, or without a column that an algorithm needs
NOT_JUDGED = 255
RANKS = 5  # of the top K, on the page
_CERTAIN = 0.995  # μ above which the ranks add nothing
_PROMPT_TOKENS = 200
_KEPT = slice(0, MOST_TOKENS)  # of a part
_COLUMNS = (
    *REQUIRED, "version_rollout", "version_trainer", "reward", "loss_mask", "logp_trainer",
    "logp_recomputed",
    "logp_average", "entropy_trainer", "advantage", "topk_ids", "topk_logp_rollout",
    "topk_logp_trainer",
    "topk_logp_recomputed",
)  # fmt: skip


@dataclass(frozen=True)
class ExploredResponse:
    """A response's origin, its raw prompt, and how many of its first tokens are included."""

    trace: int
    step: int
    prompt_id: int
    sample_index: int
    reward: float | None
    length: int
    tokens: int
    prompt: str


@dataclass(frozen=True)
class Judged:
    """What an algorithm blocks: a token at positions 0 … level − 1 of its slider, whose thresholds
    ascend.

    Without advantages each algorithm appears twice, as if all tokens had the `sign` > or <.
    """

    algorithm: str
    sign: str
    # At each position; a single position if none can be moved
    thresholds: tuple[Mapping[str, float], ...]
    published: int  # the position of the algorithm as requested
    level_T: np.ndarray  # uint8; `NOT_JUDGED`
    unmoved: str = ""  # why no threshold can be moved


@dataclass(frozen=True)
class TopRanks:
    """The engine's first ranks at some tokens, by their index in T, with log-probabilities of
    both policies.
    """

    token_U: np.ndarray
    text_UK: Sequence[Sequence[str]]  # raw
    logq_UK: np.ndarray
    logp_UK: np.ndarray


@dataclass(frozen=True)
class Exploration:
    """Columns over the tokens `_T` of some responses; log-probabilities in nats, NaN where not
    measured.
    """

    responses: tuple[ExploredResponse, ...]
    left_out: int  # responses of the traces that are not included
    pair: Pair
    judged_alike: bool  # whether π is the trainer that masks judge, which may be some steps ahead
    compared: tuple[str, ...]  # the algorithms shown first: two at most
    text_T: Sequence[str]  # raw
    logq_T: np.ndarray
    logp_T: np.ndarray
    entropy_T: np.ndarray | None
    advantage_T: np.ndarray | None
    ranks: TopRanks | None
    judged: tuple[Judged, ...]
    traces: tuple[str, ...] = ("",)  # their names
    # Whether the tokens of a page, not the number requested, limited the responses
    full: bool = False


def explore(
    traces: Sequence[Trace],
    pair: Pair,
    algorithms: Sequence[Algorithm],
    needs: Needs,
    found: Mapping[Rule, Found],
    compared: Sequence[Algorithm] = (),
    responses: int = MOST_RESPONSES,
) -> Exploration | None:
    """The first scored responses, as many as `responses` and as fit on a page; None if there are
    none.

    `found` is the result of the first pass of rules on whole batches (`clipping.first_pass`).
    A single response that is too long for a page is judged as a whole, then cut.
    """
    parts, full = _first_parts(traces, pair, responses)
    if not parts:
        return None
    words = [cache(partial(_word, trace.vocabulary)) for trace in traces]
    logq_T, logp_T = _column(parts, pair.reference), _column(parts, pair.current)
    assert logq_T is not None and logp_T is not None  # `_first_parts` checked them
    return Exploration(
        tuple(
            response
            for part in parts
            for response in _responses(part, traces[part.trace].vocabulary)
        ),
        sum(trace.num_responses for trace in traces)
        - sum(part.batch.num_responses for part in parts),
        pair,
        all(_judged_alike(part.batch, pair) for part in parts),
        tuple(algorithm.name for algorithm in compared),
        [text for part in parts for text in _texts(part, traces[part.trace].vocabulary)],
        logq_T,
        logp_T,
        _column(parts, "entropy_trainer_T"),
        _column(parts, "advantage_T"),
        _ranks(parts, pair, words),
        tuple(_judged(parts, algorithms, needs, found)),
        tuple(shown(str(name_of(trace))) for trace in traces),
        full,
    )


class _Part(NamedTuple):
    """Rows of one row group: their trace, where their tokens begin among all, and what was
    recorded.

    Row groups are laid flat one by one: each has the columns and ranks of its shard.
    """

    trace: int
    start: int
    prompts: Sequence[Sequence[int]]
    batch: TokenBatch

    @property
    def shown(self) -> int:
        """How many of its tokens a page shows: all unless a response is too long."""
        return min(self.batch.num_tokens, MOST_TOKENS)


def _first_parts(traces: Sequence[Trace], pair: Pair, responses: int) -> tuple[list[_Part], bool]:
    """The scored part of each trace's first rows, and whether a page was full before it had all
    requested responses.

    Traces share the remaining space equally.
    """
    parts: list[_Part] = []
    full = False
    for number, trace in enumerate(traces):
        left, start = len(traces) - number, sum(part.batch.num_tokens for part in parts)
        quota, last = -(-responses // left), start + (MOST_TOKENS - start) // left
        found, cut = _first_of(trace, number, pair, quota, start, last)
        parts, full = parts + found, full or cut
        responses -= sum(part.batch.num_responses for part in found)
    return parts, full and responses > 0


def _first_of(
    trace: Trace, number: int, pair: Pair, responses: int, start: int, last: int
) -> tuple[list[_Part], bool]:
    """At most so many responses of a trace, up to a last token, and whether that token was the
    limit.

    A single response that is too long comes alone.
    """
    parts: list[_Part] = []
    for table in trace.tables(_COLUMNS):
        lengths_S = np.diff(np.from_dlpack(single(table.column("response_ids")).offsets))
        ends_S = start + lengths_S.cumsum(dtype=np.int64)
        room, wanted = (
            int(np.searchsorted(ends_S, last, side="right")) or int(start == 0),
            min(responses, len(table)),
        )
        fitting = min(room, wanted)
        if fitting == 0:
            return parts, room < wanted
        rows = table.slice(0, fitting)
        batch = table_to_batch(rows)
        if not pair.measured_in(batch):
            continue
        parts.append(_Part(number, start, rows.column(PROMPT_COLUMN).to_pylist(), batch))
        responses, start = responses - fitting, start + batch.num_tokens
        if fitting < len(table):
            return parts, room < wanted
    return parts, False


def _judged_alike(batch: TokenBatch, pair: Pair) -> bool:
    trainer_T = batch.logp_trainer_T
    return trainer_T is None or np.array_equal(
        getattr(batch, pair.current), trainer_T, equal_nan=True
    )


def _column(parts: Sequence[_Part], name: str) -> np.ndarray | None:
    """A column of every shown token, NaN in parts that lack it; None if all lack it."""
    found = [getattr(part.batch, name) for part in parts]
    if all(column_T is None for column_T in found):
        return None
    missing = [np.full(part.shown, np.nan, dtype=np.float32) for part in parts]
    return np.concatenate(
        [
            lacking if column_T is None else column_T[_KEPT]
            for column_T, lacking in zip(found, missing, strict=True)
        ]
    )


def _word(vocabulary: Vocabulary, token: int) -> str:
    return vocabulary.decode([token])


def _texts(part: _Part, vocabulary: Vocabulary) -> Iterator[str]:
    """The text of each shown token, as it reads in its response."""
    ids_T, offset_S1 = part.batch.response_ids_T[_KEPT], part.batch.offset_S1
    for start, stop in pairwise(np.minimum(offset_S1, len(ids_T)).tolist()):
        yield from vocabulary.texts(ids_T[start:stop])


def _responses(part: _Part, vocabulary: Vocabulary) -> Iterator[ExploredResponse]:
    batch = part.batch
    for row, prompt in enumerate(part.prompts):
        first, end = (int(offset) for offset in batch.offset_S1[row : row + 2])
        reward = (
            None
            if batch.reward_S is None or np.isnan(batch.reward_S[row])
            else float(batch.reward_S[row])
        )
        yield ExploredResponse(
            trace=part.trace,
            step=int(batch.step_S[row]),
            prompt_id=int(batch.prompt_id_S[row]),
            sample_index=int(batch.sample_index_S[row]),
            reward=reward,
            length=end - first,
            tokens=min(end, MOST_TOKENS) - first,
            prompt=vocabulary.decode(list(prompt[-_PROMPT_TOKENS:])),
        )


def _ranks(
    parts: Sequence[_Part], pair: Pair, words: Sequence[Callable[[int], str]]
) -> TopRanks | None:
    """The engine's first ranks, for tokens that were not nearly certain."""
    found = [
        _ranks_of(part, pair, words[part.trace])
        for part in parts
        if pair.topk_measured_in(part.batch)
    ]
    if not found:
        return None
    return TopRanks(
        np.concatenate([ranks.token_U for ranks in found]),
        [row for ranks in found for row in ranks.text_UK],
        np.concatenate([ranks.logq_UK for ranks in found]),
        np.concatenate([ranks.logp_UK for ranks in found]),
    )


def _ranks_of(part: _Part, pair: Pair, word: Callable[[int], str]) -> TopRanks:
    """The ranks of a part; NaN where fewer were recorded."""
    batch = part.batch
    assert batch.topk_ids_TK is not None  # `topk_measured_in` checked it
    logq_TK, logp_TK = (
        getattr(batch, str(name))[_KEPT, :RANKS]
        for name in (pair.topk_reference, pair.topk_current)
    )
    token_U = np.flatnonzero(
        (getattr(batch, pair.reference)[_KEPT] < np.log(_CERTAIN)) & ~np.isnan(logq_TK[:, 0])
    )
    missing = RANKS - logq_TK.shape[1]
    wide = partial(np.pad, pad_width=((0, 0), (0, missing)), constant_values=np.nan)
    ids_UK = batch.topk_ids_TK[token_U, :RANKS].tolist()
    texts = [[*map(word, ids), *[""] * missing] for ids in ids_UK]
    return TopRanks(part.start + token_U, texts, wide(logq_TK[token_U]), wide(logp_TK[token_U]))


def _judged(
    parts: Sequence[_Part],
    algorithms: Sequence[Algorithm],
    needs: Needs,
    found: Mapping[Rule, Found],
) -> Iterator[Judged]:
    """Each algorithm on these tokens, with the slider of its threshold."""
    judging = [part for part in parts if not needs.missing_in(part.batch)]
    slices = [
        (part, masks)
        for part in judging
        for masks in apply_masks(part.batch, needs, (), found, part.trace)
    ]
    size = sum(part.shown for part in parts)
    for algorithm in algorithms if slices else ():
        for place, sign in enumerate(("",) if needs.advantages else (">", "<")):
            yield _moved(algorithm, sign, [(part, masks[place]) for part, masks in slices], size)


def _moved(
    algorithm: Algorithm, sign: str, slices: Sequence[tuple[_Part, Masked]], size: int
) -> Judged:
    """An algorithm at every position of its slider; only at its own if its blocked share does
    not fall.
    """
    positions = sliders(algorithm)
    unmoved = "" if len(positions) > 1 else "no threshold to move"
    blocked = [
        np.stack([~keep_T(moved, m.policies, m.advantage_N) for moved, _ in positions])
        for _, m in slices
    ]
    published = next(place for place, (moved, _) in enumerate(positions) if moved is algorithm)
    if any((blocked_PN[:-1] < blocked_PN[1:]).any() for blocked_PN in blocked):
        positions, blocked = (
            positions[published : published + 1],
            [b[published : published + 1] for b in blocked],
        )
        published, unmoved = 0, "not ordered by its threshold"
    level_T = np.full(size, NOT_JUDGED, dtype=np.uint8)
    for (part, masked), blocked_PN in zip(slices, blocked, strict=True):
        index_N = masked.gaps.index_N
        shown_N = masked.judged_N & (index_N < part.shown)
        level_T[part.start + index_N[shown_N]] = blocked_PN.sum(axis=0)[shown_N]
    return Judged(
        algorithm.name,
        sign,
        tuple(thresholds for _, thresholds in positions),
        published,
        level_T,
        unmoved,
    )
