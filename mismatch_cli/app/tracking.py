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


@dataclass(frozen=True, kw_only=True)
class TrackSettings:
    """Where the metrics of a run also go, and under which names."""

    track: list[str] | None = _of_trackers(
        None,
        f"Also log each step to {', '.join(names())}; separate several with commas.",
        metavar="NAME,NAME",
        completes=names,
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
    framework: str | None = _of_trackers(
        None,
        "Also log this framework's metrics under its own names, such as verl or trl.",
        key="as",
        metavar="FRAMEWORK",
        choices=("framework", frameworks),
    )


@dataclass(frozen=True)
class Tracking:
    """These settings, checked."""

    names: Sequence[str]
    project: str
    name: str | None
    framework: str
    several: bool

    @classmethod
    def asked(
        cls, settings: TrackSettings, *, several: bool, name: str | None = None
    ) -> "Tracking":
        """From the settings; `name` where they have none. A `MismatchError` for a tracker that is
        unknown or not installed.
        """
        name, framework = settings.name or name, settings.framework or ""
        return cls(asked(settings.track), settings.project, name, framework, several)

    def of(
        self, folder: Path, config: Mapping[str, Any], say: Callable[[str], None]
    ) -> AbstractContextManager[Trackers]:
        """The trackers of one run; of several, each run is called after --track-name and its
        folder.
        """
        own = folder.resolve().name
        name = own if self.name is None else f"{self.name}-{own}" if self.several else self.name
        return open_trackers(self.names, folder, self.project, name, config, say)
