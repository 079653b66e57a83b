"""Explores two runs together: on the same tokens, or on other samples of the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from mismatch_cli.metrics.clipping.masked_slice import Needs
from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.studies.exploration.explore import explore
from mismatch_cli.studies.exploration.explored import Exploration
from mismatch_cli.studies.exploration.explored_rows import ExploredRows
from mismatch_cli.studies.pairing import Pairing, TraceResponses
from mismatch_cli.studies.shared_tokens import OURS, THEIRS, PartnerJoin, Partners
from mismatch_cli.trace.foreign_values import single
from mismatch_cli.trace.reader import Trace

_NO_NEEDS = Needs(advantages=False, recomputed=False, top_k=0)


class ComparedRun(NamedTuple):
    """A trace, and which of its responses are compared."""

    trace: Trace
    responses: TraceResponses
    compared_S: np.ndarray  # bool, in the order of the trace's files


def explore_two(
    pair: Pair, runs: Sequence[ComparedRun], pairing: Pairing, on_responses: Callable[[int], None]
) -> Exploration | None:
    """The compared responses of two runs; None if they are not paired.

    Paired by tokens, they are those of the first run, with the log-probabilities of both.
    """
    traces = [run.trace for run in runs]
    if pairing.by == "tokens":
        compared_S = runs[0].compared_S
        partners = Partners.of(traces[1], np.where(compared_S, pairing.partner_S, -1))
        return explore(
            traces[:1],
            replace(pair, reference=OURS.reference, current=OURS.current),
            (),
            _NO_NEEDS,
            {},
            rows=[ExploredRows(compared_S, PartnerJoin(pair, partners))],
            pair_b=replace(pair, reference=THEIRS.reference, current=THEIRS.current),
            on_responses=on_responses,
        )
    if pairing.by == "prompts":
        rows = []
        for run, number_S in zip(runs, _prompt_numbers(runs), strict=True):
            rows.append(ExploredRows(run.compared_S, RenumberedPrompts(number_S)))
        return explore(traces, pair, (), _NO_NEEDS, {}, rows=rows, on_responses=on_responses)
    return None


@dataclass(frozen=True)
class RenumberedPrompts:
    """Replaces the prompt ids of batches."""

    number_S: np.ndarray  # int64, of each response of the trace

    def __call__(self, batch: TokenBatch, rows: np.ndarray) -> TokenBatch:
        return replace(batch, prompt_id_S=self.number_S[rows])


def _prompt_numbers(runs: Sequence[ComparedRun]) -> list[np.ndarray]:
    """The prompt id of each response of each run; where ids do not identify the compared prompts
    in both, a running number in the first run's order instead.
    """
    ids = [_prompt_ids(run.trace) for run in runs]
    compared_id_S = _concatenate_compared(runs, ids)
    hashes = [run.responses.prompt_S for run in runs]
    compared_hash_S = _concatenate_compared(runs, hashes)
    hash_P, first_P, number_S = np.unique(compared_hash_S, return_index=True, return_inverse=True)
    # Ids identify prompts if there are as many pairs of an id and a prompt as of either.
    identities = np.unique(np.stack([compared_id_S, number_S]), axis=1).shape[1]
    if identities == len(hash_P) == len(np.unique(compared_id_S)):
        return ids
    rank_P = np.argsort(np.argsort(first_P))
    # Responses that are not compared get any number
    return [rank_P[np.searchsorted(hash_P[:-1], hash_S)] for hash_S in hashes]


def _concatenate_compared(runs: Sequence[ComparedRun], columns: Sequence[np.ndarray]) -> np.ndarray:
    """The values of the compared responses, one run after the other."""
    return np.concatenate(
        [column_S[run.compared_S] for run, column_S in zip(runs, columns, strict=True)]
    )


def _prompt_ids(trace: Trace) -> np.ndarray:
    columns = (single(table.column("prompt_id")) for table in trace.tables(["prompt_id"]))
    return np.concatenate(list(map(np.from_dlpack, columns)))
