"""What a user's environment may return, in the process that plays it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mismatch_cli.train.environment_worker import _reset


@pytest.mark.parametrize("returned", ["north", ("north", {"doors": 2}), ("north",)])
def test_a_reset_returns_an_observation_or_gymnasiums_pair(returned):
    seeds = []
    seeded = SimpleNamespace(reset=lambda seed: seeds.append(seed) or returned)
    by_keywords = SimpleNamespace(reset=lambda **settings: seeds.append(settings) or returned)
    assert _reset(seeded, 3) == _reset(by_keywords, 4) == "north"
    assert _reset(SimpleNamespace(reset=lambda: returned), 5) == "north"
    assert seeds == [3, {"seed": 4}]
