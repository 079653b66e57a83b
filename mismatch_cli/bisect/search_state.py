"""A search in progress: what every stage needs, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.bisect.effects import Effects
from mismatch_cli.bisect.experiments import (
    AS_RECORDED,
    LEGS,
    NOT_REACHED,
    Experiment,
    Leg,
    Pair,
    Search,
    leg_names,
)
from mismatch_cli.bisect.fixed_tokens import FixedTokens, choose, versions
from mismatch_cli.bisect.legs import Legs, write_as_recorded
from mismatch_cli.bisect.ranking import RECORDED, LegDifferences, is_explained, measured_in, rank
from mismatch_cli.bisect.runner import Runner
from mismatch_cli.bisect.search_config import STAGES, BisectConfig
from mismatch_cli.bisect.side_settings import RolloutSide, TrainerSide
from mismatch_cli.metrics.estimate import NO_SPREAD, Estimate
from mismatch_cli.models.engines import engine_module
from mismatch_cli.models.loading import check_model_folder
from mismatch_cli.models.rank_shares import Ranks
from mismatch_cli.models.torch_settings import set_threads
from mismatch_cli.probe.rollouts import RecordingProgress
from mismatch_cli.trace.manifest import FILE_NAME, VOCABULARY, read_manifest
from mismatch_cli.trace.ownership import remove_results
from mismatch_cli.trace.reader import Trace

_NARROW = 0.05  # of the gap: width of an interval that is narrow enough
_FIRST_THAT_MAY_FAIL = 2  # from this stage on, an error still reports what earlier stages found


class OutOfBudgetError(Exception):
    """The minutes of --budget are over; the search so far is reported."""


@dataclass
class Searching:
    """What to search, the experiments so far, and the deadline."""

    config: BisectConfig
    runner: Runner
    search: Search
    progress: RecordingProgress
    ranks: Ranks
    deadline: float | None

    @classmethod
    def begin(
        cls,
        config: BisectConfig,
        source: Trace,
        folder: Path,
        progress: RecordingProgress,
        ranks: Ranks,
        fresh: bool,
    ) -> Searching:
        """Choose the tokens unless already chosen, and determine both sides; `fresh` removes an
        earlier search first.
        """
        chosen = folder / LEGS / AS_RECORDED
        begun = (chosen / FILE_NAME).is_file() and not fresh
        # The source may have changed since the tokens were chosen from it.
        manifest = read_manifest(chosen) if begun else source.manifest
        rollout = RolloutSide.of(manifest, config)
        trainer = TrainerSide.of(manifest, config, rollout)
        if not begun:
            check_model_folder(trainer.config.scoring_model)
            if not engine_module(rollout.engine).REMOTE:
                check_model_folder(rollout.model)
        with ranks.first_before_others() as first:
            # The probe of a model is in the folder by now, and is what this search reads.
            if first and fresh and not config.is_model:
                remove_results(folder)
            if first and not begun:
                _choose_tokens(source, config, chosen)
        legs = Legs(folder, FixedTokens.read(chosen), progress, ranks)
        set_threads(config.cpu.threads, trainer.config.scoring_model)
        deadline = None
        if config.budget is not None:
            deadline = time.monotonic() + 60 * config.budget
        runner = Runner(legs, rollout, trainer)
        return cls(config, runner, Search.of(folder), progress, ranks, deadline)

    def stage(self, number: int, *works: Callable[[Searching], None]) -> None:
        """Run a stage unless it is done, not wanted, no longer needed, or out of time."""
        earlier = self.search.stages.get(str(number), {})
        if self.first_says(earlier.get("status") == "done"):
            return
        if number not in self.config.wanted:
            self.leave_out([number], "skipped", "not asked for")
        elif self.is_explained():
            self.leave_out([number], "not needed", "the gap is explained")
        else:
            self._work(number, works, earlier.get("seconds", 0.0))

    def _work(
        self, number: int, works: Iterable[Callable[[Searching], None]], earlier_seconds: float
    ) -> None:
        started = time.perf_counter()
        self.progress.say(f"Stage {number}: {STAGES[number]}")
        status, why = "done", ""
        try:
            self.check_time()
            for work in works:
                work(self)
        except OutOfBudgetError:
            status = NOT_REACHED
            why = f"the {self.config.budget:g} minutes of --budget were over"
        except MismatchError as error:
            if number < _FIRST_THAT_MAY_FAIL:
                raise
            status, why = "skipped", str(error)
            self.progress.say(f"Stage {number} stops here: {error}")
        seconds = time.perf_counter() - started + earlier_seconds
        self.search.stages[str(number)] = {"status": status, "why": why, "seconds": seconds}
        self.save()

    def leave_out(self, numbers: Iterable[int], status: str, why: str) -> None:
        """Record why stages were not run."""
        for number in numbers:
            self.search.stages[str(number)] = {"status": status, "why": why, "seconds": 0.0}
        self.save()

    def measured(self) -> LegDifferences:
        """All legs that are on disk now."""
        legs = self.runner.legs
        return measured_in(legs.tokens, leg_names(legs.run_folder), legs.column)

    def is_explained(self) -> bool:
        """Whether the causes so far leave too little of the gap to keep searching."""
        measured = self.measured()
        ranking = rank(measured, self.search, details=False)
        pairs = [row.experiment.after for row in ranking.named]
        if self.search.pair_together is not None:
            pairs.append(self.search.pair_together)
        return self.first_says(any(is_explained(measured, pair) for pair in pairs))

    def helping(self) -> list[Experiment]:
        """Changes of either side that reduce the gap, largest first."""
        ranking = rank(self.measured(), self.search, details=False)
        causes = [row.experiment for row in ranking.named]
        # Reading a recorded column again is an experiment, but changes neither side.
        return [experiment for experiment in causes if experiment.before != RECORDED]

    def share(self, after: Pair) -> Estimate:
        """The share of the recorded gap that a pair of legs removes, compared with the unchanged
        sides.
        """
        measured = self.measured()
        recorded = measured.sums(RECORDED)
        before = measured.sums(self.search.base)
        return Effects(measured.tokens).share(recorded, before, measured.sums(after))

    def enough(self, after: Callable[[Leg], Pair]) -> Callable[[Leg], bool]:
        """A test of whether an experiment's share is precise enough; `after` gives its pair from
        the leg being read.
        """

        def narrow(leg: Leg) -> bool:
            share = self.share(after(leg))
            if share.low is None or share.high is None:
                return share.note == NO_SPREAD
            return share.high - share.low < _NARROW

        return narrow

    def add(self, *experiments: Experiment) -> None:
        """Add what was measured."""
        self.search.add(experiments, write=self.ranks.world.first)

    def cannot_try(self, setting: str, side: str, better: Any, why: str) -> None:
        """Record why a setting was not changed, in place of an earlier reason."""
        self.progress.say(f"{setting} = {better} cannot be tried here: {why}")
        self.forget_untried(setting, side)
        self.search.untried.append({"setting": setting, "side": side, "better": better, "why": why})
        self.save()

    def forget_untried(self, setting: str, side: str) -> None:
        """Forget that a setting could not be changed before."""
        self.search.untried = [
            row for row in self.search.untried if (row["setting"], row["side"]) != (setting, side)
        ]

    def check_time(self) -> None:
        """Raise an `OutOfBudgetError` once the minutes are over."""
        is_over = self.deadline is not None and time.monotonic() > self.deadline
        if self.first_says(is_over):
            raise OutOfBudgetError

    def first_says(self, answer: bool) -> bool:
        """The first rank's answer, on all ranks: clocks and files may differ between them."""
        return self.ranks.world.broadcast(answer)

    def save(self) -> None:
        """Write the search so far, for `--resume`."""
        if self.ranks.world.first:
            self.search.save()


def _choose_tokens(source: Trace, config: BisectConfig, folder: Path) -> None:
    """Write the responses that every experiment reads, as recorded."""
    # If the trainer has no model of its own, both sides load one: log π must be at its weights.
    equal = not _names_both_models(source, config)
    tables = choose(source, config.responses, _version(source, config), equal=equal)
    write_as_recorded(folder, tables, source.manifest, source.folder / VOCABULARY, equal=equal)


def _names_both_models(source: Trace, config: BisectConfig) -> bool:
    """Whether both sides' weights are known, so that log π may be at weights other than those
    that sampled.
    """
    return config.scorer.model is not None or source.manifest.get("command") in (
        "probe",
        "rescore",
        "curate",
    )


def _version(source: Trace, config: BisectConfig) -> int | None:
    """The version of the sampling weights to read; a `UsageError` if the trace has several and
    none was named.
    """
    if config.version is not None:
        return config.version
    sampled = versions(source)
    if len(sampled) <= 1:
        return None
    # The model that the manifest names has the weights of version 0; a typed one may have any.
    if config.engine.model or 0 not in sampled:
        raise UsageError(
            f"{source.folder} was sampled at {len(sampled)} versions of the weights "
            f"({sampled[0]} to {sampled[-1]}), but a model has only one of them. Say which: "
            f"version = {sampled[0]}"
        )
    return sampled[0]
