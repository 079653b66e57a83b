"""Traces to a diagnosis, its JSON, and what the figures draw."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from mismatch_cli.base import custom_code
from mismatch_cli.base.errors import suggest
from mismatch_cli.diagnosis.alignment import lag_scan
from mismatch_cli.diagnosis.diagnose import Findings, diagnose, module
from mismatch_cli.diagnosis.evidence import Evidence, EvidenceCollector, Finding, HashLimits
from mismatch_cli.diagnosis.group_estimates import estimate_over_prompts
from mismatch_cli.diagnosis.model import ModelAtHand, model_at_hand
from mismatch_cli.diagnosis.origins import Origin, Traces
from mismatch_cli.diagnosis.sample import Sample
from mismatch_cli.limits.manifest_sides import temperatures_of
from mismatch_cli.limits.suspects import Suspect, suspects
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.pairs import PAIRS, Pair, pairs_in
from mismatch_cli.models.rank_shares import ALL_HERE, Ranks
from mismatch_cli.processes.workers import ALONE, Workers
from mismatch_cli.processes.workers.portions import Portion
from mismatch_cli.processes.workers.reading import executor
from mismatch_cli.studies.diagnosis_result import (
    CoveredTokens,
    DiagnosisResult,
    EvidenceRow,
    FindingRow,
    ResolvedGap,
    SampleSize,
    SuspectRow,
    UnexplainedGap,
)
from mismatch_cli.studies.remedies import clauses_without, has_fixed_models, in_the_framework
from mismatch_cli.studies.settings_compared import settings_diff
from mismatch_cli.studies.study import (
    Study,
    check_poolable,
    folders_of,
    name_of,
    subject_of,
    typed_names,
)
from mismatch_cli.studies.unusable import refuse_unmeasured
from mismatch_cli.trace.origin import About
from mismatch_cli.trace.reader import RowGroup, Trace

_BINS = 16
UNEXPLAINED = "unexplained-gap"
_GIVE_MORE = "Give each untested check what it needs"
_TRIED = "The earlier checkpoint that you named was tried: it shows {answer}."
_ANSWERS = {"found": "stale weights", "clear": "no stale weights", "untested": "nothing"}
_PRECISIONS = frozenset(("rollout.dtype", "trainer.dtype", "trainer.head_dtype"))


@dataclass(frozen=True)
class DiagnosisAnalysis(Study):
    """A diagnosis with its traces; what the figures draw."""

    STUDY, FORMAT, VERSION = "diagnosis", "mismatch-cli diagnosis", 3

    traces: Sequence[Trace]
    diagnosis: Findings
    earlier_model: str | None = None
    trainer_model: str | None = None

    @property
    def sample(self) -> Sample:
        return self.diagnosis.evidence.sample

    @property
    def subject(self) -> str:
        return subject_of(self.traces[0].manifest, self.sample.num_counted)

    @property
    def covered(self) -> CoveredTokens:
        """How much of the traces the sample has."""
        prompts = len(np.unique(self.sample.prompt_id_S))
        return CoveredTokens(self.sample.num_counted, self.sample.num_responses, prompts)

    @cached_property
    def gap(self) -> Estimate:
        """Mean |d| over the sample, nats."""
        return self._mean(np.abs(self.sample.d_N), slice(None))

    @cached_property
    def lags(self) -> dict[int, float]:
        """The gap by lag, nats."""
        return lag_scan(self.sample, self.diagnosis.evidence.alignment)

    @cached_property
    def by_position(self) -> list[tuple[float, Estimate]]:
        """The mean position and the mean relative gap of each sixteenth of the tokens, by
        position; of all tokens, where these are at one position.
        """
        position_N = self.sample.position_T[self.sample.index_N]
        order = np.argsort(position_N, kind="stable")
        # Sixteenths of one position would be the first responses, then others.
        several = len(order) > 0 and position_N[order[0]] < position_N[order[-1]]
        means = []
        for index in np.array_split(order, _BINS if several else 1):
            if len(index):
                position = float(position_N[index].mean())
                means.append((position, self._mean(self._relative_N, index)))
        return means

    @cached_property
    def by_step(self) -> list[tuple[int, Estimate]]:
        """Each step with its mean relative gap."""
        step_N = self.sample.step_S[self.sample.response_N]
        means = []
        for step in np.unique(step_N):
            means.append((int(step), self._mean(self._relative_N, step_N == step)))
        return means

    @property
    def _relative_N(self) -> np.ndarray:
        """|d| relative to that of tokens with the same probability: 1 on average."""
        return self.sample.u_N / (self.sample.u_N.mean() or 1.0)

    @cached_property
    def suspects(self) -> tuple[Suspect, ...]:
        """Settings known to cause gaps that no check has cleared; none if there is no gap.

        A gap beyond all that 16 bits make of this model is not caused by the precisions: these are
        cleared too.
        """
        diagnosis, first = self.diagnosis, self.traces[0]
        if not diagnosis.has_a_gap:
            return ()
        cleared = diagnosis.cleared
        if diagnosis.is_unexplained and diagnosis.evidence.expected.of_this_trace:
            cleared |= _PRECISIONS
        name = str(name_of(first))
        rows = list(suspects(first.manifest, name, diagnosis.evidence.pair.name, cleared))
        typed = (suggest("diagnose", name),)
        for index, suspect in enumerate(rows):
            if suspect.test == typed:  # the test has just been made
                rows[index] = replace(suspect, test=())
        return tuple(rows)

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C ended the readings of the trainer's model."""
        model = self.diagnosis.evidence.model
        return model is not None and model.is_interrupted

    @property
    def has_an_open_gap(self) -> bool:
        """Whether more of the gap than expected is left without a cause."""
        return self.diagnosis.is_unexplained or not self.diagnosis.is_decided

    @property
    def can_be_bisected(self) -> bool:
        """Whether both sides' models are on record, so that `bisect` can score the tokens again."""
        return len(self.traces) == 1 and has_fixed_models(self.traces[0].manifest)

    @property
    def typed_models(self) -> list[str]:
        """The flags for models, as typed."""
        flags = []
        if self.earlier_model:
            flags += ["--earlier-model", self.earlier_model]
        if self.trainer_model:
            flags += ["--trainer-model", self.trainer_model]
        return flags

    def change(self, finding: Finding) -> str:
        """What to change, without what was typed; then in the words of the trace's framework."""
        advice = finding.change or module(finding.check).CHANGE
        flags = self.typed_models[::2]
        fitting = clauses_without(advice, flags)
        if finding.check == UNEXPLAINED and not self.diagnosis.allowed_by_more:
            fitting = clauses_without(fitting, [_GIVE_MORE])
        sentences = [fitting] if fitting else []
        if self.earlier_model and "--earlier-model" in advice:
            stale = next(f for f in self.diagnosis.findings if f.check == "stale-weights")
            sentences.append(_TRIED.format(answer=_ANSWERS[stale.status]))
        setting = self.setting(finding.check)
        if setting:
            sentences.append(f"{setting}.")
        return " ".join(sentences)

    def setting(self, check: str) -> str:
        """What to set in the framework that made the trace; empty if that is not known."""
        return in_the_framework(check, self.traces[0].manifest)

    def line_that_tests(self, needs: str) -> str:
        """The command with what an impossible check needs; empty if that does not help."""
        if not needs:
            return ""
        return suggest("diagnose", name_of(self.traces[0]), *self.typed_models, *needs.split())

    @cached_property
    def result(self) -> DiagnosisResult:
        """What `--json` prints and `summary.json` holds."""
        diagnosis = self.diagnosis
        evidence = diagnosis.evidence
        first = diagnosis.first_cause
        left = diagnosis.unexplained
        settings = [SuspectRow(**vars(suspect)) for suspect in self.suspects]
        return DiagnosisResult(
            traces=folders_of(self.traces),
            about=About.of(self.traces, self._unscored_responses),
            pair=evidence.pair.name,
            responses=evidence.counts.responses,
            sample=SampleSize(self.sample.num_responses, self.sample.num_counted),
            abs_d_mean=self.gap.value,
            faults=[finding.check for finding in diagnosis.faults],
            first_cause=None if first is None else first.check,
            unexplained=UnexplainedGap(
                nats=left.nats,
                share=left.share,
                expected=ResolvedGap(**vars(evidence.expected), resolution=evidence.resolution),
            ),
            shares=diagnosis.shares,
            suspects=[*settings, *map(self._suspect_row, diagnosis.suspects)],
            findings=list(map(self._finding_row, diagnosis.findings)),
            **custom_code.on_record(),
        )

    @property
    def _unscored_responses(self) -> int:
        """The responses of row groups that lack a side of the gap: no check has read these."""
        responses = sum(trace.num_responses for trace in self.traces)
        return responses - self.diagnosis.evidence.counts.responses

    def _suspect_row(self, finding: Finding) -> SuspectRow:
        suspect = SuspectRow(
            check=finding.check, explains=finding.explains, needs=finding.needs, test=[]
        )
        line = self.line_that_tests(finding.needs)
        if line:
            return replace(suspect, test=[line])
        return suspect

    def _finding_row(self, finding: Finding) -> FindingRow:
        check = module(finding.check)
        return FindingRow(
            title=check.TITLE,
            cause=finding.cause or check.CAUSE,
            change=self.change(finding),
            source=check.SOURCE,
            check=finding.check,
            status=finding.status,
            effect=finding.effect,
            measure=finding.measure,
            sentence=finding.sentence,
            evidence=[EvidenceRow(*measurement) for measurement in finding.evidence],
            reason=finding.reason,
            needs=finding.needs,
            where=finding.where,
            explains=finding.explains,
            beyond_expected=finding.beyond_expected,
            at_most=finding.at_most,
        )

    @cached_property
    def found_rows(self) -> list[FindingRow]:
        """The rows of what was found, in the order of `Findings.found`."""
        return [self.result.finding(finding.check) for finding in self.diagnosis.found]

    def _mean(self, value_N: np.ndarray, index: np.ndarray | slice) -> Estimate:
        """The mean of some of the sample's tokens."""
        prompt_id_N = self.sample.prompt_id_S[self.sample.response_N]
        return estimate_over_prompts(value_N[index], self.sample.group_N[index], prompt_id_N[index])


@dataclass(frozen=True)
class _EvidencePass:
    """The pass that gathers evidence from each portion, without responses beyond the limits."""

    pair: Pair
    limits: HashLimits
    temperatures: tuple[float, float]
    columns: ClassVar[None] = None

    def begin(self, _portion: Portion) -> EvidenceCollector:
        return EvidenceCollector(self.pair, self.limits, self.temperatures)

    def read(
        self, collector: EvidenceCollector, portion: Portion, groups: Iterator[RowGroup]
    ) -> None:
        for group in groups:
            collector.update(group.table, group.batch, Origin(portion.trace, group.path.name))


def _settings_by_trace(traces: Sequence[Trace]) -> Traces:
    """The traces by name, with the settings in which their manifests differ."""
    first = traces[0].manifest
    settings: dict[str, list[Any]] = {}
    for number, trace in enumerate(traces):
        for row in settings_diff(first, trace.manifest, at_equal_weights=True):
            if not row.harmless:
                settings.setdefault(row.setting, [row.first] * len(traces))[number] = row.other
    names = tuple(map(str, typed_names(traces)))
    return Traces(names, {name: tuple(values) for name, values in settings.items()})


class _NarrowingPasses:
    """The pass over each portion, limited by what earlier portions gathered."""

    def __init__(self, pair: Pair, temperatures: tuple[float, float]) -> None:
        self.pair = pair
        self.limits = HashLimits()
        self.temperatures = temperatures

    def __call__(self, _portion: Portion) -> _EvidencePass:
        return _EvidencePass(self.pair, self.limits, self.temperatures)

    def after(self, gathered: Iterator[EvidenceCollector]) -> None:
        """Apply a limit that one of the earlier portions set to all later ones."""
        limits = [self.limits, *(collector.limits for collector in gathered)]
        # The sample has the responses with the smallest hashes. A later portion needs none whose
        # hash is beyond those of an earlier one, whatever it holds itself.
        self.limits = HashLimits(*map(min, zip(*limits, strict=True)))


def gather_evidence(
    traces: Sequence[Trace],
    workers: Workers = ALONE,
    on_responses: Callable[[int], None] = lambda _: None,
) -> Evidence:
    """Read traces once, in memory independent of their length."""
    manifest = traces[0].manifest
    passes = _NarrowingPasses(PAIRS[pairs_in(traces)[0]], temperatures_of(manifest))
    with executor(workers, traces) as reader:
        collector = reader.reduced(reader.portions, passes, on_responses, passes.after)
    sampling = manifest.get("config", {}).get("sampling") or {}
    evidence = collector.evidence(sampling, manifest, _settings_by_trace(traces))
    counts = evidence.counts
    above_zero = sum(side.above_zero for side in counts.sides.values())
    all_masked = counts.responses > 0 and not any(side.tokens for side in counts.sides.values())
    refuse_unmeasured(
        traces, int(evidence.sample.counts_T.sum()), above_zero, all_masked=all_masked
    )
    return evidence


@dataclass(frozen=True)
class Preparation:
    """Traces that have been read, and models that have not been loaded."""

    traces: Sequence[Trace]
    evidence: Evidence
    ranks: Ranks
    earlier_model: str | None = None
    trainer_model: str | None = None
    earlier: ModelAtHand | None = None

    @classmethod
    def of(
        cls,
        traces: Sequence[Trace],
        workers: Workers = ALONE,
        on_responses: Callable[[int], None] = lambda _: None,
        ranks: Ranks = ALL_HERE,
    ) -> Self:
        """Read traces that sample the same setup; the first rank reads them for all."""
        check_poolable(traces)
        evidence = None
        if ranks.world.first:
            evidence = gather_evidence(traces, workers, on_responses)
        # All ranks have the evidence from here on: the first one sends what it has read.
        return cls(traces, ranks.world.broadcast(evidence), ranks)  # type: ignore[arg-type]

    def with_models(
        self, earlier_model: str | None, trainer_model: str | None, reading_tokens: int | None
    ) -> Self:
        """The same traces with models to read the sample again, within a budget in tokens."""

        def at_hand(path: str | None) -> ModelAtHand | None:
            if path is None:
                return None
            sample, sampling = self.evidence.sample, self.evidence.sampling
            return model_at_hand(path, sample, sampling, self.traces, self.ranks, reading_tokens)

        return replace(
            self,
            evidence=replace(self.evidence, model=at_hand(trainer_model)),
            earlier=at_hand(earlier_model),
            earlier_model=earlier_model,
            trainer_model=trainer_model,
        )

    @property
    def most_tokens(self) -> int:
        """How many tokens the models may read; the earlier one reads the responses once."""
        tokens = 0
        if self.evidence.model is not None:
            tokens += self.evidence.model.budget
        if self.earlier is not None:
            tokens += self.earlier.of_all
        return tokens

    def diagnosed(self, on_tokens: Callable[[int], None] = lambda _: None) -> DiagnosisAnalysis:
        """Run every check. Ctrl-C while the trainer's model reads ends its readings, and what they
        would have shown is *not tested*.
        """
        evidence = self.evidence
        for model in filter(None, (evidence.model, self.earlier)):
            model.on_tokens = on_tokens
        if self.earlier is not None:
            evidence = replace(evidence, earlier_logp_T=self.earlier.once_T())
        diagnosis = diagnose(evidence)
        return DiagnosisAnalysis(self.traces, diagnosis, self.earlier_model, self.trainer_model)


def analyse_diagnosis(
    traces: Sequence[Trace],
    earlier_model: str | None = None,
    trainer_model: str | None = None,
    *,
    reading_tokens: int | None = None,
    workers: Workers = ALONE,
    on_responses: Callable[[int], None] = lambda _: None,
    ranks: Ranks = ALL_HERE,
) -> DiagnosisAnalysis:
    """Run every check on traces that sample the same setup.

    The check for stale weights needs an earlier checkpoint; those of a model's input need the
    trainer's model. Ranks share what a model scores; the first rank reads the traces for all.
    """
    prepared = Preparation.of(traces, workers, on_responses, ranks)
    analysis = prepared.with_models(earlier_model, trainer_model, reading_tokens).diagnosed()
    if analysis.is_interrupted:
        raise KeyboardInterrupt
    return analysis


# The setting that each check is about, by its name in the manifest.
_SETTINGS = {
    "temperature": "temperature",
    "truncated-support": "top_p",
    "repetition-penalty": "repetition_penalty",
    "position-encoding": "rope_parameters",
    "attention": "attn_implementation",
    "stale-weights": "weights",
    "attended-padding": "attention_mask",
    "another-prompt": "prompt_ids",
    "adapter-scale": "adapter",
    "missing-tensor": "weights",
    "packed-responses": "packed",
    "context-parallel": "context_parallel",
    "not-repeatable": "dropout",
    "prefix-cache": "prefix_caching",
}


def named_faults(trace: Trace, trainer_model: str | None = None) -> list[dict[str, Any]]:
    """The named faults of a trace, the one that explains most first, for a search of causes."""
    findings = analyse_diagnosis([trace], trainer_model=trainer_model).diagnosis.faults
    return [_fault(finding) for finding in findings if finding.check != UNEXPLAINED]


def _fault(finding: Finding) -> dict[str, Any]:
    check = module(finding.check)
    return {
        "setting": _SETTINGS.get(finding.check, finding.check),
        "check": finding.check,
        "title": check.TITLE,
        "cause": finding.cause or check.CAUSE,
        "change": finding.change or check.CHANGE,
        "sentence": finding.sentence,
        "explains": finding.explains,
    }
