"""`--track` and its companions: where the numbers of a run go besides metrics.jsonl, and in whose words."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mismatch_cli.commands._completed import frameworks
from mismatch_cli.options import setting
from mismatch_cli.trackers import PROJECT, Trackers, asked, names, open_trackers

_of_trackers = partial(setting, panel="Trackers")
TRACK: list[str] | None = _of_trackers(
    None,
    f"Also log each step to {', '.join(names())}; several with commas.",
    metavar="NAME,NAME",
    completes=names,
    show_default="none",
)
TRACK_PROJECT: str = _of_trackers(PROJECT, "Project that the trackers put the run into.", metavar="NAME")
TRACK_NAME: str | None = _of_trackers(
    None, "What the trackers call the run.", metavar="NAME", show_default="its folder"
)
AS_FRAMEWORK: str | None = _of_trackers(
    None,
    "Also log what this framework's dashboard would show, by its names, such as verl or trl.",
    flag="--as",
    metavar="FRAMEWORK",
    choices=("framework", frameworks),
    show_default="none",
)


@dataclass(frozen=True)
class Tracking:
    """What was asked for, and checked."""

    names: Sequence[str]
    project: str
    name: str | None
    framework: str
    several: bool

    @classmethod
    def asked(
        cls, track: Sequence[str] | None, project: str, name: str | None, framework: str | None, *, several: bool
    ) -> "Tracking":
        """A `MismatchError` for a tracker that is unknown or not installed."""
        return cls(asked(track), project, name, framework or "", several)

    def of(
        self, folder: Path, config: Mapping[str, Any], say: Callable[[str], None]
    ) -> AbstractContextManager[Trackers]:
        """The trackers of one run; of several, each has the name that was given and that of its folder."""
        own = folder.resolve().name
        name = own if self.name is None else f"{self.name}-{own}" if self.several else self.name
        return open_trackers(self.names, folder, self.project, name, config, say)
