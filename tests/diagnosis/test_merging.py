"""What `diagnose` gathers is the same however a trace is cut, and whichever limits were known."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from lab.pool import Pool
from mismatch_cli.base.places import bundled
from mismatch_cli.diagnosis.evidence import Gathering, Limits
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.trace.reader import Trace, table_to_batch
from tests.diagnosis.conftest import at_equal_weights, whole

TRIALS = 20


@pytest.fixture(scope="module")
def table() -> pa.Table:
    """Every third response is used twice, with different log-probabilities; some are copied
    under another key.
    """
    pool = Pool.of(at_equal_weights(Trace.open(bundled("traces") / "fp8-kv")))
    again, copied = whole(pool), whole(pool)
    again.rows["epoch"] = again.rows["epoch"] + 1
    again.tokens["logp_trainer"] = np.minimum(again.tokens["logp_trainer"] - 0.01, 0).astype(
        np.float32
    )
    copied.rows["prompt_id"] = copied.rows["prompt_id"] + 10_000
    thirds = np.arange(0, len(again.table()), 3)
    return pa.concat_tables(
        [pool.table(), again.table().take(thirds), copied.table().take(thirds[::2])]
    )


def gathering(limits: Limits, tokens: int, responses: int) -> Gathering:
    found = Gathering(PAIRS["mismatch"], limits)
    found.sample._most_tokens, found.heads._most, found.copies._most = tokens, responses, responses
    return found


def held(found: Gathering) -> dict[str, Any]:
    """Everything that a check could see."""
    sample, heads = found.sample.result(), found.heads.result()
    return {
        **{f"sample {name}": value for name, value in vars(sample).items() if value is not None},
        **{f"heads {name}": value for name, value in vars(heads).items()},
        "copies": found.copies.count(),
        "counts": repr(
            [found.counts.responses, found.counts.out_of_support, found.own_columns.sides.keys()]
        ),
        "sides": repr(found.counts.sides),
        "lattice": found.lattice.counts,
    }


def cuts(length: int, most: int, rng: np.random.Generator) -> Iterator[slice]:
    bounds = np.unique([0, length, *rng.integers(0, length, rng.integers(1, most))]).tolist()
    return (slice(*pair) for pair in pairwise(bounds))


@pytest.mark.slow
@pytest.mark.parametrize("known", ["nothing", "limits"])
def test_any_sharding_gives_the_same(table, known):
    """Portions of several tables, merged in order; some know the limits of an earlier merge."""
    for seed in range(TRIALS):
        check(table, np.random.default_rng(seed), knows=known == "limits")


def check(table: pa.Table, rng: np.random.Generator, *, knows: bool) -> None:
    rows, bounds = (
        table.take(rng.permutation(len(table))[:120]),
        (int(rng.integers(100, 900)), int(rng.integers(2, 30))),
    )
    expected, found, known = gathering(Limits(), *bounds), gathering(Limits(), *bounds), [Limits()]
    for portion in cuts(len(rows), 20, rng):
        piece = gathering(
            known[max(0, len(known) - 1 - int(rng.integers(0, 4)))] if knows else Limits(), *bounds
        )
        inner = rows.slice(portion.start, portion.stop - portion.start)
        for part in cuts(len(inner), 6, rng):
            piece.update(*_read(inner, part))
        expected.update(*_read(inner, slice(0, len(inner))))
        found.merge(piece)
        known.append(found.limits)
        one, other = held(expected), held(found)
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_array_equal(other[name], value, err_msg=name)
    assert known[-1].sample < 2**64 and known[-1].copies < 2**64  # something was dropped


def _read(table: pa.Table, rows: slice) -> tuple[pa.Table, Any]:
    part = table.slice(rows.start, rows.stop - rows.start).combine_chunks()
    return part, table_to_batch(part)
