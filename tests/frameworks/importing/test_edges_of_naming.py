"""The largest number that a column of whole numbers may hold."""

from __future__ import annotations

import pytest

from mismatch_cli.frameworks.importing.naming import fits


@pytest.mark.parametrize("column", ["step", "prompt_id"])
def test_a_whole_number_has_at_most_63_bits(column):
    """As Arrow and numpy store it."""
    assert fits(column, 2**63 - 1) and fits(column, 1 - 2**63)
    assert not fits(column, 2**63)
    assert not fits(column, -(2**63) - 1)
