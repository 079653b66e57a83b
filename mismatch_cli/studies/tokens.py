"""Traces token by token, as a table per row group: what was recorded, metrics of it, and what
algorithms block.

Both `report --export` and the library read these tables, in the memory of one row group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from mismatch_cli.base.text import visible
from mismatch_cli.metrics.clipping.clipping_summary import Question
from mismatch_cli.metrics.clipping.masked_slice import SIGNS, apply_masks
from mismatch_cli.metrics.gaps import TokenGaps, token_gaps, turns_begin
from mismatch_cli.metrics.pairs import PAIRS, Pair, pairs_in
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.studies.algorithm_support import Support
from mismatch_cli.studies.clipping import collect_first_pass, columns_for
from mismatch_cli.trace.columns import COLUMNS, ROW_KEY, TOKEN_COLUMNS
from mismatch_cli.trace.foreign_values import single
from mismatch_cli.trace.reader import RowGroup, Trace

_BLOCKED = "blocked_"  # before the name of an algorithm
_TOPK = ("tv_topk", "kl_topk")
_Columns = dict[str, pa.Array]


def number_of_tokens(traces: Sequence[Trace]) -> int:
    """The total number of rows of the tables, from the shards' footers."""
    return sum(trace.footers[path].tokens for trace in traces for path in trace.shards)


def token_tables(traces: Sequence[Trace]) -> Iterator[pa.Table]:
    """A row per token: keys, text, every token column of any trace, the gap, and what the paper's
    two algorithms block.

    The gap is between trainer and rollout, as masks see it: `d` = log π − log μ (nats), `ratio` =
    π/μ, `tv_binary` = |π − μ|, `kl_binary`, `k3` = r − 1 − d, and `tv_topk`, `kl_topk` if the trace
    has the trainer's top K. If mismatch and staleness can be separated, each has its own columns,
    such as `d_mismatch`. Null means not measured, or the gap of a token that does not count.
    """
    question = _of_paper(traces)
    measured = set[str]().union(*(trace.columns() for trace in traces))
    recorded = [name for name in TOKEN_COLUMNS if name in measured and name != "response_ids"]
    gaps = _gaps_in(traces, measured)
    for number, trace in enumerate(traces):
        texts: dict[int, str] = {}  # of the trace's tokens so far, by id
        for group in trace.row_groups():
            batch = group.batch
            columns: _Columns = {}
            if len(traces) > 1:
                columns["trace"] = pa.array(np.full(batch.num_tokens, number, np.int32))
            columns |= _key_columns(group, trace, texts)
            for name in recorded:
                columns[name] = _recorded_column(batch, name)
            for names, pair in gaps:
                columns |= _gap_columns(batch, pair, names)
            if question is not None:
                for name, flags in _blocked_columns(batch, question, number).items():
                    columns[f"{_BLOCKED}{name}"] = flags
            yield pa.table(columns)


def _of_paper(traces: Sequence[Trace]) -> Question | None:
    """What the paper's two algorithms block; None if neither can judge the traces."""
    support = Support.of_paper(traces)
    if support is None:
        return None
    return Question(support.judged, support.needs, batch_values=collect_first_pass(traces, support))


def blocked_tables(traces: Sequence[Trace], question: Question) -> Iterator[pa.Table]:
    """Rows of `token_tables` with a column per algorithm of a question that `analyse_clipping` has
    asked of these traces: whether it blocks the token, null if not judged.

    Without advantages each has two columns, `NAME_if_positive` and `NAME_if_negative`.
    """
    columns = columns_for(question.needs)
    for number, trace in enumerate(traces):
        for batch in trace.batches(columns):
            yield pa.table(_blocked_columns(batch, question, number))


def _gaps_in(traces: Sequence[Trace], measured: set[str]) -> list[tuple[dict[str, str], Pair]]:
    """The pairs, each with the names of its columns by content."""
    if "logp_trainer" not in measured:
        return []
    contents = ["d", "ratio", "tv_binary", "kl_binary", "k3"]
    of_total = [*contents, *_TOPK] if "topk_logp_trainer" in measured else contents
    gaps = [({name: name for name in of_total}, PAIRS["total"])]
    pairs = pairs_in(traces)
    # Without a total, the only pair is the gap itself, whose columns are there already.
    if "total" in pairs:
        for pair in pairs:
            if pair != "total":
                gaps.append(({name: f"{name}_{pair}" for name in contents}, PAIRS[pair]))
    return gaps


def _key_columns(group: RowGroup, trace: Trace, texts: dict[int, str]) -> _Columns:
    """What says which token of which response it is; `texts` are those of earlier row groups, and
    grow.
    """
    batch = group.batch
    lengths_S = np.diff(batch.offset_S1)
    rows_S = {name: np.from_dlpack(single(group.table.column(name))) for name in ROW_KEY}
    rows_S["truncated"] = batch.truncated_S
    rows_S["reward"] = np.full(len(lengths_S), np.nan, np.float32)
    if batch.reward_S is not None:
        rows_S["reward"] = batch.reward_S
    position_T = np.arange(batch.num_tokens) - np.repeat(batch.offset_S1[:-1], lengths_S)
    return {
        **{name: _array(np.repeat(values_S, lengths_S)) for name, values_S in rows_S.items()},
        "position": pa.array(position_T),
        **_token_columns(batch, trace, texts),
        "turn": _turn_column(batch),
    }


def _token_columns(batch: TokenBatch, trace: Trace, texts: dict[int, str]) -> _Columns:
    """The ids and texts of all tokens; null in a trace without ids."""
    if batch.response_ids_T is None:
        return {
            "token_id": pa.nulls(batch.num_tokens, pa.int32()),
            "token": pa.nulls(batch.num_tokens, pa.string()),
        }
    ids, index_T = np.unique(batch.response_ids_T, return_inverse=True)
    for token_id in ids.tolist():
        if token_id not in texts:
            texts[token_id] = visible(trace.vocabulary.decode([token_id]))
    distinct = pa.array([texts[token_id] for token_id in ids.tolist()], pa.string())
    # Several ids may have the same text, and a dictionary holds each text only once.
    return {
        "token_id": pa.array(batch.response_ids_T),
        "token": distinct.dictionary_encode().take(pa.array(index_T)),
    }


def _turn_column(batch: TokenBatch) -> pa.Array:
    """The turn, from 1 in each response; 0 outside the loss."""
    offset_S1 = batch.offset_S1
    mask_T = batch.loss_mask_T
    # Turns are counted through the batch, and those of earlier responses are subtracted.
    begun = np.concatenate([[0], np.cumsum(turns_begin(mask_T, offset_S1))])
    before_T = np.repeat(begun[offset_S1[:-1]], np.diff(offset_S1))
    return pa.array(np.where(mask_T, begun[1:] - before_T, 0).astype(np.int32))


def _recorded_column(batch: TokenBatch, name: str) -> pa.Array:
    column_T = getattr(batch, f"{name}_T")
    if column_T is None:
        return pa.nulls(batch.num_tokens, COLUMNS[name].value)
    return _array(column_T)


def _gap_columns(batch: TokenBatch, pair: Pair, names: Mapping[str, str]) -> _Columns:
    """The gap between two policies, under these names by content; null for tokens that do not
    count.
    """
    columns = {name: np.full(batch.num_tokens, np.nan, np.float32) for name in names}
    if pair.measured_in(batch):
        for gaps in token_gaps(batch, pair):
            for name, values_N in _gap_values(gaps, names).items():
                columns[name][gaps.index_N] = values_N
    return {names[name]: _array(column_T) for name, column_T in columns.items()}


def _gap_values(gaps: TokenGaps, names: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Values of the tokens that count; outside the current policy's support d is −∞, and KL and
    k3 are +∞.
    """
    values = {"d": gaps.d_N, "ratio": gaps.ratio_N, "tv_binary": gaps.abs_dp_N}
    values |= {"kl_binary": gaps.binary_kl_N, "k3": gaps.k3_N}
    outside_N = gaps.out_of_support_N
    if outside_N is not None:
        for name, infinite in (("d", -np.inf), ("kl_binary", np.inf), ("k3", np.inf)):
            values[name] = np.where(outside_N, np.float32(infinite), values[name])
    topk = gaps.topk
    if "tv_topk" in names and topk is not None:
        values["tv_topk"] = _where_counted(topk.tv_N, topk.tv_counts_N)
        values["kl_topk"] = _where_counted(topk.kl_N, topk.kl_counts_N)
    return values


def _where_counted(value_N: np.ndarray, counts_N: np.ndarray | None) -> np.ndarray:
    """The values of the tokens that count, by default all; NaN elsewhere."""
    if counts_N is None:
        return value_N
    return np.where(counts_N, value_N, np.float32(np.nan))


def _blocked_columns(batch: TokenBatch, question: Question, trace: int) -> _Columns:
    """Whether each algorithm blocks a token, by its name, and without advantages by both signs;
    null where it does not judge.
    """
    needs = question.needs
    cases = [""] if needs.advantages else [f"_if_{sign}" for sign in SIGNS]
    blocked_CAT = np.zeros((len(cases), len(question.algorithms), batch.num_tokens), dtype=bool)
    judged_CT = np.zeros((len(cases), batch.num_tokens), dtype=bool)
    if not needs.first_missing_in(batch):
        for masks in apply_masks(batch, needs, question.algorithms, question.batch_values, trace):
            for judged_T, blocked_AT, masked in zip(judged_CT, blocked_CAT, masks, strict=True):
                index_N = masked.gaps.index_N
                judged_T[index_N[masked.judged_N]] = True
                for blocked_T, index_U in zip(blocked_AT, masked.blocked, strict=True):
                    blocked_T[index_N[index_U]] = True
    columns = {}
    for row, algorithm in enumerate(question.algorithms):
        for case, judged_T, blocked_AT in zip(cases, judged_CT, blocked_CAT, strict=True):
            columns[f"{algorithm.name}{case}"] = pa.array(blocked_AT[row], mask=~judged_T)
    return columns


def _array(values: np.ndarray) -> pa.Array:
    return pa.array(values, from_pandas=True)  # NaN is null
