"""Batches made by hand, and random ones, as fixtures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mismatch_cli.rules.batch import TokenBatch
from tests.metrics import batches


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., TokenBatch]:
    return batches.make_batch


@pytest.fixture(scope="session")
def random_batch() -> Callable[..., TokenBatch]:
    return batches.random_batch


@pytest.fixture(scope="session")
def take_responses() -> Callable[..., TokenBatch]:
    return batches.take_responses
