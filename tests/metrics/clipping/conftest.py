"""One batch with every column, judged by all algorithms, and the plain table of its tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.metrics.clipping import brute
from tests.metrics.clipping.world import EVERYTHING, world


@pytest.fixture(scope="session")
def judged_world() -> SimpleNamespace:
    return brute.judged(world(0), EVERYTHING, theory=True)
