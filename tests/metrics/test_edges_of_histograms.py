"""The middle of a bin."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.histograms import LogBins, bin_centres


def test_a_middle_is_as_far_from_both_edges():
    bins = LogBins(-4, 3)
    lower, upper = bins.edges
    for middle in bin_centres(bins):
        np.testing.assert_allclose(middle - lower, upper - middle, rtol=1e-12)
        assert np.all(middle[1:-1] > lower[1:-1])
