"""Where a response is from, as far as it is on record: its trace, the file and the rank that wrote
it, and the weights that sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.trace import foreign_values
from mismatch_cli.trace.recorder_notes import rank_of

NO_RANK = -1
_VERSIONS = ("version_rollout", "version_trainer")


@dataclass(frozen=True)
class Origin:
    """A file of one of the traces; an empty name is none."""

    trace: int = 0
    file: str = ""

    def columns(self, table: pa.Table, batch: TokenBatch) -> dict[str, np.ndarray]:
        """By response: `trace`, `file`, `rank`, `epoch`, `minibatch`, and both sides' versions."""
        rank = rank_of(Path(self.file))
        facts = {
            "trace": self.trace,
            "file": self.file,
            "rank": int(rank) if rank else NO_RANK,
        }
        columns = {name: np.full(batch.num_responses, value) for name, value in facts.items()}
        columns |= {
            name: np.asarray(values_S)
            for name in ("epoch", "minibatch")
            if (values_S := getattr(batch, f"{name}_S", None)) is not None
        }
        versions = (name for name in _VERSIONS if name in table.column_names)
        return columns | {
            name: np.from_dlpack(foreign_values.single(table.column(name))) for name in versions
        }


NOWHERE = Origin()


@dataclass(frozen=True)
class Traces:
    """The names of the traces, and the settings in which their manifests differ, with the value
    of each trace.
    """

    names: tuple[str, ...] = ()
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
