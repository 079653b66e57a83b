"""`--track` and its companions: where the metrics of a run go besides metrics.jsonl, and under
which names.

A tracker is one of `accelerate.tracking`, in a child: if it fails or hangs, that is reported once,
and the run continues. `metrics.jsonl` is the source of truth, and a tracker is a copy of it.
"""

from __future__ import annotations

import importlib.util
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mismatch_cli.base import registry
from mismatch_cli.base.errors import MismatchError, UsageError, first_line, quoted
from mismatch_cli.base.extras import require
from mismatch_cli.base.numbers import things
from mismatch_cli.base.options import setting
from mismatch_cli.processes.child import LATE, Child
from mismatch_cli.train.metrics_table import flat, records_from
from mismatch_cli.train.tracker_worker import track

PROJECT = "mismatch-cli"
FOLDER = "trackers"
STEP_SECONDS = 180.0  # time limit of a step; libraries wait up to 90 s for a network
END_SECONDS = 60.0  # time limit of everything left at the end
_MLFLOW = "env MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {folder}"
# By name, which is also the module's: the command that shows what it has logged, if it has one
TRACKERS = {
    "aim": "aim up --repo {folder}",
    "clearml": "",
    "comet_ml": "",
    "dvclive": "",
    "mlflow": _MLFLOW,
    "swanlab": "",
    "tensorboard": "tensorboard --logdir {folder}",
    "trackio": "trackio show --project {project}",
    "wandb": "wandb sync {folder}",
}

_of_trackers = partial(setting, panel="Trackers")


@dataclass(frozen=True, kw_only=True)
class TrackSettings:
    """Where the metrics of a run also go, and under which names."""

    track: list[str] | None = _of_trackers(
        None,
        f"Also log each step to {', '.join(TRACKERS)}; separate several with commas.",
        metavar="NAME,NAME",
        completes=lambda: list(TRACKERS),
    )
    project: str = _of_trackers(
        PROJECT, "Project of the run in the trackers.", key="track_project", metavar="NAME"
    )
    name: str | None = _of_trackers(
        None,
        "Name of the run in the trackers.",
        key="track_name",
        metavar="NAME",
        show_default="its folder",
    )


def tracker_names(typed: Sequence[str] | None) -> list[str]:
    """The trackers of `--track a --track b,c`, each once; an error if one is unknown or not
    installed.
    """
    if not typed:
        return []
    names = list(dict.fromkeys(map(str.strip, ",".join(typed).split(","))))
    for name in names:
        if name not in TRACKERS:
            raise UsageError(registry.unknown_name("tracker", name, TRACKERS))
        require(name, f"--track {name}")
        if importlib.util.find_spec(name) is None:
            raise MismatchError(
                f"--track {name} needs {name}, which is not installed. Install it with: pip "
                f"install {name}"
            )
    return names


@dataclass(frozen=True)
class Tracking:
    """The tracking settings of a command, checked."""

    names: Sequence[str]
    project: str
    name: str | None
    framework: str
    several: bool  # runs

    @classmethod
    def of_settings(cls, settings: TrackSettings, framework: str, *, several: bool) -> Tracking:
        """From the settings; a `MismatchError` for a tracker that is unknown or not installed."""
        names = tracker_names(settings.track)
        return cls(names, settings.project, settings.name, framework, several)

    def of(
        self, folder: Path, config: Mapping[str, Any], say: Callable[[str], None]
    ) -> AbstractContextManager[Trackers]:
        """The trackers of one run; of several, each run is called after `track_name` and its
        folder.
        """
        name = folder.resolve().name
        if self.name is not None:
            name = f"{self.name}-{name}" if self.several else self.name
        return open_trackers(self.names, folder, self.project, name, config, say)


@contextmanager
def open_trackers(
    names: Sequence[str],
    folder: Path,
    project: str = PROJECT,
    run: str = "",
    config: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> Iterator[Trackers]:
    """Open these trackers for the run in `folder`, by default under its name, and close them at the
    end.

    A run that was tracked before continues: a step that a tracker already has is not logged again.
    """
    about = {
        "project": project,
        "name": run or folder.resolve().name,
        "config": dict(config or {}),
        "id": secrets.token_hex(4),
    }
    trackers = Trackers(say)
    try:
        for name in names:
            trackers.begin(name, folder / FOLDER, about)
        yield trackers
    finally:
        trackers.close()


class Trackers:
    """The trackers of a run.

    They never raise: a failure is reported once, and the tracker is dropped.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._offset = 0  # where the next line of metrics.jsonl starts
        self.children: dict[str, Child] = {}
        self._logs: dict[str, Path] = {}

    def begin(self, name: str, folder: Path, about: Mapping[str, Any]) -> None:
        """Start a tracker, and say how to view it."""
        log = folder / f"{name}.log"
        child = Child(track, name, str(folder / name), log=log, grace=END_SECONDS)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            child.tell(about)
        except OSError as error:
            self._report(name, first_line(error))
            return
        self.children[name] = child
        self._logs[name] = log
        sentence = f"Tracking with {name}"
        view = TRACKERS[name].format(
            folder=quoted(str(folder / name)), project=quoted(str(about["project"]))
        )
        if view:
            sentence += f"; view it with: {view}"
        self._say(sentence)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step to all of them."""
        for name, child in list(self.children.items()):
            error = _failure(child)
            if error:
                self._give_up(name, error)
            else:
                child.tell({"step": step, "metrics": dict(metrics)})

    def follow(self, metrics: Path) -> None:
        """Log the steps that metrics.jsonl has gained since the last call."""
        if not self.children:
            return
        try:
            records, self._offset = records_from(metrics, self._offset)
            for record in records:
                self.log(record["step"], flat(record))
        # Whatever is wrong with the file, the run continues: only its trackers end.
        except Exception as error:
            for name in list(self.children):
                self._give_up(name, first_line(error))

    def close(self) -> None:
        """Wait until they have everything, up to a time limit."""
        try:
            for name, child in list(self.children.items()):
                reply = child.finish(END_SECONDS)
                if reply is LATE:
                    self._give_up(name, f"it did not finish within {END_SECONDS:g} s")
                elif reply.error:
                    self._give_up(name, reply.error)
                elif child.dropped:
                    self._report(name, f"it was too slow for {things(child.dropped, 'step')}")
        finally:
            for child in self.children.values():
                child.stop()
            self.children.clear()

    def _give_up(self, name: str, error: str) -> None:
        self.children.pop(name).stop()
        self._report(name, error, f" See {self._logs[name]}.")

    def _report(self, name: str, error: str, where: str = "") -> None:
        consequence = "The run continues, and metrics.jsonl has every step."
        self._say(f"--track {name} ended: {error}. {consequence}{where}")


def _failure(child: Child) -> str:
    """Why a tracker has failed; empty while it answers."""
    for reply in iter(partial(child.receive, 0.0), None):
        if reply.error:
            return reply.error
    if child.silence > STEP_SECONDS:
        return f"it has not responded for {STEP_SECONDS:g} s"
    return ""
