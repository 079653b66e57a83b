"""Experiment trackers: every file is a tracker, and its file name the public name.

A file defines `LOOK`, the command that shows what it has logged, and `tracking`, a context manager
that takes a `TrackedRun` and yields a function that logs the metrics of a step. It runs in its own
process: a tracker that fails or hangs is reported once, and the run continues. `metrics.jsonl` is
the source of truth, and a tracker is a copy of it.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.app.trackers._flat import (
    AS,
    METRICS_TABLE,
    flat,
    records_from,
    renew_table,
    write_table,
)
from mismatch_cli.base import registry
from mismatch_cli.base.errors import first_line, quoted
from mismatch_cli.base.extras import require

if TYPE_CHECKING:
    from mismatch_cli.app.trackers._outlet import Outlet

__all__ = [
    "AS", "METRICS_TABLE", "PROJECT", "Log", "Trackers", "asked", "flat", "names", "open_trackers",
    "renew_table",
    "write_table",
]  # fmt: skip

Log = Callable[[int, Mapping[str, float]], None]
PROJECT = "mismatch-cli"
FOLDER = "trackers"


def names() -> list[str]:
    """The names of all trackers."""
    return registry.names(__name__)


def asked(typed: Sequence[str] | None) -> list[str]:
    """The trackers of `--track a --track b,c`, each once; an error if one is unknown or not
    installed.
    """
    found = dict.fromkeys(name.strip() for names in typed or () for name in names.split(","))
    for name in found:
        registry.check(__name__, name, "tracker")
        require(name, f"--track {name}")
    return list(found)


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
    about = {"project": project, "name": run or folder.resolve().name, "config": dict(config or {})}
    about["id"] = secrets.token_hex(4)
    trackers = Trackers(say)
    try:
        for name in names:
            trackers.begin(name, folder / FOLDER, about)
        yield trackers
    except BaseException:
        trackers.close()
        raise
    trackers.close()


class Trackers:
    """The trackers of a run.

    They never raise: a failure is reported once, and the tracker is dropped.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._offset = say, 0
        self._open: dict[str, Outlet] = {}

    def begin(self, name: str, folder: Path, about: Mapping[str, Any]) -> None:
        """Start a tracker, and say how to view it."""
        from mismatch_cli.app.trackers._outlet import Outlet

        try:
            self._open[name] = Outlet(name, folder, about)
        except Exception as error:
            self._give_up(name, error)
            return
        look = registry.load(__name__, name, "tracker").LOOK
        places = {"folder": str(folder / name), "project": about["project"]}
        self._say(
            f"Tracking with {name}; view it with: "
            f"{quoted(*(word.format(**places) for word in look))}"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step to all of them."""
        for name, outlet in list(self._open.items()):
            try:
                outlet.log(step, metrics)
            except Exception as error:
                self._give_up(name, error)

    def follow(self, metrics: Path) -> None:
        """Log the steps that metrics.jsonl has gained since the last call."""
        if not self._open:
            return
        try:
            records, self._offset = records_from(metrics, self._offset)
            for record in records:
                self.log(record["step"], flat(record))
        except Exception as error:
            for name in list(self._open):
                self._give_up(name, error)

    def close(self) -> None:
        """Wait until they have everything, up to a time limit."""
        for name, outlet in list(self._open.items()):
            try:
                outlet.close()
            except Exception as error:
                self._give_up(name, error)
            except BaseException:  # the user interrupts the wait
                outlet.give_up()
                raise
        self._open.clear()

    def _give_up(self, name: str, error: Exception) -> None:
        outlet, where = self._open.pop(name, None), ""
        if outlet is not None:
            outlet.give_up()
            where = f" See {outlet.log_file}."
        kept = "The run continues, and metrics.jsonl has every step."
        self._say(f"--track {name} ended: {first_line(error)}. {kept}{where}")
