"""The range of a number of ranks."""

from __future__ import annotations

import pytest

from mismatch_cli.errors import UsageError
from mismatch_cli.trust_regions import _rules


def test_a_number_of_ranks_is_from_1_to_2_to_the_20():
    for k in (1, 2**20):
        _rules.ranks(k=k)
    for k in (0, 2**20 + 1):
        with pytest.raises(UsageError, match=f"k={k} is out of range.*from 1 to 1,048,576"):
            _rules.ranks(k=k)
