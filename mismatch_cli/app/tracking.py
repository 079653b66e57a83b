"""`--track` and its companions: where the metrics of a run go besides metrics.jsonl, and under
which names.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mismatch_cli.app.completions import frameworks
from mismatch_cli.app.trackers import PROJECT, Trackers, asked, names, open_trackers
from mismatch_cli.base.options import setting

_of_trackers = partial(setting, panel="Trackers")
TRACK: list[str] | None = _of_trackers(
    None,
    f"Also log each step to {', '.join(names())}; separate several with commas.",
    metavar="NAME,NAME",
    completes=names,
    show_default="none",
)
TRACK_PROJECT: str = _of_trackers(PROJECT, "Project of the run in the trackers.", metavar="NAME")
TRACK_NAME: str | None = _of_trackers(
    None, "Name of the run in the trackers.", metavar="NAME", show_default="its folder"
)
AS_FRAMEWORK: str | None = _of_trackers(
    None,
    "Also log this framework's metrics under its own names, such as verl or trl.",
    flag="--as",
    metavar="FRAMEWORK",
    choices=("framework", frameworks),
    show_default="none",
)


@dataclass(frozen=True)
class Tracking:
    """The tracking flags, checked."""

    names: Sequence[str]
    project: str
    name: str | None
    framework: str
    several: bool

    @classmethod
    def asked(
        cls,
        track: Sequence[str] | None,
        project: str,
        name: str | None,
        framework: str | None,
        *,
        several: bool,
    ) -> "Tracking":
        """From the flags; a `MismatchError` for a tracker that is unknown or not installed."""
        return cls(asked(track), project, name, framework or "", several)

    def of(
        self, folder: Path, config: Mapping[str, Any], say: Callable[[str], None]
    ) -> AbstractContextManager[Trackers]:
        """The trackers of one run; of several, each run is called after --track-name and its
        folder.
        """
        own = folder.resolve().name
        name = own if self.name is None else f"{self.name}-{own}" if self.several else self.name
        return open_trackers(self.names, folder, self.project, name, config, say)
