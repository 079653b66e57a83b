"""One batch with every column, judged by all algorithms, and the plain table of its tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.metrics.clipping import brute
from tests.metrics.clipping.world import EVERYTHING, result_of, world


@pytest.fixture(scope="session")
def judged_world() -> SimpleNamespace:
    """`t` holds the counted tokens, `judged` those with an advantage."""
    batch = world(0)
    t = brute.counted(batch, EVERYTHING)
    return SimpleNamespace(
        batch=batch, t=t, judged=t[t["A"] != 0], result=result_of(batch, theory=True)
    )
