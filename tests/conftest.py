"""What every test relies on: no hub, prepared imports, and one thread, which makes numbers
reproducible bit for bit.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.paths import ROOT

# A shell that starts the suite in the background ignores Ctrl-C for it and all that it starts;
# tests send Ctrl-C to programs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Workers import the main module, which is not a file where the suite was started from standard input.
_MAIN = sys.modules["__main__"]
if not Path(getattr(_MAIN, "__file__", None) or __file__).exists():
    del _MAIN.__file__
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests type keys that have no flag like flags, as our own processes do for each other;
# `tests/app/commands/test_settings.py` removes it to see what a user sees
os.environ["MISMATCH_CLI_WRITTEN"] = "1"

from mismatch_cli.models.torch_settings import prepare_imports  # noqa: E402

# Many container images set it; every process would then compile torch, transformers and vLLM again,
# 6 to 10 s each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
prepare_imports()

from tests.tiny_models import save_model  # noqa: E402, F401


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _imports_are_not_garbage() -> None:
    """Engines collect garbage when they close, which takes 0.3 s if torch, transformers and vLLM
    are not frozen.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of the real pretrained model; skips the test where it is not."""
    folder = ROOT / ".real-model"
    if not (folder / "config.json").is_file():
        pytest.skip("The real pretrained model is not here: `make real-model` gets it.")
    return folder


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
