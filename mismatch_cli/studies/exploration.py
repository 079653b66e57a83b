"""The first responses of traces, token by token: what a page holds to look at each of them, and to move thresholds.

A page writes no formula again: what an algorithm blocks was asked of its own masks here, once for each position of a
slider. A token is blocked up to its level, so that a script compares two whole numbers, and agrees to the token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import pyarrow as pa

from mismatch_cli.algorithms.algorithm import Algorithm, keep_T
from mismatch_cli.algorithms.sliders import sliders
from mismatch_cli.batch import TokenBatch
from mismatch_cli.metrics.clipping.masked import Masked, Needs, apply_masks
from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.trace.reader import Trace, table_to_batch
from mismatch_cli.trace.schema import PROMPT_COLUMN, REQUIRED
from mismatch_cli.trace.vocabulary import Vocabulary

MOST_TOKENS = 12_000  # of a page: about 300 KB
NOT_JUDGED = 255  # the level of a token without an advantage, or without a column that an algorithm needs
_RANKS = 5  # of the top-K that are shown
_CERTAIN = 0.995  # μ from which on they tell nothing new
_PROMPT_TOKENS = 200
_COLUMNS = (
    *REQUIRED, "version_rollout", "version_trainer", "reward", "loss_mask", "logp_trainer", "logp_recomputed",
    "entropy_trainer", "advantage", "topk_ids", "topk_logp_rollout", "topk_logp_trainer", "topk_logp_recomputed",
)  # fmt: skip


@dataclass(frozen=True)
class ExploredResponse:
    """Where a response is from, what its prompt was (raw), and how many of its tokens are here, from the first."""

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
    """What an algorithm blocks: a token at the positions 0 … level − 1 of its slider, whose thresholds ascend.

    Without advantages each algorithm stands here twice, as if all of them had the `sign` > or <.
    """

    algorithm: str
    sign: str
    thresholds: tuple[Mapping[str, float], ...]  # at each position; one position where none can be moved
    published: int  # the position of the algorithm as it was asked for
    level_T: np.ndarray  # uint8; `NOT_JUDGED`


@dataclass(frozen=True)
class TopRanks:
    """The engine's first ranks at some tokens, by their index in T, with log-probabilities of both policies."""

    token_U: np.ndarray
    text_UK: Sequence[Sequence[str]]  # raw
    logq_UK: np.ndarray
    logp_UK: np.ndarray


@dataclass(frozen=True)
class Exploration:
    """Columns over the tokens `_T` of some responses; log-probabilities in nats, NaN where not measured."""

    responses: tuple[ExploredResponse, ...]
    left_out: int  # responses of the traces that are not here
    pair: Pair
    compared: tuple[str, ...]  # the algorithms to begin with: two at most
    text_T: Sequence[str]  # raw
    logq_T: np.ndarray
    logp_T: np.ndarray
    entropy_T: np.ndarray | None
    advantage_T: np.ndarray | None
    ranks: TopRanks | None
    judged: tuple[Judged, ...]


def explore(
    traces: Sequence[Trace],
    pair: Pair,
    algorithms: Sequence[Algorithm],
    needs: Needs,
    compared: Sequence[Algorithm] = (),
    responses: int = 200,
) -> Exploration | None:
    """The first responses that were scored, as many as asked for and as a page holds; None where there are none.

    One that alone is too long for a page is cut, and judged as a whole.
    """
    tables = list(_first_rows(traces, pair, responses))
    if not tables:
        return None
    batch = table_to_batch(pa.concat_tables([table for _, table in tables], promote_options="default"))
    trace_S = np.concatenate([np.full(len(table), number) for number, table in tables])
    words = [cache(partial(_word, trace.vocabulary)) for trace in traces]
    kept = slice(0, min(batch.num_tokens, MOST_TOKENS))
    word_T = [words[number] for number in np.repeat(trace_S, np.diff(batch.offset_S1))[kept].tolist()]
    prompts = [ids for _, table in tables for ids in table.column(PROMPT_COLUMN).to_pylist()]
    return Exploration(
        tuple(
            _response(batch, row, int(number), traces[number].vocabulary.decode(prompt[-_PROMPT_TOKENS:]))
            for row, (number, prompt) in enumerate(zip(trace_S, prompts, strict=True))
        ),
        sum(trace.num_responses for trace in traces) - batch.num_responses,
        pair,
        tuple(algorithm.name for algorithm in compared),
        [word(token) for word, token in zip(word_T, batch.response_ids_T[kept].tolist(), strict=True)],
        getattr(batch, pair.reference)[kept],
        getattr(batch, pair.current)[kept],
        None if batch.entropy_trainer_T is None else batch.entropy_trainer_T[kept],
        None if batch.advantage_T is None else batch.advantage_T[kept],
        _ranks(batch, pair, word_T),
        tuple(replace(judged, level_T=judged.level_T[kept]) for judged in _judged(batch, algorithms, needs)),
    )


def _first_rows(traces: Sequence[Trace], pair: Pair, responses: int) -> Iterator[tuple[int, pa.Table]]:
    """Rows from the beginning, each with the number of its trace, until a page is full."""
    room = MOST_TOKENS
    for number, trace in enumerate(traces):
        for table in trace.tables(_COLUMNS):
            rows = table.slice(0, responses)
            batch = table_to_batch(rows)
            if not pair.measured_in(batch):
                continue
            fitting = int(np.searchsorted(batch.offset_S1[1:], room, side="right"))
            if fitting == 0 and room == MOST_TOKENS:
                fitting = 1
            if fitting:
                yield number, rows.slice(0, fitting)
            responses, room = responses - fitting, room - int(batch.offset_S1[fitting])
            if responses == 0 or fitting < len(rows):
                return


def _word(vocabulary: Vocabulary, token: int) -> str:
    return vocabulary.decode([token])


def _response(batch: TokenBatch, row: int, trace: int, prompt: str) -> ExploredResponse:
    first, end = (int(offset) for offset in batch.offset_S1[row : row + 2])
    reward = None if batch.reward_S is None or np.isnan(batch.reward_S[row]) else float(batch.reward_S[row])
    step, prompt_id, sample = (int(column[row]) for column in (batch.step_S, batch.prompt_id_S, batch.sample_index_S))
    here = min(end, MOST_TOKENS) - first
    return ExploredResponse(trace, step, prompt_id, sample, reward, end - first, here, prompt)


def _ranks(batch: TokenBatch, pair: Pair, word_T: Sequence[Callable[[int], str]]) -> TopRanks | None:
    """Where the sampled token was not all but certain."""
    if not pair.topk_measured_in(batch):
        return None
    assert batch.topk_ids_TK is not None
    logq_TK, logp_TK = (getattr(batch, str(name)) for name in (pair.topk_reference, pair.topk_current))
    uncertain_T = getattr(batch, pair.reference)[: len(word_T)] < np.log(_CERTAIN)
    token_U = np.flatnonzero(uncertain_T & ~np.isnan(logq_TK[: len(word_T), 0]))
    ids_UK = batch.topk_ids_TK[token_U, :_RANKS].tolist()
    return TopRanks(
        token_U,
        [[word_T[token](rank) for rank in ids] for token, ids in zip(token_U.tolist(), ids_UK, strict=True)],
        logq_TK[token_U, :_RANKS],
        logp_TK[token_U, :_RANKS],
    )


def _judged(batch: TokenBatch, algorithms: Sequence[Algorithm], needs: Needs) -> list[Judged]:
    """Each algorithm on these tokens, with the slider of its threshold."""
    if needs.missing_in(batch):
        return []
    slices = list(apply_masks(batch, needs, algorithms))
    signs = ("",) if needs.advantages else (">", "<")
    return [
        _moved(algorithm, sign, [masked[place] for masked in slices], batch)
        for algorithm in algorithms
        for place, sign in enumerate(signs)
    ]


def _moved(algorithm: Algorithm, sign: str, slices: Sequence[Masked], batch: TokenBatch) -> Judged:
    """An algorithm at every position of its slider; at its own alone where its blocked share does not fall."""
    positions = sliders(algorithm)
    blocked = [np.stack([~keep_T(moved, m.policies, m.advantage_N) for moved, _ in positions]) for m in slices]
    published = next(place for place, (moved, _) in enumerate(positions) if moved is algorithm)
    if any((blocked_PN[:-1] < blocked_PN[1:]).any() for blocked_PN in blocked):
        positions, blocked = positions[published : published + 1], [b[published : published + 1] for b in blocked]
        published = 0
    level_T = np.full(batch.num_tokens, NOT_JUDGED, dtype=np.uint8)
    for masked, blocked_PN in zip(slices, blocked, strict=True):
        judged_N = masked.judged_N
        level_T[masked.gaps.index_N[judged_N]] = blocked_PN.sum(axis=0)[judged_N]
    return Judged(algorithm.name, sign, tuple(thresholds for _, thresholds in positions), published, level_T)
