"""Sums, extremes, quantiles and scans of responses, compared with numpy on each response, in
numpy and torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from mismatch_cli.base.arrays import Array
from mismatch_cli.rules.response_layout import ResponseLayout

INF = float("inf")
LENGTHS = [0, 3, 1, 0, 0, 7, 64, 2, 33, 0]  # scans double their step: 1, 2 … 64
EMPTY = [[], [0], [0, 0]]
WORLDS: list[Callable[[np.ndarray], Array]] = [np.asarray, torch.from_numpy]


def responses(lengths: list[int], as_array: Callable[[np.ndarray], Array]) -> ResponseLayout:
    return ResponseLayout(as_array(np.cumsum([0, *lengths])))


def drawn(dtype: type = np.float64) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.normal(size=length).astype(dtype) for length in LENGTHS]


def infinite() -> list[np.ndarray]:
    """Every second response contains infinities, of both signs if it is long enough."""
    parts = drawn()
    for part in parts[1::2]:
        part[len(part) // 2 :][:1] = -INF
        part[:1] = INF
    return parts


def each(
    parts: list[np.ndarray], function: Callable[[np.ndarray], float], empty: float = 0.0
) -> list[float]:
    return [function(part) if len(part) else empty for part in parts]


@pytest.mark.parametrize("as_array", WORLDS)
def test_positions_of_tokens(as_array: Callable[[np.ndarray], Array]) -> None:
    layout = responses(LENGTHS, as_array)
    assert layout.length_S.tolist() == LENGTHS
    assert layout.response_T.tolist() == [
        s for s, length in enumerate(LENGTHS) for _ in range(length)
    ]
    assert layout.position_T.tolist() == [t for length in LENGTHS for t in range(length)]
    assert layout.per_token(10 * layout.length_S).tolist() == [
        10 * n for n in LENGTHS for _ in range(n)
    ]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("as_array", WORLDS)
def test_reductions(as_array: Callable[[np.ndarray], Array], dtype: type) -> None:
    """Sums and means in float64, extremes in the dtype of the column."""
    layout, parts = responses(LENGTHS, as_array), drawn(dtype)
    x_T = as_array(np.concatenate(parts))
    exact = [part.astype(np.float64) for part in parts]
    for values, expected in (
        (layout.sum(x_T), each(exact, np.sum)),
        (layout.mean(x_T), each(exact, np.mean)),
    ):
        assert np.asarray(values).dtype == np.float64
        np.testing.assert_allclose(np.asarray(values), expected, rtol=1e-13, atol=1e-13)
    for values, expected in (
        (layout.largest(x_T), each(parts, np.max)),
        (layout.smallest(x_T), each(parts, np.min)),
    ):
        assert np.asarray(values).dtype == dtype and np.asarray(values).tolist() == expected


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("as_array", WORLDS)
def test_quantiles(as_array: Callable[[np.ndarray], Array], share: float) -> None:
    """Linear interpolation as in numpy and torch, also with equal values."""
    layout = responses(LENGTHS, as_array)
    for parts in (drawn(), [np.round(part) for part in drawn()]):
        values = layout.quantile(as_array(np.concatenate(parts)), share)
        expected = each(parts, lambda part: float(np.quantile(part, share)))
        np.testing.assert_allclose(np.asarray(values), expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("as_array", WORLDS)
def test_scans(as_array: Callable[[np.ndarray], Array], dtype: type) -> None:
    layout, parts = responses(LENGTHS, as_array), drawn(dtype)
    x_T = as_array(np.concatenate(parts))
    before = np.asarray(x_T).copy()
    sums = np.concatenate([np.cumsum(part.astype(np.float64)) for part in parts])
    assert np.asarray(layout.running_sum(x_T)).dtype == np.float64
    np.testing.assert_allclose(np.asarray(layout.running_sum(x_T)), sums, rtol=1e-13, atol=1e-13)
    smallest = np.concatenate([np.minimum.accumulate(part) for part in parts])
    assert np.asarray(layout.running_smallest(x_T)).dtype == dtype
    np.testing.assert_array_equal(np.asarray(layout.running_smallest(x_T)), smallest)
    np.testing.assert_array_equal(np.asarray(x_T), before)


def moved(part: np.ndarray, tokens: int, fill: float) -> list[float]:
    """The value `tokens` ahead; behind, if negative."""
    places = [t + tokens for t in range(len(part))]
    return [float(part[t]) if 0 <= t < len(part) else fill for t in places]


@pytest.mark.parametrize("tokens", [1, 2, 7, 63, 64, 109, 110, 500])
@pytest.mark.parametrize("as_array", WORLDS)
def test_ahead_and_behind(as_array: Callable[[np.ndarray], Array], tokens: int) -> None:
    """Never from another response, even if the offset is as long as all tokens."""
    assert sum(LENGTHS) == 110
    layout, parts = responses(LENGTHS, as_array), drawn()
    x_T = as_array(np.concatenate(parts))
    for function, step in ((layout.ahead, tokens), (layout.behind, -tokens)):
        values = function(x_T, tokens, -3.0)
        assert np.asarray(values).tolist() == [x for part in parts for x in moved(part, step, -3.0)]


@pytest.mark.parametrize("as_array", WORLDS)
def test_an_infinity_stays_in_its_response(as_array: Callable[[np.ndarray], Array]) -> None:
    """∞ − ∞ of a neighbour would be NaN: finite responses give the same numbers as among finite
    ones.
    """
    layout = responses(LENGTHS, as_array)
    finite_S = np.array([i % 2 == 0 for i in range(len(LENGTHS))])
    finite_T = np.repeat(finite_S, LENGTHS)
    with np.errstate(invalid="ignore"):
        for where_S, function in (
            (finite_S, layout.sum),
            (finite_S, layout.mean),
            (finite_S, layout.largest),
            (finite_S, layout.smallest),
            (finite_S, lambda x_T: layout.quantile(x_T, 0.9)),
            (finite_T, layout.running_sum),
            (finite_T, layout.running_smallest),
            (finite_T, lambda x_T: layout.ahead(x_T, 1, 0.0)),
            (finite_T, lambda x_T: layout.behind(x_T, 1, 0.0)),
        ):
            values, expected = (
                np.asarray(function(as_array(np.concatenate(parts))))
                for parts in (infinite(), drawn())
            )
            np.testing.assert_array_equal(values[where_S], expected[where_S])
        parts = infinite()
        x_T = as_array(np.concatenate(parts))
        assert np.asarray(layout.smallest(x_T)).tolist() == each(parts, np.min)
        assert np.asarray(layout.largest(x_T)).tolist() == each(parts, np.max)
        for function, alone in (
            (layout.running_sum, np.cumsum),
            (layout.running_smallest, np.minimum.accumulate),
        ):
            np.testing.assert_allclose(
                np.asarray(function(x_T)),
                np.concatenate([alone(part) for part in parts]),
                rtol=1e-12,
                atol=1e-12,
            )


@pytest.mark.parametrize("lengths", EMPTY, ids=str)
@pytest.mark.parametrize("as_array", WORLDS)
def test_no_tokens(as_array: Callable[[np.ndarray], Array], lengths: list[int]) -> None:
    layout, none_T = responses(lengths, as_array), as_array(np.zeros(0))
    for empty in (
        layout.sum(none_T),
        layout.mean(none_T),
        layout.largest(none_T),
        layout.smallest(none_T),
        layout.quantile(none_T, 0.9),
    ):
        assert np.asarray(empty).tolist() == [0.0] * len(lengths)
    for empty in (
        layout.running_sum(none_T),
        layout.running_smallest(none_T),
        layout.ahead(none_T, 1, 0.0),
        layout.behind(none_T, 1, 0.0),
        layout.position_T,
    ):
        assert len(empty) == 0
