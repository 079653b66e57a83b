"""Bit-pattern bins: every value between the edges of its bin, quantiles against exact ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch_cli.base.hashing import GROUPS
from mismatch_cli.metrics.histograms import (
    LogBins,
    SignedLogBins,
    bin_centres,
    quantiles,
    without_each_group,
)
from mismatch_cli.metrics.volatility import D_BINS, TV_BINS

BINS = LogBins(-24, 7)
SIGNED = SignedLogBins(BINS)


@given(st.floats(-300, 300, width=32))
def test_a_value_is_between_the_edges_of_its_bin(x: float) -> None:
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
        assert low[signed] <= x <= high[signed]
        assert high[signed] - low[signed] <= abs(x) / 32


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
    quantile = quantiles(signed, SIGNED.edges, shares)
    np.testing.assert_allclose(quantile, exact, rtol=5e-3, atol=max(scale * 1e-3, 6e-8))
    folded = SIGNED.fold(signed)
    assert folded.sum() == len(x)
    np.testing.assert_array_equal(folded, np.bincount(BINS.index(x), minlength=BINS.count))
    np.testing.assert_allclose(
        quantiles(folded, BINS.edges, shares), np.quantile(np.abs(x), shares), rtol=5e-3, atol=6e-8
    )


def test_quantiles_of_empty_counts_and_of_zeros() -> None:
    assert np.isnan(quantiles(np.zeros(BINS.count, dtype=int), BINS.edges, [0.5])).all()
    zeros = np.bincount(SIGNED.index(np.zeros(10, dtype=np.float32)), minlength=SIGNED.count)
    assert quantiles(zeros, SIGNED.edges, [0.01, 0.99]).tolist() == [0, 0]


def test_without_each_group() -> None:
    counts = np.zeros((GROUPS, 2), dtype=int)
    counts[3], counts[7] = [1, 2], [10, 20]
    assert without_each_group(counts).tolist() == [[10, 20], [1, 2]]


def _some_values(rng: np.random.Generator, kind: str, count: int) -> np.ndarray:
    scale = 10 ** rng.uniform(-4, 0.3)
    drawn = {
        "normal": lambda: rng.normal(size=count),
        "heavy": lambda: rng.standard_t(2, count),
        "exponential": lambda: rng.exponential(size=count),
        "two scales": lambda: rng.normal(size=count) * np.where(rng.random(count) < 0.03, 50, 1),
        "atoms": lambda: rng.choice([-1.0, 0.0625, 0.3, 1.0], count),
        "one value": lambda: np.full(count, rng.normal()),
        "mostly zero": lambda: np.where(rng.random(count) < 0.7, 0.0, rng.normal(size=count)),
        "lattice": lambda: np.round(rng.normal(size=count) * 8) / 16 / scale,
    }
    x = (scale * drawn[kind]()).astype(np.float32)
    # bfloat16
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) if rng.random() < 0.3 else x


KINDS = (
    "normal",
    "heavy",
    "exponential",
    "two scales",
    "atoms",
    "one value",
    "mostly zero",
    "lattice",
)


@given(st.sampled_from(KINDS), st.integers(1, 3000), st.integers(0, 2**32 - 1))
def test_quantiles_are_numpy_s_within_0_3_percent(kind: str, count: int, seed: int) -> None:
    """For |d|, TV below 1, and ratios up to e^±8; of any shape, with ties, and for a single
    value.
    """
    x = np.clip(_some_values(np.random.default_rng(seed), kind, count), -7.9, 7.9)
    shares = [0.01, 0.05, 0.5, 0.95, 0.99]
    signed = np.bincount(D_BINS.index(x), minlength=D_BINS.count)
    quantile = quantiles(D_BINS.fold(signed), bin_centres(D_BINS.positive), shares)
    np.testing.assert_allclose(quantile, np.quantile(np.abs(x), shares), rtol=1e-3, atol=1e-7)
    ratio = quantiles(signed, tuple(np.exp(end) for end in bin_centres(D_BINS)), shares)
    np.testing.assert_allclose(ratio, np.quantile(np.exp(x.astype(np.float64)), shares), rtol=3e-3)
    tv = np.abs(x[np.abs(x) < 1])
    if len(tv):
        binned = np.bincount(TV_BINS.index(tv), minlength=TV_BINS.count)
        np.testing.assert_allclose(
            quantiles(binned, bin_centres(TV_BINS), shares),
            np.quantile(tv, shares),
            rtol=2e-3,
            atol=2e-9,
        )
