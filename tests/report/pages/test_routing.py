"""The section on routing: the margins at which routers flip."""

from __future__ import annotations

import pytest

from mismatch_cli.report.pages.mismatch_routing import _ties


@pytest.mark.parametrize(
    ("flipped", "agreeing", "said"),
    [
        (None, 0.4, "No router flips."),
        (0.01, 0.4, "rounding decides near ties"),
        (0.3, 0.4, "these are not near ties"),
        (0.3, None, "Every router flips at every token"),
    ],
)
def test_whether_flips_are_near_ties(flipped, agreeing, said):
    assert said in _ties({"margins": {"flipped": {"p50": flipped}, "agreeing": {"p50": agreeing}}})
