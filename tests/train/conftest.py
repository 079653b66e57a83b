"""Uninterrupted runs, with which every resumed one is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.report.conftest import browser, eight  # noqa: F401
from tests.train.small_runs import EVALUATED, run


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("train") / "unbroken"
    torch.set_num_threads(1)
    run(folder, **EVALUATED)
    return folder
