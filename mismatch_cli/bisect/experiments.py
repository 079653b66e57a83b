"""What a search has done so far, as kept in `search.json` of its run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import MismatchError, unreadable
from mismatch_cli.base.text import parse_json
from mismatch_cli.bisect import SEARCH_FILE
from mismatch_cli.trace.files import write_atomically
from mismatch_cli.trace.manifest import FILE_NAME as MANIFEST
from mismatch_cli.trace.manifest import shards_in

FORMAT = "mismatch-cli search"
ROLLOUT, TRAINER = "rollout", "trainer"
LEGS = "legs"  # their folder inside the run folder
AS_RECORDED = "as-recorded"  # the leg that the others are compared with
NOT_REACHED = "not reached"  # the status of a stage that the budget cut short
Change = Mapping[str, Any]  # to one side: see `side_settings.py`
Pair = tuple[str, str]  # the names of a leg of the rollout and one of the trainer


@dataclass(frozen=True)
class Leg:
    """One side under one change; reports call it `what`."""

    name: str
    side: str
    what: str
    change: Change = field(default_factory=dict)


# The unchanged sides, read in every way that needs no other settings, and the reference trainer.
DECODED = Leg("rollout-again", ROLLOUT, "engine, decoding again")
WHOLE = Leg("rollout-prefill", ROLLOUT, "engine, whole responses at once", {"prefill": True})
ALONE = Leg("rollout-alone", ROLLOUT, "engine, one response at a time", {"alone": True})
UNCACHED = Leg("rollout-uncached", ROLLOUT, "engine, without a prefix cache", {"cached": False})
SCORED = Leg("trainer-again", TRAINER, "trainer, scoring again")
OTHER_SHAPE = Leg(
    "trainer-other-shape", TRAINER, "trainer, other micro-batches", {"other_shape": True}
)
REFERENCE = Leg(
    "trainer-float32",
    TRAINER,
    "trainer in float32",
    {"trainer_dtype": "float32", "float32_head": False},
)


@dataclass(frozen=True)
class Experiment:
    """One change: the pairs of legs before and after it, and how reports describe it."""

    setting: str  # as the manifest names it, a tensor, or a kind of modules
    side: str
    stage: int
    before: Pair
    after: Pair
    change: str  # what to do, a clause
    value: Any = None
    better: Any = None
    flags: tuple[str, ...] = ()
    floor: bool = False
    parts: tuple[str, ...] = ()

    @property
    def position(self) -> int:
        """Which leg of its pairs changes: 0, the rollout's, or 1, the trainer's."""
        return 0 if self.after[0] != self.before[0] else 1


@dataclass
class Search:
    """The state of a search, except for the legs themselves."""

    folder: Path
    gap: float = 0.0  # mean |Δlog p| as recorded, nats
    experiments: list[Experiment] = field(default_factory=list)
    # By number: status, why, seconds
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[dict[str, Any]] | None = None  # of the diagnosis
    weights: dict[str, Any] | None = None
    modules: dict[str, Any] | None = None
    # Settings that could not be changed here, and why
    untried: list[dict[str, Any]] = field(default_factory=list)
    together: dict[str, Any] | None = None
    base: Pair = (AS_RECORDED, AS_RECORDED)
    flags: dict[str, Any] | None = None  # what was typed, for --resume
    # The `probe` run that was searched, whose settings `probe --like` copies
    like: str | None = None

    @classmethod
    def of(cls, folder: Path) -> Search:
        """The search in a run folder, or a new one if it has none."""
        if not (folder / SEARCH_FILE).is_file():
            return cls(folder)
        content = read_search(folder)
        content["experiments"] = [_experiment(saved) for saved in content["experiments"]]
        content["base"] = tuple(content["base"])
        names = {each.name for each in fields(cls)} & content.keys()
        return cls(folder, **{name: content[name] for name in names})

    @property
    def pair_together(self) -> Pair | None:
        """The legs with all needed settings changed at once; None where no two settings help."""
        if self.together is None:
            return None
        engine, trainer = self.together["after"]
        return engine, trainer

    def save(self) -> None:
        """Write `search.json` by atomic rename."""
        content: dict[str, Any] = {"format": FORMAT, "version": 1}
        content |= {each.name: getattr(self, each.name) for each in fields(self)}
        del content["folder"]
        content["experiments"] = [asdict(experiment) for experiment in self.experiments]
        write_atomically(self.folder / SEARCH_FILE, json.dumps(content, indent=1) + "\n")

    def add(self, experiments: Sequence[Experiment], *, write: bool = True) -> None:
        """Add these, replacing those with the same setting and legs."""
        keys = {_key(experiment) for experiment in experiments}
        others = [experiment for experiment in self.experiments if _key(experiment) not in keys]
        self.experiments = [*others, *experiments]
        if write:
            self.save()


def leg_names(run_folder: Path) -> list[str]:
    """The legs of a run folder that have read something."""
    names = []
    for manifest in (run_folder / LEGS).glob(f"*/{MANIFEST}"):
        # A search that was killed may leave a manifest without shards.
        if shards_in(manifest.parent):
            names.append(manifest.parent.name)
    return sorted(names)


def read_search(folder: Path) -> dict[str, Any]:
    """The content of `search.json`; a `MismatchError` if it is damaged."""
    path = folder / SEARCH_FILE
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable(path, error, "Start again with --force.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise MismatchError(f"{path} was not written by `bisect`. Choose another --output.")
    return content


def _key(experiment: Experiment) -> tuple[Any, ...]:
    return experiment.setting, experiment.side, experiment.after


def _experiment(saved: Mapping[str, Any]) -> Experiment:
    # JSON has lists for tuples, by which experiments are compared.
    tuples = {name: tuple(saved[name]) for name in ("before", "after", "flags", "parts")}
    return Experiment(**{**saved, **tuples})
