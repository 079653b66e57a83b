"""What `diagnose` gathers is the same however a trace is cut, and whichever limits were known."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mismatch_cli.diagnosis.alignment import HeadCollector
from mismatch_cli.diagnosis.counts import ImprobableCopies
from mismatch_cli.diagnosis.evidence import EvidenceCollector, HashLimits
from mismatch_cli.diagnosis.sample import SampleCollector
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.trace.reader import table_to_batch
from tests.diagnosis.conftest import healthy, whole

TRIALS = 20


@pytest.fixture(scope="module")
def table() -> pa.Table:
    """Every third response is used twice, with different log-probabilities; some are copied
    under another key.
    """
    pool = healthy("fp8-kv")[1]
    again, copied = whole(pool), whole(pool)
    again.rows["epoch"] = again.rows["epoch"] + 1
    again.tokens["logp_trainer"] = np.minimum(again.tokens["logp_trainer"] - np.float32(0.01), 0)
    copied.rows["prompt_id"] = copied.rows["prompt_id"] + 10_000
    thirds = np.arange(0, len(again.table()), 3)
    return pa.concat_tables(
        [pool.table(), again.table().take(thirds), copied.table().take(thirds[::2])]
    )


def gathering(limits: HashLimits, tokens: int, responses: int) -> EvidenceCollector:
    """With room for so many tokens and responses."""
    collector = EvidenceCollector(PAIRS["mismatch"], limits)
    collector.sample = SampleCollector(collector.pair, tokens, limits.sample)
    collector.heads = HeadCollector(collector.pair, responses, limits.heads)
    collector.copies = ImprobableCopies(responses, limits.copies)
    return collector


def held(collector: EvidenceCollector) -> dict[str, Any]:
    """Everything that a check could see."""
    counts, sides = collector.counts, collector.own_columns.sides.keys()
    return {
        "sample": vars(collector.sample.result()),
        "heads": vars(collector.heads.result()),
        "copies": collector.copies.count(),
        "counts": (counts.responses, counts.out_of_support, list(sides), repr(counts.sides)),
        "lattice": collector.lattice.counts,
    }


def cuts(table: pa.Table, most: int, rng: np.random.Generator) -> Iterator[pa.Table]:
    bounds = np.unique([0, len(table), *rng.integers(0, len(table), rng.integers(1, most))])
    for first, end in pairwise(bounds.tolist()):
        yield table.slice(first, end - first).combine_chunks()


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["nothing", "limits"])
def test_any_sharding_gives_the_same(table, prior):
    """Portions of several tables, merged in order; some know the limits of an earlier merge."""
    for seed in range(TRIALS):
        check(table, np.random.default_rng(seed), knows=prior == "limits")


def check(table: pa.Table, rng: np.random.Generator, *, knows: bool) -> None:
    rows = table.take(rng.permutation(len(table))[:120])
    bounds = int(rng.integers(100, 900)), int(rng.integers(2, 30))
    expected, merged = gathering(HashLimits(), *bounds), gathering(HashLimits(), *bounds)
    earlier_limits = [HashLimits()]
    for portion in cuts(rows, 20, rng):
        limits = HashLimits()
        # A worker may start from what others have dropped up to four portions before
        if knows:
            age = 1 + int(rng.integers(0, 4))
            limits = earlier_limits[max(0, len(earlier_limits) - age)]
        piece = gathering(limits, *bounds)
        for part in cuts(portion, 6, rng):
            piece.update(part, table_to_batch(part))
        expected.update(portion, table_to_batch(portion))
        merged.merge(piece)
        earlier_limits.append(merged.limits)
        np.testing.assert_equal(held(merged), held(expected))
    # Something was dropped
    assert earlier_limits[-1].sample < 2**64 and earlier_limits[-1].copies < 2**64
