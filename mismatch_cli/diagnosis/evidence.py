"""What the checks see: the sample, the counts of the whole trace, and what the manifest says about the sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.batch import TokenBatch
from mismatch_cli.diagnosis.alignment import Alignment, align
from mismatch_cli.diagnosis.counts import Counts
from mismatch_cli.diagnosis.sample import Sample, SampleCollector
from mismatch_cli.errors import MismatchError
from mismatch_cli.metrics.gaps import token_gaps
from mismatch_cli.metrics.lattice import Lattice
from mismatch_cli.metrics.pairs import PAIRS, Pair, pairs_in
from mismatch_cli.trace.columns import table_to_batch
from mismatch_cli.trace.reader import Trace


@dataclass(frozen=True)
class Evidence:
    """One trace, or several pooled ones, as the checks see it."""

    pair: Pair
    sample: Sample
    counts: Counts
    lattice: Lattice
    sampling: Mapping[str, Any] = field(default_factory=dict)  # of the manifest; empty where it does not say
    earlier_logp_T: np.ndarray | None = None  # log π of the sample's tokens at an earlier checkpoint; NaN = not scored

    @cached_property
    def alignment(self) -> Alignment:
        return align(self.sample)

    @property
    def temperature(self) -> float:
        return float(self.sampling.get("temperature", 1.0))

    def without_tokens(self, drop_T: np.ndarray) -> Evidence:
        """The same with some tokens of the sample not counting."""
        return replace(self, sample=self.sample.without_tokens(drop_T))


def gather(traces: Sequence[Trace], on_responses: Callable[[int], None] = lambda _: None) -> Evidence:
    """Read traces once, in memory that does not depend on their length."""
    pair = PAIRS[pairs_in(traces)[0]]
    sampling = traces[0].manifest.get("config", {}).get("sampling") or {}
    evidence = gather_tables((table for trace in traces for table in trace.tables()), pair, sampling, on_responses)
    if not evidence.sample.counts_T.any():
        raise MismatchError(
            f"{traces[0].folder} holds no token with log-probabilities of both sides. "
            f"Score it first: mismatch-cli rescore {traces[0].run_folder} --trainer-model MODEL"
        )
    return evidence


def gather_tables(
    tables: Iterable[pa.Table],
    pair: Pair,
    sampling: Mapping[str, Any],
    on_responses: Callable[[int], None] = lambda _: None,
) -> Evidence:
    """The same from tables in the columns of a trace."""
    collector, counts, lattice = SampleCollector(pair), Counts(), Lattice()
    for table in tables:
        batch = table_to_batch(table)
        if pair.measured_in(batch):
            counts.update(table, *_served(batch, pair))
            collector.update(batch)
            for gaps in token_gaps(batch, pair):
                lattice.update(gaps)
        on_responses(batch.num_responses)
    return Evidence(pair, collector.result(), counts, lattice, sampling)


def _served(batch: TokenBatch, pair: Pair) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    logq_T, logp_T = getattr(batch, pair.reference), getattr(batch, pair.current)
    return logq_T.numpy(), logp_T.numpy(), batch.loss_mask_T.numpy()
