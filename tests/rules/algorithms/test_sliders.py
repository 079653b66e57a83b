"""The positions of a slider, with thresholds by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.algorithms.sliders import slider_positions


def test_a_threshold_goes_from_a_sixteenth_to_sixteen_times_by_eighths_of_a_doubling() -> None:
    positions = slider_positions(parse_algorithm("dppo-binary-kl"))
    limits = [thresholds["δ_high"] for _, thresholds in positions]
    assert len(limits) == 65 and limits[32] == 0.05
    assert (limits[0], limits[-1]) == (0.00313, 0.8)
    np.testing.assert_allclose(np.diff(np.log2(limits)), 1 / 8, atol=0.01)


def test_only_the_first_mask_that_limits_the_trainer_moves() -> None:
    algorithm = parse_algorithm("verl-token-icepop")
    _, *others = algorithm.masks
    assert len(others) == 2
    for moved, _ in slider_positions(algorithm):
        assert [*moved.masks[1:]] == others


def test_a_total_variation_ends_at_1_and_a_ratio_is_raised_to_the_power() -> None:
    *_, (_, loosest) = slider_positions(parse_algorithm("mask-0.5"))
    assert loosest == {"δ": 1.0}
    (_, strictest), *_ = slider_positions(parse_algorithm("icepop"))
    roots = {"band_low": 0.5 ** (1 / 16), "band_high": 5 ** (1 / 16)}
    assert strictest == pytest.approx(roots, abs=5e-4)
