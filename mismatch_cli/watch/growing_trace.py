"""A growing trace: which steps its shards contain, and which of these are complete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

from mismatch_cli.trace.manifest import promised_rows, shards_in
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.recorder_notes import NOTE, RECORD, manifest_with_notes, rank_of, read_note
from mismatch_cli.trace.shards import DamagedShard, footer_of, open_shard, read_group
from mismatch_cli.watch.training_run import CompleteStep, changed


class StepsOfShards:
    """The shards of some traces by the steps that they contain, each of them read once."""

    def __init__(self) -> None:
        # Shards are kept as FOLDER/SHARD, and folders by name: a path takes ten times the memory.
        self._folders: dict[str, Path] = {}
        self._shards_of_step: dict[int, tuple[str, ...]] = {}
        self._read: set[str] = set()
        self._highest: dict[str, int] = {}  # step by rank
        # Shards that may still be copied here: retried at each look
        self.unreadable: dict[Path, str] = {}

    @property
    def newest(self) -> int | None:
        return max(self._shards_of_step, default=None)

    def add(self, folder: Path) -> set[int]:
        """Look at the new shards of a trace; return the steps that they contain."""
        self._folders[folder.name] = folder
        return set[int]().union(*map(self._add_shard, shards_in(folder)))

    def _add_shard(self, shard: Path) -> set[int]:
        name = f"{shard.parent.name}/{shard.name}"
        if name in self._read:
            return set()
        try:
            steps = _steps_in(shard)
        except DamagedShard as error:
            self.unreadable[shard] = str(error)
            return set()
        self.unreadable.pop(shard, None)
        self._read.add(name)
        for step in steps:
            self._shards_of_step[step] = (*self._shards_of_step.get(step, ()), name)
        rank = rank_of(shard)
        self._highest[rank] = max(self._highest.get(rank, 0), *steps, 0)
        return steps

    def passed(self, rank: str) -> float:
        """The highest step that a rank has passed, by starting a later one."""
        return self._highest.get(rank, 0) - 1

    def ready(self, steps: set[int], reported: Callable[[int], str]) -> Iterator[CompleteStep]:
        """These steps in order, each with only its own rows, except those already `reported` with
        the same shards.
        """
        for step in sorted(steps):
            names = sorted(self._shards_of_step[step])
            shards = sha256("\n".join(names).encode()).hexdigest()[:16]
            if shards != reported(step):
                yield CompleteStep(step, None, self._traces(step), shards)

    def _traces(self, step: int) -> list[Trace]:
        """The traces that contain a step, each with only the rows of the step."""
        among = defaultdict[Path, list[Path]](list)
        for name in self._shards_of_step[step]:
            folder, _, shard = name.rpartition("/")
            among[self._folders[folder]].append(self._folders[folder] / shard)
        return [Trace(folder).of_step(step, shards) for folder, shards in among.items()]


def _steps_in(shard: Path) -> set[int]:
    """The steps that a shard contains."""
    steps: set[int] = set()
    footer = footer_of(shard)
    for group, ranges in enumerate(footer.ranges):
        low, high = ranges.get("step", (0, -1))
        if high - low <= 1:
            steps.update(range(low, high + 1))
        else:
            # Between the first and the last step there may be gaps, as in a run that records every
            # tenth step: the column itself says which steps there are.
            table = read_group(open_shard(shard), group, ["step"], shard)
            steps.update(table.column("step").unique().to_pylist())
    return steps


class GrowingTrace:
    """A `Recorder`'s folder, or any other trace: a step is complete once every rank has started
    a later one.
    """

    kind = "trace"

    def __init__(self, folder: Path, reported: Callable[[int], str]) -> None:
        """`reported`: the shards of a step when it was reported; empty if it was not."""
        self._folder = folder
        self._reported = reported
        self._steps = StepsOfShards()
        self._open: set[int] = set()  # steps not reported yet, or grown since
        self._limit = -inf
        self.algorithm = str(manifest_with_notes(folder).get("algorithm", ""))

    @property
    def newest(self) -> int | None:
        return self._steps.newest

    @property
    def waiting(self) -> str:
        """Existing data that cannot be read yet."""
        return next(iter(self._steps.unreadable.values()), "")

    @property
    def is_over(self) -> bool:
        """Whether every rank has closed its recording; for another trace, whether all of its
        shards exist.
        """
        return self._limit == inf and not self._steps.unreadable

    @property
    def changed(self) -> float:
        """When its newest shard was written, in seconds since 1970."""
        files = [*shards_in(self._folder), self._folder / "manifest.json"]
        return max(map(changed, files))

    def look(self, *, final: bool) -> Iterator[CompleteStep]:
        """The steps completed since the last look; all existing ones if `final`."""
        # Notes are read before shards. A rank that has closed wrote its last shard before that, so
        # none of its shards can be missed; the other way round, one could appear in between.
        manifest = manifest_with_notes(self._folder)
        notes = self._notes()
        self._open |= self._steps.add(self._folder)
        if manifest.get("command") == RECORD:
            self._limit = self._limit_of_ranks(notes)
        else:
            self._limit = self._limit_of_shards(manifest)
        complete = {step for step in self._open if final or step <= self._limit}
        self._open -= complete
        return self._steps.ready(complete, self._reported)

    def _notes(self) -> list[dict[str, Any]]:
        return [read_note(path) for path in sorted(self._folder.glob(NOTE.replace("{:05d}", "*")))]

    def _limit_of_ranks(self, notes: list[dict[str, Any]]) -> float:
        """The last complete step of a `Recorder`; infinite once all ranks have closed."""
        if not notes:
            return -inf
        limit = inf
        for note in notes:
            if not note["closed"]:
                limit = min(limit, self._steps.passed(f"{note['rank']:05d}"))
        return limit

    def _limit_of_shards(self, manifest: Mapping[str, Any]) -> float:
        """The last complete step of another trace; infinite once all promised shards exist."""
        promised = promised_rows(manifest)
        existing = {path.name for path in shards_in(self._folder)}
        if promised is None or promised.keys() <= existing:
            return inf
        return self._steps.passed("")
