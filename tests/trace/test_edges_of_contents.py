"""The largest numbers that a manifest may hold."""

from __future__ import annotations

import pytest

from mismatch_cli.trace.manifest_types import may_hold


@pytest.mark.parametrize("key", ["rollout.seed", "imported.tokens", "config.sampling.temperature"])
def test_a_number_of_64_bits_is_damage(key):
    """Arrow and numpy have signed integers of 63 bits and a sign."""
    assert may_hold(key, 2**63 - 1)
    assert not may_hold(key, 2**63)
