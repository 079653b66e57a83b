"""The bundled model in plain torch, with which engines are compared."""

from __future__ import annotations

import pytest
import torch

from mismatch_cli.base.places import bundled
from mismatch_cli.models.loading import load_causal_lm


@pytest.fixture(scope="session")
def model() -> torch.nn.Module:
    return load_causal_lm(str(bundled("model")), dtype="float32")
