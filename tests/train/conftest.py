"""Uninterrupted runs, with which every resumed one is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mismatch_cli.train.studies.runs import TrainingRun
from tests.report.conftest import browser  # noqa: F401
from tests.train.small_runs import EVALUATED, run
from tests.train.training_runs import eight_algorithms


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("train") / "unbroken"
    torch.set_num_threads(1)
    run(folder, **EVALUATED)
    return folder


@pytest.fixture(scope="session")
def eight() -> list[TrainingRun]:
    """Eight algorithms with three seeds each; some runs are shorter."""
    return eight_algorithms()
