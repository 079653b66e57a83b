"""Training runs as they stand on the disk: one JSON object a step, and the configuration beside it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_cli.errors import MismatchError
from mismatch_cli.places import shown

METRICS, CONFIG = "metrics.jsonl", "config.toml"
_LARGEST = 1e300  # what is larger is no measurement


@dataclass(frozen=True)
class TrainingRun:
    """One algorithm with one seed: what was recorded at each step, and the settings where they are known."""

    name: str
    algorithm: str
    seed: int | None
    records: list[dict[str, Any]]
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    _series: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def step_N(self) -> np.ndarray:
        """The step of each record; records that do not say are numbered."""
        step_N = self.series("step")
        return np.where(np.isfinite(step_N), step_N, np.arange(1, len(step_N) + 1))

    def series(self, *keys: str) -> np.ndarray:
        """A number of each record, found by its keys from the outside in; NaN where there is none."""
        if keys not in self._series:  # every figure asks again, in each of its variants
            self._series[keys] = np.array([_number(record, keys) for record in self.records], dtype=np.float64)
        return self._series[keys]


def _number(record: object, keys: Sequence[str]) -> float:
    for key in keys:
        record = record.get(key) if isinstance(record, Mapping) else None
    if not isinstance(record, int | float):
        return np.nan
    return float(record) if abs(record) < _LARGEST else np.nan


def read_runs(folders: Iterable[Path | str]) -> list[TrainingRun]:
    """The runs in these folders, in their order; raises a `MismatchError` where one holds no readable run.

    A run that is going on is read up to its last whole line, and one that has no line yet is left out of several.
    """
    paths = [Path(folder) for folder in folders]
    names = [path.resolve().name for path in paths]
    alike = {name for name in names if names.count(name) > 1}
    runs = [_read_run(path, str(path) if name in alike else name) for path, name in zip(paths, names, strict=True)]
    begun = [run for run in runs if run.records]
    if paths and not begun:
        raise MismatchError(f"{paths[0] / METRICS} holds no step yet. Wait until the first one is done.")
    return begun


def _read_run(folder: Path, name: str) -> TrainingRun:
    records, config = _read_records(folder / METRICS), shown(_read_config(folder / CONFIG))
    algorithm, seed = config.get("algorithm"), config.get("seed")
    return TrainingRun(
        name=name,
        algorithm=algorithm if isinstance(algorithm, str) and algorithm else name,
        seed=seed if isinstance(seed, int) else None,
        records=records,
        config=config,
        folder=folder,
    )


def _read_records(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().decode(errors="replace").rstrip("\n").split("\n")
    except OSError as error:
        raise MismatchError(
            f"{path} cannot be read ({error.strerror or error}). Name the folder of a training run."
        ) from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif number < len(lines):  # the last line may be half-written
            raise MismatchError(
                f"{path} is damaged: line {number} is no JSON object. "
                "The command that began it, with --resume, cuts the run back to its newest checkpoint and goes on."
            )
    return records


def _read_config(path: Path) -> dict[str, Any]:
    """The settings; a run without the file is read all the same, under the name of its folder."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise MismatchError(f"{path} cannot be read ({error}). Restore it from a copy of the run.") from error
