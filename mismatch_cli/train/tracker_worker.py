"""A tracker as a child runs it: one of `accelerate.tracking`, for one run.

What a library prints goes to the tracker's log, what it raises becomes an answer, and a hang blocks
only this process.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mismatch_cli.trace.files import write_atomically

# Environment variables by which accelerate would join the ranks of the run that it tracks.
_OF_RANKS = (
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
)
_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]")


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker knows about a run before its first step."""

    folder: Path  # of this tracker
    project: str
    name: str
    id: str  # stays the same when the run is resumed
    config: dict[str, Any]
    given_id: str | None = None  # by the tracker, to a run that is resumed
    resumed: bool = False


class _Memory:
    """The ids of this run and the last step that its tracker has: a resumed run continues after
    it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._facts: dict[str, Any] = {}
        if path.is_file():
            self._facts = json.loads(path.read_text(encoding="utf-8"))

    def continued(self, run: TrackedRun) -> TrackedRun:
        """The run under the id of its first session."""
        if "id" not in self._facts:
            self.save(id=run.id)
            return run
        first_id, given_id = self._facts["id"], self._facts.get("given_id")
        return replace(run, id=first_id, given_id=given_id, resumed=True)

    @property
    def step(self) -> int:
        """The last step that the tracker has; -1 before the first."""
        return int(self._facts.get("step", -1))

    def save(self, **facts: Any) -> None:
        """Remember these facts too, on disk."""
        self._facts |= facts
        write_atomically(self._path, json.dumps(self._facts))


class _Tracked:
    """Takes what is known about the run, and then its steps."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._memory = _Memory(folder.with_name(f"{name}.json"))
        self._tracker: Any = None

    def __call__(self, message: dict[str, Any]) -> None:
        """The first message is about the run, and each later one is a step."""
        if self._tracker is None:
            self._open(**message)
        elif message["step"] > self._memory.step:
            self._log(message["step"], message["metrics"])

    def _open(self, config: dict[str, Any], **about: Any) -> None:
        settings = {key: _plain(value) for key, value in config.items()}
        run = self._memory.continued(TrackedRun(self._folder, config=settings, **about))
        self._tracker = _opened(self._name, run)
        # mlflow chooses the id itself, and finds the run again by nothing else.
        if self._name == "mlflow":
            self._memory.save(given_id=self._tracker.tracker.info.run_id)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        if self._name == "mlflow":
            metrics = {_NOT_IN_MLFLOW.sub("_", key): value for key, value in metrics.items()}
        self._tracker.log(metrics, step=step)
        self._memory.save(step=step)

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.finish()


def track(name: str, folder: str) -> Callable[[dict[str, Any]], None]:
    """Tracks a run with `name` of accelerate; `folder` is the tracker's."""
    # The process of a killed session may not have ended yet: it holds the log, which is stderr.
    fcntl.flock(2, fcntl.LOCK_EX)
    os.environ["OMP_NUM_THREADS"] = "1"
    Path(folder).mkdir(parents=True, exist_ok=True)
    return _Tracked(name, Path(folder))


def _opened(name: str, run: TrackedRun) -> Any:
    """The tracker of accelerate, started; a resumed run has stored its settings already."""
    for variable in _OF_RANKS:
        os.environ.pop(variable, None)
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=True)  # without it, no tracker's logger works
    tracker = LOGGER_TYPE_TO_CLASS[name](**_ARGUMENTS[name](run))
    tracker.start()
    if not run.resumed:
        tracker.store_init_configuration(run.config)
    return tracker


def _plain(value: Any) -> Any:
    """A setting as every tracker takes it."""
    if isinstance(value, bool | int | float | str):
        return value
    return json.dumps(value)


# One function per tracker: what it is opened with, offline unless the user's own variables say
# otherwise.


def _aim(run: TrackedRun) -> dict[str, Any]:
    return {"run_name": run.name, "logging_dir": str(run.folder), "experiment": run.project}


def _clearml(run: TrackedRun) -> dict[str, Any]:
    return {"project_name": run.project, "task_name": run.name}


def _comet_ml(run: TrackedRun) -> dict[str, Any]:
    from comet_ml import ExperimentConfig

    return {"run_name": run.project, "experiment_config": ExperimentConfig(name=run.name)}


def _dvclive(run: TrackedRun) -> dict[str, Any]:
    """It writes files only: an experiment of DVC would commit whatever is in the folder."""
    return {"dir": str(run.folder / run.name), "resume": run.resumed, "save_dvc_exp": False}


def _mlflow(run: TrackedRun) -> dict[str, Any]:
    """It stores files; a project is an experiment."""
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        os.environ.setdefault(name, "true")
    os.environ.setdefault("MLFLOW_TRACKING_URI", run.folder.absolute().as_uri())
    return {"experiment_name": run.project, "run_name": run.name, "run_id": run.given_id}


def _swanlab(run: TrackedRun) -> dict[str, Any]:
    mode = "cloud" if os.environ.get("SWANLAB_API_KEY") else "offline"
    return {
        "run_name": run.project,
        "experiment_name": run.name,
        "logdir": str(run.folder),
        "mode": os.environ.get("SWANLAB_MODE", mode),
    }


def _tensorboard(run: TrackedRun) -> dict[str, Any]:
    """It has no projects: a run is its folder, with a file per session."""
    return {"run_name": run.name, "logging_dir": str(run.folder)}


def _trackio(run: TrackedRun) -> dict[str, Any]:
    """It identifies a run only by its name, so that ends with the id; it keeps the settings that it
    is opened with.
    """
    return {
        "run_name": run.project,
        "name": f"{run.name}-{run.id}",
        "config": run.config,
        "resume": "allow",
        "embed": False,
        "auto_log_gpu": False,
        "auto_log_cpu": False,
    }


def _wandb(run: TrackedRun) -> dict[str, Any]:
    """Offline, every session writes a folder of its own, all under the id of the run."""
    # Without this, it sends its own errors to wandb, even offline.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    from wandb import Settings

    mode = os.environ.get("WANDB_MODE")
    if not mode:
        mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
    return {
        "run_name": run.project,
        "name": run.name,
        "id": run.id,
        "dir": str(run.folder.parent),
        "mode": mode,
        "resume": "allow" if mode == "online" else None,
        "settings": Settings(
            console="off", disable_git=True, disable_code=True, x_disable_stats=True
        ),
    }


_ARGUMENTS: dict[str, Callable[[TrackedRun], dict[str, Any]]] = {
    "aim": _aim,
    "clearml": _clearml,
    "comet_ml": _comet_ml,
    "dvclive": _dvclive,
    "mlflow": _mlflow,
    "swanlab": _swanlab,
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
}
