"""Uninterrupted runs, with which every resumed one is compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from mismatch_cli.train.learner import Learner
from mismatch_cli.train.studies.runs import TrainingRun
from tests.report.conftest import browser  # noqa: F401
from tests.tiny_models import saved_model
from tests.train.learners import VOCABULARY, learner_on
from tests.train.small_runs import EVALUATED, run
from tests.train.training_runs import eight_algorithms


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("train") / "unbroken"
    torch.set_num_threads(1)
    run(folder, **EVALUATED)
    return folder


@pytest.fixture(scope="session")
def make_learner(tmp_path_factory) -> Callable[..., Learner]:
    """Learners on one small model."""
    folder = tmp_path_factory.mktemp("learner")
    sizes = {"vocab_size": VOCABULARY, "tie_word_embeddings": True}
    return partial(learner_on, saved_model(folder, "Qwen3", **sizes))


@pytest.fixture(scope="session")
def eight() -> list[TrainingRun]:
    """Eight algorithms with three seeds each; some runs are shorter."""
    return eight_algorithms()
