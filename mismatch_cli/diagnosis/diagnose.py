"""Runs every check on one trace: spoiled data goes first, then causes compete by how much of the
gap they explain.

Stages 1 and 2 find values, tokens and responses that are not log-probabilities of the sampled
tokens, and remove them. Stages 3 to 5 are causes: the one that explains most is undone, and the
others must be found again in what is left. Stage 6 is the tail of that, stage 7 what a precision
makes, and stage 8 the gap that nothing explains.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType

import numpy as np

from mismatch_cli.base import registry
from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.far_responses import Subset
from mismatch_cli.diagnosis.model import SkippedReading
from mismatch_cli.diagnosis.rare_gaps import RARE
from mismatch_cli.diagnosis.shared_origins import shared_by

_PACKAGE = "mismatch_cli.diagnosis.checks"
COMPETE_STAGE, PRECISION_STAGE, FLOOR_STAGE, UNEXPLAINED_STAGE = 3, 6, 7, 8
_NO_GAP = 2e-5  # mean nats per token: float32 rounding, with nothing to explain
_HARMLESS = frozenset(("credit", "repeated-responses"))  # to the log-probabilities
_LEAST = 0.1  # of the gap: what explains less is not a cause
_LEAST_OF_ALL = 0.01  # of the gap before spoiled tokens went
_MOST = 0.5  # of the gap: what explains less is not a cause if the rest is too large


@dataclass(frozen=True)
class Unexplained:
    """The gap that is left once every fault found is undone: mean nats per token, and its share
    of the gap.
    """

    nats: float
    share: float


@dataclass(frozen=True)
class Shares:
    """The parts of the gap: explained by what was found, expected without a fault, and
    unexplained.
    """

    explained: float
    expected: float
    unexplained: float


@dataclass(frozen=True)
class Findings:
    """All findings in the order of the checks, and what is left when they are undone."""

    evidence: Evidence
    findings: tuple[Finding, ...]
    unexplained: Unexplained

    @property
    def found(self) -> tuple[Finding, ...]:
        """Found faults, the one that explains most first; precision floors and unexplained gaps
        last.
        """

        def rank(finding: Finding) -> tuple[int, float]:
            return max(_stage(finding.check), PRECISION_STAGE), -_share(finding)

        return tuple(sorted(_found(self.findings), key=rank))

    @property
    def faults(self) -> tuple[Finding, ...]:
        """What is found and is not just a floor or tail of the precision; what makes the gap
        larger than expected is a fault, and so is a gap that stays unexplained.
        """
        faults = []
        for finding in self.found:
            is_precision = PRECISION_STAGE <= _stage(finding.check) < UNEXPLAINED_STAGE
            if finding.beyond_expected or not is_precision:
                faults.append(finding)
        return tuple(faults)

    @property
    def first_cause(self) -> Finding | None:
        """The finding that explains most, unless the gap is too large and remains mostly
        unexplained.
        """
        causes = [finding for finding in self.found if _stage(finding.check) < FLOOR_STAGE]
        if not causes:
            return None
        is_too_small = self.is_unexplained and _share(causes[0]) < _MOST
        return None if is_too_small else causes[0]

    @property
    def is_minor(self) -> bool:
        """Whether the first cause is noise or a tail and leaves most of the gap: its advice
        should not come first.
        """
        first = self.first_cause
        if first is None or _stage(first.check) < PRECISION_STAGE:
            return False
        return _share(first) < _MOST

    @property
    def is_mostly_explained(self) -> bool:
        """Whether a fault explains at least half of the gap: until it is gone, nothing else is
        worth a test.
        """
        first = self.first_cause
        if first is None or _stage(first.check) >= PRECISION_STAGE:
            return False
        return not self.is_unexplained and _share(first) >= _MOST

    @property
    def shares(self) -> Shares:
        """What the faults found explain, and what is left: as expected, and beyond that."""
        if not self.evidence.gap.value:
            return Shares(0.0, 1.0, 0.0)
        left = min(1.0, self.unexplained.share)
        nats, high = self.unexplained.nats, self.evidence.expected.high
        expected = left if nats <= high else left * high / nats
        return Shares(1 - left, expected, left - expected)

    @property
    def is_decided(self) -> bool:
        """Whether the gap that is left is as expected, or too large beyond doubt."""
        return self.is_unexplained or self.unexplained.nats <= self.evidence.expected.high

    @property
    def is_unexplained(self) -> bool:
        """Whether a gap larger than expected is left."""
        return any(_stage(f.check) == UNEXPLAINED_STAGE for f in self.found)

    @property
    def is_at_own_scale(self) -> bool:
        """Whether the gap was judged by what the trace itself shows, or is none to speak of.

        The range of other models is too wide to clear a trace within it.
        """
        expected = self.evidence.expected
        return expected.of_this_trace or self.evidence.gap.value <= max(_NO_GAP, expected.low)

    @property
    def cleared(self) -> frozenset[str]:
        """Settings, as manifests name them, that a check has cleared."""
        settings: set[str] = set()
        for finding in self.findings:
            if finding.status == "clear":
                settings.update(getattr(module(finding.check), "CLEARS", ()))
        return frozenset(settings)

    @property
    def has_a_gap(self) -> bool:
        """Whether there is anything to explain."""
        return self.evidence.gap.value >= _NO_GAP

    @property
    def suspects(self) -> tuple[Finding, ...]:
        """Possible causes of an unexplained gap: what shows in it, and what could be tested with
        more input.
        """
        if not self.is_unexplained:
            return ()
        showing = [f for f in self.findings if f.status == "clear" and _share(f) >= _LEAST]
        showing.sort(key=lambda finding: -_share(finding))
        return (*showing, *self.allowed_by_more)

    @property
    def allowed_by_more(self) -> tuple[Finding, ...]:
        """The checks that were not made, but would be with more input."""
        return tuple(f for f in self.findings if f.status == "untested" and f.needs)


def names() -> list[str]:
    """The checks, in the order in which they run."""
    return sorted(registry.names(_PACKAGE), key=lambda name: (module(name).STAGE, name))


@cache
def module(name: str) -> ModuleType:
    """The module of a check."""
    return registry.load(_PACKAGE, name, "check")


def diagnose(evidence: Evidence) -> Findings:
    """Run every check, each on what stronger causes leave of the gap."""
    total = float(np.abs(evidence.sample.d_N).sum())
    weighing = Weighing(total)
    present = evidence
    for name in weighing.exact:
        present = weighing.undo(weighing.answer(name, present), present)
    present = weighing.compete_in_subset(present)
    present = weighing.compete(present)
    present = weighing.check_tails(present)
    for name in weighing.last:
        weighing.answer(name, present)
    weighing.withdraw_uncertain()
    left_N = np.concatenate([np.abs(present.sample.d_N), *weighing.set_aside])
    left, tokens = float(left_N.sum()), len(left_N)
    unexplained = Unexplained(left / tokens if tokens else 0.0, left / total if total else 0.0)
    return Findings(evidence, tuple(weighing.answers[name] for name in names()), unexplained)


class Weighing:
    """The answers of all checks, gathered one after the other."""

    def __init__(self, total: float) -> None:
        """`total`: Σ|d| of the sample, nats, before anything is undone."""
        self._total = total
        self.answers: dict[str, Finding] = {}
        # |d| of repaired tokens that no later check sees: left, not explained
        self.set_aside: list[np.ndarray] = []
        self.exact: list[str] = []
        self.causes: list[str] = []
        self._tails: list[str] = []
        self.last: list[str] = []
        for name in names():
            stage = _stage(name)
            if stage < COMPETE_STAGE or _has(name, "EXACT"):
                self.exact.append(name)
            elif stage < PRECISION_STAGE:
                self.causes.append(name)
            elif stage == PRECISION_STAGE:
                self._tails.append(name)
            else:
                self.last.append(name)

    def answer(self, name: str, evidence: Evidence) -> Finding:
        """Run a check, and add the share of the whole gap that undoing its finding removes."""
        has_tokens = evidence.sample.counts_T.any()
        finding = run_check(name, evidence) if has_tokens else self._without_tokens(name)
        if finding.left_N is not None:
            gone = float(np.abs(evidence.sample.d_N).sum() - np.nansum(np.abs(finding.left_N)))
            finding = replace(finding, explains=gone / self._total if self._total else 0.0)
        self.answers[name] = finding
        return finding

    def _without_tokens(self, name: str) -> Finding:
        reason = "no tokens are left to check"
        spoiling = _found(self.answers.values())
        if spoiling:
            reason += f": fix “{_title_of_largest(spoiling)}” first"
        return untested(name, reason)

    def undo(self, finding: Finding, evidence: Evidence) -> Evidence:
        """The evidence without a fault that was found."""
        if finding.status != "found":
            return evidence
        check, sample = module(finding.check), evidence.sample
        if finding.left_N is not None:
            sample = sample.with_gap(finding.left_N)
        # What spoiled tokens had left is set aside, not explained
        if hasattr(check, "spoiled_T"):
            spoiled_T = check.spoiled_T(evidence)
            self.set_aside.append(np.abs(sample.d_N)[spoiled_T[sample.index_N]])
            sample = replace(sample, counts_T=sample.counts_T & ~spoiled_T)
        if sample is evidence.sample:
            return evidence
        return replace(evidence, sample=sample, undone=(*evidence.undone, finding.check))

    def compete_in_subset(self, evidence: Evidence) -> Evidence:
        """If some responses have a far larger gap than the others, look for its causes in these
        alone, and undo what is found there.
        """
        for subset in evidence.subsets:
            repaired = self._without_causes_of(subset, evidence)
            if repaired is not None:
                return repaired
        return evidence

    def _without_causes_of(self, subset: Subset, evidence: Evidence) -> Evidence | None:
        """The evidence without what explains the gap of a subset; None if nothing explains half."""
        sample = evidence.sample
        inside_T = subset.inside_S[sample.response_T]
        alone, others = sample.only(inside_T), sample.only(~inside_T)
        own_total = float(np.abs(alone.d_N).sum())
        within = Weighing(own_total)
        within.causes = [name for name in within.causes if not _has(name, "COMPARES_PARTS")]
        repaired = within.compete(replace(evidence, sample=alone)).sample
        causes = _found(within.answers[name] for name in within.causes)
        if sum(map(_share, causes)) < _MOST or not self._total:
            return None
        # What the others have as well is a cause of the whole trace
        largest = max(causes, key=_share)
        if run_check(largest.check, replace(evidence, sample=others)).status == "found":
            return None
        for cause in causes:
            self._name_in(subset, cause, own_total / self._total)
        return replace(evidence, sample=sample.with_tokens_of(repaired, inside_T))

    def _name_in(self, subset: Subset, cause: Finding, share: float) -> None:
        """Answer with a cause in a subset that has this share of the gap."""
        where = subset.where
        self.answers[cause.check] = replace(
            cause,
            sentence=f"{where[0].upper()}{where[1:]}: {cause.sentence}",
            explains=_share(cause) * share,
            where=where,
        )
        self.causes.remove(cause.check)

    def compete(self, evidence: Evidence) -> Evidence:
        """Undo the cause that explains most, check the others again on what is left, and repeat
        until none is found.
        """
        total_gap = float(np.abs(evidence.sample.d_N).sum())
        present, undone = self._undo_strongest(evidence, total_gap)
        done = {finding.check for finding in undone}
        waiting = _found(self.answers[name] for name in self.causes if name not in done)
        # What is left is as expected; a bad step or older weights are a cause in it nonetheless
        present = self._undo_any_share(waiting, present)
        self._demote_minor(waiting, "explains only {share} of the gap")
        if not undone:
            return present
        largest = _share(undone[0]) * self._total
        if largest < _MOST * total_gap and present.gap_is_too_large:
            reason = "explains only {share} of the gap, and the rest is too large"
            self._demote_minor(undone, reason)
            return self._undo_any_share(undone, evidence)
        return present

    def _undo_strongest(
        self, evidence: Evidence, total_gap: float
    ) -> tuple[Evidence, list[Finding]]:
        """The evidence without the strongest causes, and these, until none is found or what is
        left is as expected.
        """
        waiting, present = list(self.causes), evidence
        undone: list[Finding] = []
        while waiting:
            for name in waiting:
                self._answer_again(name, present, undone)
            strongest = self._strongest(waiting, total_gap)
            if strongest is None:
                break
            present = self.undo(strongest, present)
            undone.append(strongest)
            waiting.remove(strongest.check)
            explained = sum(map(_share, undone)) * self._total
            # What is left of the gap is expected, or cannot be undone
            if explained >= _MOST * total_gap and present.gap.value <= present.expected.high:
                break
        return present, undone

    def _undo_any_share(self, findings: Sequence[Finding], evidence: Evidence) -> Evidence:
        """Undo those that are causes however little of the gap they explain."""
        for finding in findings:
            if _has(finding.check, "ANY_SHARE"):
                evidence = self.undo(self.answer(finding.check, evidence), evidence)
        return evidence

    def _strongest(self, waiting: Sequence[str], total_gap: float) -> Finding | None:
        """The cause that explains most of what is left, unless that is too little."""
        least = max(_LEAST * total_gap / self._total, _LEAST_OF_ALL) if self._total else 0.0
        causes = []
        for cause in _found(self.answers[name] for name in waiting):
            if _share(cause) >= least or _has(cause.check, "ANY_SHARE"):
                causes.append(cause)
        return max(causes, key=_share, default=None)

    def check_tails(self, evidence: Evidence) -> Evidence:
        """Run the checks for a few tokens with most of the gap; they count only if the rest is
        as expected.
        """
        faults = []
        for fault in _found(self.answers.values()):
            if _stage(fault.check) < PRECISION_STAGE and fault.check not in _HARMLESS:
                faults.append(fault)
        for name in self._tails:
            # A fault that is not wholly undone leaves a tail
            if faults:
                largest = _title_of_largest(faults)
                reason = f"what is left of “{largest}” looks like a tail: fix that first"
                self.answers[name] = untested(name, reason)
                continue
            tail = self.answer(name, evidence)
            without = self.undo(tail, evidence)
            if without.gap_is_too_large:
                self._demote(tail, "explains {share} of the gap; the rest is too large")
            else:
                evidence = without
        return evidence

    def withdraw_uncertain(self) -> None:
        """Withdraw what another fault causes as well: findings that count only by themselves."""
        findings = _found(self.answers.values())
        spoiling = [finding for finding in findings if _may_spoil_others(finding.check)]
        if not spoiling:
            return
        reason = f"fix “{_title_of_largest(spoiling)}” first"
        for finding in findings:
            if _has(finding.check, "ALONE"):
                self.answers[finding.check] = untested(finding.check, reason)

    def _answer_again(self, name: str, present: Evidence, undone: Sequence[Finding]) -> None:
        """Require that a check still finds its fault in what stronger causes leave of the gap."""
        before, now = self.answers.get(name), self.answer(name, present)
        if before is None or now.status == "found":
            return
        self.answers[name] = before
        if before.status == "found":
            self._demote(before, f"gone once “{_title(undone[-1])}” is undone")

    def _demote_minor(self, findings: Sequence[Finding], reason: str) -> None:
        """Demote those that are causes only if they explain enough of the gap."""
        for finding in findings:
            if not _has(finding.check, "ANY_SHARE"):
                self._demote(finding, reason)

    def _demote(self, finding: Finding, reason: str) -> None:
        """Answer that a fault was not found, if it was; the reason may name its share."""
        if finding.status == "found":
            reason = reason.format(share=f"{100 * _share(finding):.0f} %")
            self.answers[finding.check] = replace(finding, status="clear", reason=reason)


def _found(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status == "found"]


def _share(finding: Finding) -> float:
    """The share of the gap that a finding explains; 0 where that is not known."""
    return finding.explains or 0.0


def _title(finding: Finding) -> str:
    return str(module(finding.check).TITLE)


def _title_of_largest(findings: Sequence[Finding]) -> str:
    """The title of the finding that explains most of the gap."""
    return _title(max(findings, key=_share))


def _stage(name: str) -> int:
    return int(module(name).STAGE)


def _has(name: str, switch: str) -> bool:
    """Whether a check has one of the switches that its module may set."""
    return bool(getattr(module(name), switch, False))


def _may_spoil_others(name: str) -> bool:
    """Whether the check's fault may make others appear that are not in the trace."""
    is_fault = _stage(name) < PRECISION_STAGE and name not in _HARMLESS
    return is_fault and not _has(name, "ALONE")


def run_check(name: str, evidence: Evidence) -> Finding:
    """A check's own answer; clear without a gap that it could explain, untested if its reading was
    skipped.
    """
    check, gap = module(name), evidence.gap.value
    # A model that was named is read even without a gap
    reads = evidence.model is not None and _has(name, "READS")
    needs_a_gap = check.STAGE >= COMPETE_STAGE and getattr(check, "NEEDS_A_GAP", not reads)
    if needs_a_gap and gap < _NO_GAP:
        sentence = f"The mean gap is {gap:.2g} nats: there is nothing to explain."
        return Finding(name, "clear", sentence=sentence)
    if _has(name, "OF_SHAPE") and evidence.gap_is_rare:
        return untested(name, RARE)
    try:
        finding: Finding = check.check(evidence)
    except SkippedReading as reason:
        return untested(name, str(reason))
    return _placed(finding, evidence)


def _placed(finding: Finding, evidence: Evidence) -> Finding:
    """The finding with what its responses share, if they are a part of the trace."""
    part = finding.part
    if finding.status != "found" or part is None or not part.is_part:
        return finding
    shared = shared_by(evidence.sample, part.inside_S, part.among_S, evidence.traces)
    sentence = finding.sentence
    if shared:
        sentence += f" The responses with it are {shared}."
    return replace(finding, sentence=sentence, where=replace(part, shared=shared).where)
