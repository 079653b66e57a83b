"""What a plot of `train` may draw: the recorded runs, by algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from mismatch_cli.studies.curves import Curve, curve_of
from mismatch_cli.studies.runs import TrainingRun


@dataclass(frozen=True)
class TrainingPlotData:
    """One or several runs; the seeds of an algorithm become one curve."""

    STUDY: ClassVar[str] = "training"

    runs: Sequence[TrainingRun]
    subject: str = ""  # who was trained on what, in one line

    @classmethod
    def of(cls, runs: Sequence[TrainingRun]) -> TrainingPlotData:
        """The runs, with a subject line from their configurations."""
        algorithms = by_algorithm(runs)
        seeds = max((len(of) for of in algorithms.values()), default=0)
        parts = list(algorithms) if len(algorithms) == 1 else []
        parts += [_found(runs, "model"), _found(runs, "dataset"), f"{seeds} seeds" if seeds > 1 else ""]
        parts += [f"{policy} {_found(runs, key)}" for policy, key in _DTYPES if _found(runs, key)]
        return cls(runs, " · ".join(part for part in parts if part))

    @cached_property
    def algorithms(self) -> dict[str, list[TrainingRun]]:
        """The runs of each algorithm, in the order in which they were named."""
        return by_algorithm(self.runs)

    def curves(self, *keys: str, gaps: bool = True) -> dict[str, Curve]:
        """The curve of each algorithm for which the number was recorded."""
        curves = {name: curve_of(runs, *keys, gaps=gaps) for name, runs in self.algorithms.items()}
        return {name: curve for name, curve in curves.items() if curve.has_values}

    def has(self, *keys: str) -> bool:
        return any(np.isfinite(run.series(*keys)).any() for run in self.runs)


_DTYPES = (("trainer", "trainer_dtype"), ("rollout", "rollout_dtype"))


def by_algorithm(runs: Sequence[TrainingRun]) -> dict[str, list[TrainingRun]]:
    """The runs of each algorithm, in the order in which they were named."""
    found: dict[str, list[TrainingRun]] = {}
    for run in runs:
        found.setdefault(run.algorithm, []).append(run)
    return found


def _short(name: str) -> str:
    """A model or data set without the folders in which it lies; `owner/name` of the hub stays."""
    return name if name.count("/") < 2 else name.rsplit("/", 1)[-1]


def _found(runs: Sequence[TrainingRun], key: str) -> str:
    """The setting of the runs, or the different ones that they have."""
    return ", ".join(dict.fromkeys(_short(str(run.config[key])) for run in runs if run.config.get(key)))
