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
        words: dict[int, str] = {}
        for group in trace.row_groups():
            columns = (
                {"trace": pa.array(np.full(group.batch.num_tokens, number, np.int32))}
                if len(traces) > 1
                else {}
            )
            columns |= _keys(group, trace, words) | {
                name: _recorded(group.batch, name) for name in recorded
            }
            for names, pair in gaps:
                columns |= _gap(group.batch, pair, names)
            flags = _blocked(group.batch, question, number) if question else {}
            yield pa.table(columns | {_BLOCKED + name: flags_T for name, flags_T in flags.items()})


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
            yield pa.table(_blocked(batch, question, number))


def _gaps_in(traces: Sequence[Trace], measured: set[str]) -> list[tuple[dict[str, str], Pair]]:
    """The pairs, each with the names of its columns by content."""
    if "logp_trainer" not in measured:
        return []
    names = ["d", "ratio", "tv_binary", "kl_binary", "k3"]
    found = [(dict(zip(names, names, strict=True)), PAIRS["total"])]
    if "topk_logp_trainer" in measured:
        found[0][0].update(zip(_TOPK, _TOPK, strict=True))
    pairs = pairs_in(traces)
    others = [name for name in pairs if name != "total"] if "total" in pairs else []
    return found + [({name: f"{name}_{pair}" for name in names}, PAIRS[pair]) for pair in others]


def _keys(group: RowGroup, trace: Trace, words: dict[int, str]) -> _Columns:
    batch, lengths_S = group.batch, np.diff(group.batch.offset_S1)
    rows_S = {name: np.from_dlpack(single(group.table.column(name))) for name in ROW_KEY}
    rows_S |= {"truncated": batch.truncated_S}
    rows_S |= {
        "reward": np.full(len(lengths_S), np.nan, np.float32)
        if batch.reward_S is None
        else batch.reward_S
    }
    return {
        **{name: _array(np.repeat(values_S, lengths_S)) for name, values_S in rows_S.items()},
        "position": pa.array(
            np.arange(batch.num_tokens) - np.repeat(batch.offset_S1[:-1], lengths_S)
        ),
        **_tokens(batch, trace, words),
        "turn": _turn(batch),
    }


def _tokens(batch: TokenBatch, trace: Trace, words: dict[int, str]) -> _Columns:
    """The ids and texts of all tokens; null in a trace without ids."""
    if batch.response_ids_T is None:
        ids = pa.nulls(batch.num_tokens, pa.int32())
        return {"token_id": ids, "token": pa.nulls(batch.num_tokens, pa.string())}
    ids, place_T = np.unique(batch.response_ids_T, return_inverse=True)
    for token_id in ids.tolist():
        if token_id not in words:
            words[token_id] = visible(trace.vocabulary.decode([token_id]))
    # Many ids may have one text
    texts = pa.array([words[token_id] for token_id in ids.tolist()], pa.string())
    return {
        "token_id": pa.array(batch.response_ids_T),
        "token": texts.dictionary_encode().take(pa.array(place_T)),
    }


def _turn(batch: TokenBatch) -> pa.Array:
    """The turn, from 1 in each response; 0 outside the loss."""
    offset_S1, mask_T = batch.offset_S1, batch.loss_mask_T
    begun = np.concatenate([[0], np.cumsum(turns_begin(mask_T, offset_S1))])
    before_T = np.repeat(begun[offset_S1[:-1]], np.diff(offset_S1))
    return pa.array(np.where(mask_T, begun[1:] - before_T, 0).astype(np.int32))


def _recorded(batch: TokenBatch, name: str) -> pa.Array:
    column_T = getattr(batch, f"{name}_T")
    return pa.nulls(batch.num_tokens, COLUMNS[name].value) if column_T is None else _array(column_T)


def _gap(batch: TokenBatch, pair: Pair, names: Mapping[str, str]) -> _Columns:
    columns = {name: np.full(batch.num_tokens, np.nan, np.float32) for name in names}
    if pair.measured_in(batch):
        for gaps in token_gaps(batch, pair):
            for name, values_N in _values(gaps, names).items():
                columns[name][gaps.index_N] = values_N
    return {names[name]: _array(column_T) for name, column_T in columns.items()}


def _values(gaps: TokenGaps, names: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Values of the tokens that count; outside the current policy's support d is −∞, and KL and
    k3 are +∞.
    """
    values = {"d": gaps.d_N, "ratio": gaps.ratio_N, "tv_binary": gaps.abs_dp_N}
    values |= {"kl_binary": gaps.binary_kl_N, "k3": gaps.k3_N}
    if (outside_N := gaps.out_of_support_N) is not None:
        for name, infinite in (("d", -np.inf), ("kl_binary", np.inf), ("k3", np.inf)):
            values[name] = np.where(outside_N, np.float32(infinite), values[name])
    if "tv_topk" in names and (topk := gaps.topk) is not None:
        parts = ((topk.tv_N, topk.tv_counts_N), (topk.kl_N, topk.kl_counts_N))
        values |= {
            name: value_N if counts_N is None else np.where(counts_N, value_N, np.float32(np.nan))
            for name, (value_N, counts_N) in zip(_TOPK, parts, strict=True)
        }
    return values


def _blocked(batch: TokenBatch, question: Question, trace: int) -> _Columns:
    needs, names = question.needs, [algorithm.name for algorithm in question.algorithms]
    signs = [""] if needs.advantages else [f"_if_{sign}" for sign in SIGNS]
    blocked = np.zeros((len(signs), len(names), batch.num_tokens), dtype=bool)
    judged = np.zeros((len(signs), batch.num_tokens), dtype=bool)
    slices = (
        ()
        if needs.first_missing_in(batch)
        else apply_masks(batch, needs, question.algorithms, question.batch_values, trace)
    )
    for cases in slices:
        for place, masked in enumerate(cases):
            index_N = masked.gaps.index_N
            judged[place, index_N[masked.judged_N]] = True
            for row, index_U in enumerate(masked.blocked):
                blocked[place, row, index_N[index_U]] = True
    return {
        name + sign: pa.array(blocked[place, row], mask=~judged[place])
        for row, name in enumerate(names)
        for place, sign in enumerate(signs)
    }


def _array(values: np.ndarray) -> pa.Array:
    return pa.array(values, from_pandas=True)  # NaN is null
