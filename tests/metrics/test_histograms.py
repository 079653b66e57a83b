"""Bit-pattern bins: every value between the edges of its bin, quantiles against exact ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch_cli.metrics.histograms import LogBins, SignedLogBins, quantiles, without_each_group

BINS = LogBins(-24, 7)
SIGNED = SignedLogBins(BINS)


@given(st.floats(-300, 300, width=32))
def test_a_value_lies_between_the_edges_of_its_bin(x: float) -> None:
    value = np.array([x], dtype=np.float32)
    low, high = BINS.edges
    index = int(BINS.index(value)[0])
    if abs(x) < 2.0**-24:
        assert index == 0
    elif abs(x) >= 128:
        assert index == BINS.count - 1
    else:
        assert low[index] <= abs(x) < high[index]
        assert high[index] / low[index] <= 33 / 32
    low, high = SIGNED.edges
    signed = int(SIGNED.index(value)[0])
    if 2.0**-24 <= abs(x) < 128:
        assert min(abs(low[signed]), abs(high[signed])) <= abs(x) <= max(abs(low[signed]), abs(high[signed]))
        assert np.sign(low[signed] + high[signed]) == np.sign(x)


def test_signed_bins_ascend_and_mirror() -> None:
    low, high = SIGNED.edges
    assert (np.diff(low) >= 0).all() and (high >= low).all()
    np.testing.assert_array_equal(low, -high[::-1])
    assert BINS.index(np.array([np.inf], dtype=np.float32))[0] == BINS.count - 1
    assert SIGNED.index(np.array([-np.inf], dtype=np.float32))[0] == 0
    assert SIGNED.index(np.array([-0.0], dtype=np.float32))[0] == SIGNED.count // 2


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.1, 3.0])
def test_quantiles_are_within_a_fraction_of_a_bin(scale: float) -> None:
    x = (np.random.default_rng(0).standard_t(3, 50_000) * scale).astype(np.float32)
    shares = [0.01, 0.05, 0.3, 0.5, 0.95, 0.99]
    signed = np.bincount(SIGNED.index(x), minlength=SIGNED.count)
    exact = np.quantile(x, shares)
    found = quantiles(signed, SIGNED.edges, shares)
    np.testing.assert_allclose(found, exact, rtol=5e-3, atol=max(scale * 1e-3, 6e-8))
    folded = SIGNED.fold(signed)
    assert folded.sum() == len(x)
    np.testing.assert_array_equal(folded, np.bincount(BINS.index(x), minlength=BINS.count))
    np.testing.assert_allclose(
        quantiles(folded, BINS.edges, shares), np.quantile(np.abs(x), shares), rtol=5e-3, atol=6e-8
    )


def test_quantiles_of_nothing_and_of_zeros() -> None:
    assert np.isnan(quantiles(np.zeros(BINS.count, dtype=int), BINS.edges, [0.5])).all()
    zeros = np.bincount(SIGNED.index(np.zeros(10, dtype=np.float32)), minlength=SIGNED.count)
    assert quantiles(zeros, SIGNED.edges, [0.01, 0.99]).tolist() == [0, 0]


def test_without_each_group() -> None:
    counts = np.zeros((32, 2), dtype=int)
    counts[3], counts[7] = [1, 2], [10, 20]
    assert without_each_group(counts).tolist() == [[10, 20], [1, 2]]
