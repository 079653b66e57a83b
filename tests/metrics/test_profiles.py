"""Profiles by position and by length, and the rank correlation, against plain loops."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mismatch_cli.metrics.correlation import SAMPLE_TOKENS, SampledSpearman
from mismatch_cli.metrics.gaps import token_gaps
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.metrics.summary import MismatchSummary


def _octave(distance: int) -> int:
    return distance.bit_length()


def test_positions_against_a_loop(random_batch) -> None:
    batch = random_batch(5, responses=50, longest=90)
    summary = MismatchSummary(PAIRS["mismatch"])
    summary.update(batch)
    result = summary.result()
    d = (batch.logp_recomputed_T - batch.logp_rollout_T).astype(np.float64)
    expected: dict[str, dict[int, list[float]]] = {"positions": {}, "from_end": {}}
    offsets = batch.offset_S1.tolist()
    for first, end in pairwise(offsets):
        for token in range(first, end):
            expected["positions"].setdefault(_octave(token - first), []).append(d[token])
            expected["from_end"].setdefault(_octave(end - 1 - token), []).append(d[token])
    for direction, bins in expected.items():
        rows = {_octave(row["first"]): row for row in result[direction]}
        assert rows.keys() == bins.keys()
        for number, values in bins.items():
            assert rows[number]["tokens"] == len(values)
            assert rows[number]["d_mean"]["value"] == pytest.approx(np.mean(values), rel=1e-6, abs=1e-9)
            assert rows[number]["abs_d_mean"]["value"] == pytest.approx(np.mean(np.abs(values)), rel=1e-6)
            assert rows[number]["last"] == max(2 * rows[number]["first"] - 1, 0)


def test_lengths_and_slope(make_batch) -> None:
    """Σd = −0.002 per token and nothing else: −2 per 1000 tokens, at any length."""
    lengths = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 200]
    mu = [[-3.0] * n for n in lengths]
    pi = [[-3.002] * n for n in lengths]
    summary = MismatchSummary(PAIRS["mismatch"])
    summary.update(make_batch(mu, logp_recomputed=pi))
    result = summary.result()
    slope = result["metrics"]["sequence_slope"]
    assert slope["value"] == pytest.approx(-2, rel=1e-4)
    assert slope["low"] is None and "the same for all prompts" in slope["note"]
    rows = result["sequence"]["by_length"]
    assert [(row["first"], row["last"], row["sequences"]) for row in rows[:3]] == [(1, 1, 1), (2, 3, 2), (4, 7, 1)]
    assert rows[1]["d_sum_mean"]["value"] == pytest.approx(-0.005, rel=1e-3)
    assert rows[1]["d_sum_sd"]["value"] == pytest.approx(0.001, rel=1e-2)


def _ranks(x: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _spearman(random_batch, **options) -> tuple[float, np.ndarray, np.ndarray]:
    batch = random_batch(**options)
    accumulator = SampledSpearman()
    for gaps in token_gaps(batch, PAIRS["mismatch"]):
        accumulator.update(gaps)
    return accumulator.result(1).value, batch.logp_rollout_T, batch.logp_recomputed_T


@pytest.mark.parametrize("gap", [0.001, 0.05, 0.5, 2.0])
def test_spearman_is_exact_on_a_short_trace(random_batch, gap: float) -> None:
    found, q, p = _spearman(random_batch, seed=2, responses=200, longest=100, gap=gap)
    assert len(q) < SAMPLE_TOKENS
    assert found == pytest.approx(np.corrcoef(_ranks(q), _ranks(p))[0, 1], abs=1e-12)


def test_spearman_of_a_long_trace_is_that_of_a_sample(random_batch) -> None:
    found, q, p = _spearman(random_batch, seed=3, responses=1500, longest=100, gap=0.5)
    assert len(q) > 2 * SAMPLE_TOKENS
    assert found == pytest.approx(np.corrcoef(_ranks(q), _ranks(p))[0, 1], abs=0.01)
