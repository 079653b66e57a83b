"""Runs as several algorithms and seeds leave them."""

from __future__ import annotations

import pytest

from mismatch_cli.studies.runs import TrainingRun
from tests.report.training.sample_runs import EIGHT, make_run


@pytest.fixture(scope="session")
def many() -> list[TrainingRun]:
    """Eight algorithms with three seeds each; some runs are shorter."""
    return [make_run(name, seed, 45 if seed == 2 else 60) for name in EIGHT for seed in range(3)]
