"""The result of a search: causes with the share of the gap that each explains, the triangle of
legs, the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from mismatch_cli.base.errors import suggest
from mismatch_cli.base.json_form import from_json
from mismatch_cli.base.places import shorten_paths
from mismatch_cli.bisect.decoding import decode_against_prefill
from mismatch_cli.bisect.effects import MEASURES, Effects, GapSums
from mismatch_cli.bisect.experiments import (
    ALONE,
    AS_RECORDED,
    DECODED,
    LEGS,
    NOT_REACHED,
    OTHER_SHAPE,
    REFERENCE,
    ROLLOUT,
    SCORED,
    TRAINER,
    WHOLE,
    Pair,
    Search,
    leg_names,
)
from mismatch_cli.bisect.fixed_tokens import FixedTokens
from mismatch_cli.bisect.ranking import (
    ALL_MODULES,
    NO_GAP,
    RECORDED,
    ExperimentEffects,
    LegDifferences,
    Ranking,
    measured_in,
    noise_of,
    rank,
)
from mismatch_cli.bisect.search_config import STAGES
from mismatch_cli.bisect.studies.bisection_result import (
    BisectionResult,
    CauseRow,
    CombinedChanges,
    ComparedModels,
    Cost,
    Fault,
    LegRow,
    LegsOfCause,
    Measures,
    Modules,
    StageRow,
    Triangle,
    UntriedRow,
)
from mismatch_cli.bisect.studies.model_differences import ModelDifferences
from mismatch_cli.limits.causes import CAUSES, cause_rank
from mismatch_cli.metrics.estimate import NO_SPREAD, Estimate
from mismatch_cli.probe.config import suggest_probe
from mismatch_cli.studies.study import Study, relative_to_here, who_is_compared
from mismatch_cli.trace.manifest import read_manifest
from mismatch_cli.trace.origin import About
from mismatch_cli.trace.reader import Trace

_MOST_NAMED = 3  # causes in the verdict
_OUTCOME = {True: "found", False: "yet"}  # by whether the search is finished
_LEAST_BUDGET = 10.0  # minutes: a search of a small model takes 1 to 3
_WHY_MODULES = "both sides compute these modules differently on the same input"
_WHY_WEIGHTS = "the engine and the trainer hold different numbers"


class MovedToken(NamedTuple):
    """A token whose gap a cause moves: its place among the fixed tokens, and Δlog p before and
    after, nats.
    """

    response: int
    position: int
    before: float
    after: float


@dataclass(frozen=True)
class BisectionAnalysis(Study):
    """A search that ended or was stopped, read from its folder."""

    STUDY: ClassVar[str] = "bisection"
    FORMAT: ClassVar[str] = "mismatch-cli bisection"

    folder: Path
    search: Search
    measured: LegDifferences

    @classmethod
    def read(cls, folder: Path) -> BisectionAnalysis:
        """Read a run folder of `bisect`, without running a model."""
        tokens = FixedTokens.read(folder / LEGS / AS_RECORDED)

        @cache
        def column(leg: str, side: str) -> np.ndarray:
            return tokens.flat(folder / LEGS / leg, f"logp_{side}")

        return cls(folder, Search.of(folder), measured_in(tokens, leg_names(folder), column))

    @cached_property
    def trace(self) -> Trace:
        """The responses that every experiment reads, as recorded."""
        return Trace.open(self.folder / LEGS / AS_RECORDED)

    @property
    def subject(self) -> str:
        """What is compared, for the line below each figure."""
        return who_is_compared(self.trace.manifest)

    @cached_property
    def ranking(self) -> Ranking:
        return rank(self.measured, self.search)

    @property
    def is_equal(self) -> bool:
        """Whether both sides agree to float32 rounding, so that there is nothing to explain."""
        return self.search.gap < NO_GAP

    @property
    def causes(self) -> tuple[ExperimentEffects, ...]:
        return self.ranking.causes

    @cached_property
    def effects(self) -> Effects:
        return Effects(self.measured.tokens)

    @property
    def recorded(self) -> GapSums:
        return self.measured.sums(RECORDED)

    def has(self, leg: str) -> bool:
        """Whether the leg was read."""
        return leg == AS_RECORDED or leg in leg_names(self.folder)

    # Distances between legs

    @cached_property
    def triangle(self) -> Triangle:
        """Distances between engine, trainer, and the trainer in float32, and their noise."""
        engine, reference = self.search.base[0], self._reference
        # A float32 trainer is its own reference, from which it has no distance.
        trainer_reference = None
        if reference == REFERENCE.name:
            trainer_reference = self._apart(TRAINER, SCORED.name, reference)
        apart = self._apart(ROLLOUT, DECODED.name, WHOLE.name)
        return Triangle(
            as_recorded=self.effects.gap(self.recorded),
            decode_prefill=apart,
            rollout_noise=self._apart(ROLLOUT, DECODED.name, ALONE.name),
            trainer_noise=self._apart(TRAINER, SCORED.name, OTHER_SHAPE.name),
            rollout_reference=self._gap((engine, reference)) if reference else None,
            trainer_reference=trainer_reference,
            prefill_reference=self._gap((WHOLE.name, reference)) if reference else None,
            nearer=self._nearer(engine),
            decode_prefill_is=self._decode_prefill(apart, reference),
        )

    @property
    def _reference(self) -> str | None:
        """The leg of the trainer in float32, which may be its own one; None if it was not read."""
        if self.has(REFERENCE.name):
            return REFERENCE.name
        if self.has(SCORED.name):
            scored = read_manifest(self.folder / LEGS / SCORED.name)[TRAINER]
            if scored.get("dtype") == "float32":
                return SCORED.name
        return None

    def _decode_prefill(self, apart: Estimate | None, reference: str | None) -> str | None:
        """What sets decoding and prefill apart; None if they were not both read, or the trainer
        not in float32.
        """
        if apart is None or reference is None:
            return None
        decoded = self.measured.sums((DECODED.name, reference))
        prefilled = self.measured.sums((WHOLE.name, reference))
        return decode_against_prefill(self.effects, apart, decoded, prefilled)

    def _apart(self, side: str, first: str, other: str) -> Estimate | None:
        if not (self.has(first) and self.has(other)):
            return None
        return self.effects.gap(self.measured.apart(side, first, other))

    def _gap(self, pair: Pair) -> Estimate | None:
        if not all(map(self.has, pair)):
            return None
        return self.effects.gap(self.measured.sums(pair))

    def _nearer(self, engine: str) -> str | None:
        """The side closer to the float32 trainer with 95 % confidence; None if neither is, or if
        it is the trainer.
        """
        if not (self.has(REFERENCE.name) and self.has(SCORED.name)):
            return None
        trainer = self.measured.apart(TRAINER, SCORED.name, REFERENCE.name)
        farther = self.effects.change(trainer, self.measured.sums((engine, REFERENCE.name)))
        if farther.low is None or farther.high is None:
            return None
        if farther.low > 0:
            return TRAINER
        return ROLLOUT if farther.high < 0 else None

    @cached_property
    def noise(self) -> Estimate | None:
        """The larger of both sides' noise, as a share of the gap."""
        shares = noise_of(self.measured)
        return max(shares, key=lambda share: share.value or 0.0, default=None)

    @cached_property
    def unexplained(self) -> Estimate:
        """The smallest share of the gap that any experiment leaves."""
        pairs = [row.experiment.after for row in self.causes]
        pairs += [e.after for e in self.search.experiments if e.setting == ALL_MODULES]
        return self._least_left(pairs)

    @property
    def named(self) -> tuple[ExperimentEffects, ...]:
        return self.ranking.named

    @property
    def floor(self) -> ExperimentEffects | None:
        """What the precision that both sides share causes."""
        for row in self.causes:
            if row.experiment.floor:
                return row
        return None

    @cached_property
    def remaining(self) -> Estimate:
        """The share of the gap left without the named causes, as far as they were removed
        together.
        """
        return self._least_left([row.experiment.after for row in self.named])

    def _least_left(self, pairs: list[Pair]) -> Estimate:
        """The smallest share of the gap left between any of these legs, or with all helpful changes
        together; 1 without any.
        """
        if self.search.pair_together is not None:
            pairs = [*pairs, self.search.pair_together]
        shares = [self.effects.left(self.recorded, self.measured.sums(pair)) for pair in pairs]
        return min(shares, key=_value_or_1, default=Estimate(1.0))

    def key(self, response: int) -> tuple[int, int, int]:
        """Step, prompt and sample of one of the fixed responses."""
        return self._keys[response]

    @cached_property
    def _keys(self) -> list[tuple[int, int, int]]:
        return list(self.measured.tokens.keys)

    def moved(self, row: ExperimentEffects, count: int) -> list[MovedToken]:
        """The tokens whose gap a cause moves most, largest move first."""
        tokens = self.measured.tokens
        before_T, after_T = self._d_T(row.experiment.before), self._d_T(row.experiment.after)
        moved_T = np.where(tokens.counts_T, np.nan_to_num(np.abs(before_T) - np.abs(after_T)), 0.0)
        most_N = np.argsort(-moved_T)[:count]
        most_N = most_N[moved_T[most_N] > 0]
        response_N = np.searchsorted(tokens.offset_S1, most_N, side="right") - 1
        position_N = most_N - tokens.offset_S1[response_N]
        columns = (response_N, position_N, before_T[most_N], after_T[most_N])
        return list(map(MovedToken, *map(np.ndarray.tolist, columns)))

    def _d_T(self, pair: Pair) -> np.ndarray:
        rollout, trainer = pair
        return self.measured.logp_T(trainer, TRAINER) - self.measured.logp_T(rollout, ROLLOUT)

    # The answer

    @cached_property
    def differences(self) -> tuple[str, ...]:
        """How the two models differ, a clause each, whatever share of the gap that causes."""
        without_effect = set()
        for row in self.ranking.tested:
            # Equal for all prompts, and 0: the two values compute the same.
            if row.share.note == NO_SPREAD and not row.share.value:
                without_effect.add(row.experiment.setting)
        return tuple(self.models.clauses(without_effect))

    @cached_property
    def models(self) -> ModelDifferences:
        """What stage 0 says of the two models."""
        weights = self.search.weights or {}
        return ModelDifferences(from_json(ComparedModels, weights), were_compared=bool(weights))

    @cached_property
    def modules(self) -> Modules | None:
        """What stage 3 says of the modules; None if it compared none."""
        if not self.search.modules:
            return None
        return from_json(Modules, self.search.modules)

    @cached_property
    def faults(self) -> list[Fault]:
        """What `diagnose` found in the recorded columns."""
        return [from_json(Fault, fault) for fault in self.search.findings or ()]

    @cached_property
    def stages(self) -> list[StageRow]:
        """Every stage, also those that the search did not reach."""
        stopped = {"status": NOT_REACHED, "why": "the search was stopped", "seconds": 0.0}
        rows = []
        for number, name in STAGES.items():
            rows.append(StageRow(number, name, **self.search.stages.get(str(number), stopped)))
        return rows

    @property
    def not_tested(self) -> tuple[str, ...]:
        """The stages for which there was no time, or not enough."""
        begun = {experiment.stage for experiment in self.search.experiments}
        names = []
        for row in self.stages:
            if row.status == NOT_REACHED:
                names.append(f"the rest of {row.name}" if row.stage in begun else row.name)
        return tuple(names)

    @property
    def larger_budget(self) -> float | None:
        """Minutes in which the rest may be tested; None if none were set."""
        budget = (self.search.flags or {}).get("budget")
        if budget is None:
            return None
        return max(_LEAST_BUDGET, 2 * float(budget))

    @property
    def is_finished(self) -> bool:
        """Whether nothing more would be tested."""
        return self.is_equal or not self.not_tested

    @cached_property
    def verdict(self) -> str:
        """How the models differ, the causes with their shares, the noise, and what is left."""
        if self.is_equal:
            return "Nothing to explain: both sides agree to float32 rounding."
        sentences = [f"{clause}." for clause in self.differences]
        if not self.is_finished:
            sentences.append(f"Not tested: {', '.join(self.not_tested)}.")
        return " ".join([*sentences, self._shares_in_words])

    @property
    def _shares_in_words(self) -> str:
        named, floor = self.named[:_MOST_NAMED], self.floor
        shares = [f"{row.experiment.setting} {in_percent(row.share)}" for row in named]
        if floor is not None:
            shares.append(f"{floor.experiment.value} itself {in_percent(floor.share)}")
        if self.noise is not None:
            shares.append(f"noise {in_percent(self.noise)}")
        shares.append(f"unexplained {in_percent(self.unexplained)}")
        sentence = ", ".join(shares)
        if not named and floor is None:
            sentence = f"No cause {_OUTCOME[self.is_finished]}: {sentence}"
        if self.overlap and self.overlap > 0.05:
            sentence += " (shares overlap)"
        return f"{sentence}."

    @cached_property
    def overlap(self) -> float | None:
        """By how much the shares of the causes exceed what all of them explain together; None
        for a single cause.
        """
        if len(self.named) <= 1:
            return None
        together = 1 - (self.remaining.value or 0.0)
        return max(0.0, sum(row.removes for row in self.named) - together)

    def name(self, row: ExperimentEffects) -> str:
        """A cause's name: a setting with its side; a kind of module, or a column, belongs to
        both sides.
        """
        experiment = row.experiment
        if experiment.floor:
            return f"{experiment.value} itself"
        if experiment.stage == 3 or experiment.setting.startswith("logp_"):
            return experiment.setting
        return f"{experiment.setting} ({experiment.side})"

    def why(self, row: ExperimentEffects) -> str:
        """How a cause opens a gap, as a clause."""
        experiment = row.experiment
        if experiment.stage == 3:
            return _WHY_MODULES
        side = ROLLOUT if experiment.side == "both" else experiment.side
        for name in (f"{side}.{experiment.setting}", f"config.sampling.{experiment.setting}"):
            rank_from_1 = cause_rank(name)
            if rank_from_1:
                return CAUSES[rank_from_1 - 1].why
        fault = self._fault(row)
        return _WHY_WEIGHTS if fault is None else fault.cause

    def _fault(self, row: ExperimentEffects) -> Fault | None:
        """The finding of `diagnose` with the name of a cause."""
        for fault in self.faults:
            if fault.setting == row.experiment.setting:
                return fault
        return None

    def command(self, row: ExperimentEffects) -> list[str]:
        """The commands that show what a cause explains, also on new samples if the probe can be
        repeated.
        """
        legs, experiment = self.folder / LEGS, row.experiment
        changed = legs / experiment.after[experiment.position]
        lines = [suggest("compare", legs / AS_RECORDED, changed)]
        if experiment.flags and self.search.like:
            like = relative_to_here(Path(self.search.like))
            lines.append(suggest_probe("--like", like, *experiment.flags))
        return lines

    def cost(self, row: ExperimentEffects) -> Cost | None:
        """Seconds per response with the change, relative to without it, on the side that
        changes.
        """
        experiment = row.experiment
        before = self._seconds(experiment.before[experiment.position])
        after = self._seconds(experiment.after[experiment.position])
        # All grafts are read together, and each of their legs has the time of all.
        if before is None or after is None or experiment.stage == 3:
            return None
        return Cost(after / before, before, after)

    def _seconds(self, leg: str) -> float | None:
        """Seconds per response in a leg; None if it was not read here."""
        row = self._leg(leg)
        if not (row.seconds and row.responses):
            return None
        return row.seconds / row.responses

    @cached_property
    def result(self) -> BisectionResult:
        """What `--json` prints and `summary.json` holds."""
        tokens, search = self.measured.tokens, self.search
        return BisectionResult(
            trace=str(shorten_paths(self.folder)),
            about=About.of([self.trace], 0),
            responses=tokens.num_responses,
            prompts=len(np.unique(tokens.prompt_id_S)),
            tokens=int(self.recorded.tokens_S.sum()),
            gap=self._measures,
            verdict=self.verdict,
            differences=self.differences,
            not_tested=self.not_tested,
            stages=self.stages,
            legs=list(map(self._leg, leg_names(self.folder))),
            triangle=self.triangle,
            causes=self._rows(self.causes),
            tested=self._rows(self.ranking.tested),
            together=self._together(),
            overlap=self.overlap,
            noise=self.noise,
            unexplained=self.unexplained,
            findings=None if search.findings is None else self.faults,
            weights=None if search.weights is None else self.models.weights,
            modules=self.modules,
            untried=[from_json(UntriedRow, untried) for untried in search.untried],
        )

    @property
    def _measures(self) -> Measures:
        return Measures(**{name: self.effects.gap(self.recorded, name) for name in MEASURES})

    def _leg(self, leg: str) -> LegRow:
        about_leg = read_manifest(self.folder / LEGS / leg)["bisect"]
        return from_json(LegRow, about_leg | {"trace": f"{LEGS}/{leg}"})

    def _rows(self, rows: Sequence[ExperimentEffects]) -> list[CauseRow]:
        return [self._row(rank, row) for rank, row in enumerate(rows, start=1)]

    def _row(self, rank: int, row: ExperimentEffects) -> CauseRow:
        experiment, fault = row.experiment, self._fault(row)
        return CauseRow(
            rank=rank,
            name=self.name(row),
            setting=shorten_paths(experiment.setting),
            side=experiment.side,
            stage=experiment.stage,
            value=shorten_paths(experiment.value),
            better=shorten_paths(experiment.better),
            change=shorten_paths(experiment.change),
            floor=experiment.floor,
            cause=self.why(row),
            check=None if fault is None else fault.check,
            share=row.share,
            effect=Measures(**row.change),
            left=row.left,
            cost=self.cost(row),
            command=self.command(row),
            trace=f"{LEGS}/{experiment.after[experiment.position]}",
            legs=LegsOfCause(experiment.before, experiment.after),
            parts=experiment.parts,
        )

    def _together(self) -> CombinedChanges | None:
        together, pair = self.search.together, self.search.pair_together
        if together is None or pair is None:
            return None
        after = self.measured.sums(pair)
        share = self.effects.share(self.recorded, self.measured.sums(self.search.base), after)
        return CombinedChanges(together["settings"], together["after"], share, after.mean())


def _value_or_1(share: Estimate) -> float:
    return 1.0 if share.value is None else share.value


def in_percent(share: Estimate) -> str:
    """`61 % ± 5`."""
    if share.value is None:
        return "unknown"
    spread = ""
    if share.low is not None and share.high is not None:
        spread = f" ± {50 * (share.high - share.low):.0f}"
    return f"{100 * share.value:.0f} %{spread}".replace("-", "−")
