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
VERSIONS = ("version_rollout", "version_trainer")


@dataclass(frozen=True)
class Origin:
    """A file of one of the traces; an empty name is none."""

    trace: int = 0
    file: str = ""

    def columns(self, table: pa.Table, batch: TokenBatch) -> dict[str, np.ndarray]:
        """By response: `trace`, `file`, `rank`, `epoch`, `minibatch`, and both sides' versions."""
        rank = rank_of(Path(self.file))
        columns = {
            "trace": np.full(batch.num_responses, self.trace),
            "file": np.full(batch.num_responses, self.file),
            "rank": np.full(batch.num_responses, int(rank) if rank else NO_RANK),
        }
        for name in ("epoch", "minibatch"):
            value_S = getattr(batch, f"{name}_S", None)
            if value_S is not None:
                columns[name] = np.asarray(value_S)
        for name in VERSIONS:
            if name in table.column_names:
                columns[name] = np.from_dlpack(foreign_values.single(table.column(name)))
        return columns


NOWHERE = Origin()


@dataclass(frozen=True)
class Traces:
    """The names of the traces, and the settings in which their manifests differ, with the value
    of each trace.
    """

    names: tuple[str, ...] = ()
    settings: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
