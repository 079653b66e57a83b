"""Compares two sides' experts: flips, counts by layer and margin, and impossible routes."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.trace.routes import (
    MARGIN_BINS,
    MARGIN_EDGES,
    UNKNOWN,
    check_routes,
    compare_routes,
)

TOKENS, LAYERS, K, EXPERTS = 50, 5, 3, 16


def test_flips_are_read_back_where_they_were_made(rng):
    own_TMK = np.argsort(rng.random((TOKENS, LAYERS, EXPERTS)), axis=-1)[..., : K + 1].astype(
        np.uint16
    )
    trainer_TMK, spare_TM = own_TMK[..., :K], own_TMK[..., K]
    flipped_TM = rng.random((TOKENS, LAYERS)) < 0.2
    engine_TMK = rng.permuted(trainer_TMK, axis=-1)  # a different order is not a flip
    engine_TMK[flipped_TM, 1] = spare_TM[flipped_TM]
    unknown_TM = np.zeros_like(flipped_TM)
    unknown_TM[7] = unknown_TM[9, 2] = True
    engine_TMK[unknown_TM] = UNKNOWN
    flipped_TM &= ~unknown_TM
    margin_TM = 2.0 ** rng.uniform(-20, 8, (TOKENS, LAYERS))
    counted_T = rng.random(TOKENS) < 0.8
    comparison = compare_routes(engine_TMK, trainer_TMK, margin_TM, counted_T)
    expected_T = flipped_TM.sum(1)
    expected_T[7] = 255
    assert comparison.flips_T.dtype == np.uint8 and np.array_equal(comparison.flips_T, expected_T)
    first = [int(np.flatnonzero(row)[0]) if row.any() else 255 for row in flipped_TM]
    assert comparison.first_T.tolist() == first
    for layer, (tokens, flips, shared, same_first) in enumerate(comparison.layers_MC):
        rows = np.flatnonzero(counted_T & ~unknown_TM[:, layer])
        assert tokens == len(rows)
        assert flips == flipped_TM[rows, layer].sum()
        common = [len(set(engine_TMK[t, layer]) & set(trainer_TMK[t, layer])) for t in rows]
        assert shared == sum(common) == K * len(rows) - flips
        assert same_first == sum(engine_TMK[t, layer, 0] == trainer_TMK[t, layer, 0] for t in rows)
    for at, flags_TM in enumerate((~flipped_TM, flipped_TM)):
        margins = margin_TM[flags_TM & ~unknown_TM & counted_T[:, None]]
        expected, _ = np.histogram(margins, bins=[-np.inf, *MARGIN_EDGES, np.inf])
        assert (
            comparison.margins_2B[at].tolist() == expected.tolist() and len(expected) == MARGIN_BINS
        )


def test_a_different_number_of_experts_is_a_flip_everywhere():
    engine_TMK = np.tile(np.arange(4, dtype=np.uint16), (3, 2, 1))
    comparison = compare_routes(
        engine_TMK, engine_TMK[..., :2], np.ones((3, 2)), np.ones(3, dtype=bool)
    )
    assert comparison.flips_T.tolist() == [2, 2, 2] and comparison.layers_MC[:, 2].tolist() == [
        6,
        6,
    ]


def test_impossible_routes_are_refused():
    routes_FMK = np.tile(np.arange(3, dtype=np.uint16), (6, 2, 1))
    check_routes(routes_FMK, 6, 4)
    with pytest.raises(
        MismatchError, match=r"routes of 6 tokens for a response to prompt 4, but the model read 7"
    ):
        check_routes(routes_FMK, 7, 4)
    routes_FMK[2, 1] = UNKNOWN  # unknown experts are not equal
    check_routes(routes_FMK, 6, 4)
    routes_FMK[5, 0] = [7, 1, 7]
    with pytest.raises(
        MismatchError, match=r"sent token 5 of prompt 4 twice to expert 7 in layer 0"
    ):
        check_routes(routes_FMK, 6, 4)


def test_a_margin_on_an_edge_is_in_the_bin_above_it():
    same_TMK = np.tile(np.arange(K, dtype=np.uint16), (3, 1, 1))
    margin_TM = np.array([[2.0**-16], [1.0], [2.0**6]])
    comparison = compare_routes(same_TMK, same_TMK, margin_TM, np.ones(3, dtype=bool))
    expected, _ = np.histogram(margin_TM, bins=[-np.inf, *MARGIN_EDGES, np.inf])
    assert comparison.margins_2B[0].tolist() == expected.tolist()
    assert comparison.margins_2B[0][[0, 1]].tolist() == [0, 1]
