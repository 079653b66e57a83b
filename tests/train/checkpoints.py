"""What a small run's checkpoints and traces hold, to compute again what it recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from safetensors.torch import load_file

from mismatch_cli.base.places import bundled
from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.trace.reader import Trace


def responses_of(folder: Path, step: int) -> pa.Table:
    return pa.concat_tables(Trace.open(folder / "traces" / f"step-{step}").tables())


def model_after(folder: Path, step: int) -> Any:
    """The bundled model with the weights after a step; before the first, its own."""
    model = load_causal_lm(str(bundled("model")), "float32")
    if step:
        (file,) = (folder / "checkpoints" / f"step-{step:06d}" / "state").iterdir()
        saved = load_file(file)
        for name, weight in model.named_parameters():
            weight.data.copy_(saved[f"weight.{name}"])
    return model
