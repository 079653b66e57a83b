"""Explores two runs together: on the same tokens, or on other samples of the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mismatch_cli.metrics.clipping.masked_slice import Needs
from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.studies.exploration.explore import explore
from mismatch_cli.studies.exploration.explored import Exploration
from mismatch_cli.studies.exploration.explored_rows import ExploredRows
from mismatch_cli.studies.pairing import (
    OURS,
    THEIRS,
    Pairing,
    PartnerJoin,
    Partners,
    TraceResponses,
)
from mismatch_cli.trace.foreign_values import single
from mismatch_cli.trace.reader import Trace

_NO_NEEDS = Needs(advantages=False, recomputed=False, top_k=0)


def explore_two(
    pair: Pair,
    traces: Sequence[Trace],
    responses: Sequence[TraceResponses],
    kept: Sequence[np.ndarray],
    pairing: Pairing,
    on_responses: Callable[[int], None],
) -> Exploration | None:
    """The `kept` responses of two traces (bool, in file order); None if they are not paired.

    Paired by tokens, they are those of the first trace, with the log-probabilities of both.
    """
    if pairing.by == "tokens":
        partners = Partners.of(traces[1], np.where(kept[0], pairing.partner_S, -1))
        rows = [ExploredRows(kept[0], PartnerJoin(pair, partners))]
        pair_a, pair_b = (
            replace(pair, reference=side.reference, current=side.current) for side in (OURS, THEIRS)
        )
        explored = partial(explore, traces[:1], pair_a, pair_b=pair_b)
    elif pairing.by == "prompts":
        number_S = _prompt_numbers(traces, responses, kept)
        rows = [
            ExploredRows(kept_S, RenumberedPrompts(numbers))
            for kept_S, numbers in zip(kept, number_S, strict=True)
        ]
        explored = partial(explore, traces, pair)
    else:
        return None
    return explored((), _NO_NEEDS, {}, rows=rows, on_responses=on_responses)


@dataclass(frozen=True)
class RenumberedPrompts:
    """Replaces the prompt ids of batches."""

    number_S: np.ndarray  # int64, of each response of the trace

    def __call__(self, batch: TokenBatch, rows: np.ndarray) -> TokenBatch:
        return replace(batch, prompt_id_S=self.number_S[rows])


def _prompt_numbers(
    traces: Sequence[Trace], responses: Sequence[TraceResponses], kept: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The prompt id of each response; where ids do not identify the kept prompts in both traces,
    a running number in the first trace's order instead.
    """
    id_S = [_prompt_ids(trace) for trace in traces]
    hash_S = [each.prompt_S for each in responses]
    kept_id_S, kept_hash_S = (
        np.concatenate([column_S[kept_S] for column_S, kept_S in zip(columns, kept, strict=True)])
        for columns in (id_S, hash_S)
    )
    hashes, first, number_S = np.unique(kept_hash_S, return_index=True, return_inverse=True)
    identities = np.unique(np.stack([kept_id_S, number_S]), axis=1).shape[1]
    if identities == len(hashes) == len(np.unique(kept_id_S)):
        return id_S
    rank = np.argsort(np.argsort(first))
    # Responses that are not kept get any number
    return [rank[np.searchsorted(hashes[:-1], each_S)] for each_S in hash_S]


def _prompt_ids(trace: Trace) -> np.ndarray:
    columns = (single(table.column("prompt_id")) for table in trace.tables(["prompt_id"]))
    return np.concatenate([np.from_dlpack(column) for column in columns])
