"""Runs every check on one trace: spoiled data goes first, then causes compete by how much of the
gap they explain.

Stages 1 and 2 find values, tokens and responses that are not log-probabilities of the sampled
tokens, and remove them. Stages 3 to 5 are causes: the one that explains most is undone, and the
others must be found again in what is left. Stage 6 is the tail of that, stage 7 what a precision
makes, and stage 8 the gap that nothing explains.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType

import numpy as np

from mismatch_cli.base import registry
from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.model import SkippedReading
from mismatch_cli.diagnosis.response_kinds import FarResponses

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
        found = [finding for finding in self.findings if finding.status == "found"]
        return tuple(
            sorted(
                found, key=lambda f: (max(_stage(f.check), PRECISION_STAGE), -(f.explains or 0.0))
            )
        )

    @property
    def faults(self) -> tuple[Finding, ...]:
        """What is found and is not just a floor or tail of the precision; what makes the gap
        larger than expected is a fault, and so is a gap that stays unexplained.
        """
        stages = (*range(PRECISION_STAGE), UNEXPLAINED_STAGE)
        return tuple(f for f in self.found if _stage(f.check) in stages or f.beyond_expected)

    @property
    def first_cause(self) -> Finding | None:
        """The finding that explains most, unless the gap is too large and remains mostly
        unexplained.
        """
        causes = [f for f in self.found if _stage(f.check) < FLOOR_STAGE]
        if not causes or (self.is_unexplained and (causes[0].explains or 0.0) < _MOST):
            return None
        return causes[0]

    @property
    def is_minor(self) -> bool:
        """Whether the first cause is noise or a tail and leaves most of the gap: its advice
        should not come first.
        """
        first = self.first_cause
        return (
            first is not None
            and _stage(first.check) >= PRECISION_STAGE
            and (first.explains or 0.0) < _MOST
        )

    @property
    def shares(self) -> Shares:
        """What the faults found explain, and what is left: as expected, and beyond that."""
        left, nats = min(1.0, self.unexplained.share), self.unexplained.nats
        high = self.evidence.expected.high
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
        clear = (module(finding.check) for finding in self.findings if finding.status == "clear")
        return frozenset(setting for check in clear for setting in getattr(check, "CLEARS", ()))

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
        showing = [
            f for f in self.findings if f.status == "clear" and (f.explains or 0.0) >= _LEAST
        ]
        showing.sort(key=lambda f: -(f.explains or 0.0))
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
    present = weighing.compete_in_part(present)
    present = weighing.compete(present)
    present = weighing.tails(present)
    for name in weighing.last:
        weighing.answer(name, present)
    weighing.leave_alone()
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
        self.exact = [
            name
            for name in names()
            if _stage(name) < COMPETE_STAGE or getattr(module(name), "EXACT", False)
        ]
        weighed = [name for name in names() if name not in self.exact]
        self.causes = [name for name in weighed if _stage(name) < PRECISION_STAGE]
        self._tails = [name for name in weighed if _stage(name) == PRECISION_STAGE]
        self.last = [name for name in weighed if _stage(name) > PRECISION_STAGE]

    def answer(self, name: str, evidence: Evidence) -> Finding:
        """Run a check, and add the share of the whole gap that undoing its finding removes."""
        if evidence.sample.counts_T.any():
            finding = run_check(name, evidence)
            if finding.left_N is not None:
                gone = float(np.abs(evidence.sample.d_N).sum() - np.nansum(np.abs(finding.left_N)))
                finding = replace(finding, explains=gone / self._total if self._total else 0.0)
        else:
            spoiling = next((f for f in self.answers.values() if f.status == "found"), None)
            first = f": fix “{module(spoiling.check).TITLE}” first" if spoiling else ""
            finding = untested(name, f"no tokens are left to check{first}")
        self.answers[name] = finding
        return finding

    def undo(self, finding: Finding, evidence: Evidence) -> Evidence:
        """The evidence without a fault that was found."""
        if finding.status != "found":
            return evidence
        check = module(finding.check)
        spoiled_T = check.spoiled_T(evidence) if hasattr(check, "spoiled_T") else None
        sample = (
            evidence.sample if finding.left_N is None else evidence.sample.with_gap(finding.left_N)
        )
        if spoiled_T is not None:
            self.set_aside.append(np.abs(sample.d_N)[spoiled_T[sample.kept]])
            sample = replace(sample, counts_T=sample.counts_T & ~spoiled_T)
        if sample is evidence.sample:
            return evidence
        return replace(evidence, sample=sample, undone=(*evidence.undone, finding.check))

    def compete_in_part(self, evidence: Evidence) -> Evidence:
        """If some responses have a far larger gap than the others, look for its causes in these
        alone, and undo what is found there.
        """
        for part in evidence.parts:
            left = self._causes_of(part, evidence)
            if left is not None:
                return left
        return evidence

    def _causes_of(self, part: FarResponses, evidence: Evidence) -> Evidence | None:
        """The evidence without what explains the gap of a part; None if nothing explains half."""
        sample = evidence.sample
        in_it_T = part.in_it_S[sample.response_T]
        alone, others = (sample.only(chosen_T) for chosen_T in (in_it_T, ~in_it_T))
        own_total = float(np.abs(alone.d_N).sum())
        within = Weighing(own_total)
        within.causes = [name for name in within.causes if not _compares_parts(name)]
        left = within.compete(replace(evidence, sample=alone)).sample
        causes = [within.answers[name] for name in within.causes]
        causes = [cause for cause in causes if cause.status == "found"]
        if self._explained(causes) < _MOST or not self._total:
            return None
        # What the others have as well is a cause of the whole trace
        largest = max(causes, key=lambda cause: cause.explains or 0.0)
        if run_check(largest.check, replace(evidence, sample=others)).status == "found":
            return None
        for cause in causes:
            self._name_in(part, cause, own_total / self._total)
        return replace(evidence, sample=sample.with_part(in_it_T, left))

    def _name_in(self, part: FarResponses, cause: Finding, share: float) -> None:
        """Answer with a cause in a part that has this share of the gap."""
        self.answers[cause.check] = replace(
            cause,
            sentence=f"{part.words[0].upper()}{part.words[1:]}: {cause.sentence}",
            explains=(cause.explains or 0.0) * share,
            where=part.words,
        )
        self.causes.remove(cause.check)

    def compete(self, evidence: Evidence) -> Evidence:
        """Undo the cause that explains most, check the others again on what is left, and repeat
        until none is found.
        """
        total_gap = float(np.abs(evidence.sample.d_N).sum())
        present, undone = self._one_by_one(evidence, total_gap)
        done = {finding.check for finding in undone}
        others = [self.answers[name] for name in self.causes if name not in done]
        waiting = [finding for finding in others if finding.status == "found"]
        # What is left is as expected; a bad step or older weights are a cause in it nonetheless
        present = self._of_any_share(present, waiting)
        small = [finding for finding in waiting if not _is_any_share(finding.check)]
        self._demote(small, "explains only {share} of the gap")
        largest = self._explained(undone[:1]) * self._total
        if undone and largest < _MOST * total_gap and present.gap_is_too_large:
            shown = [finding for finding in undone if not _is_any_share(finding.check)]
            self._demote(shown, "explains only {share} of the gap, and the rest is too large")
            return self._of_any_share(evidence, undone)
        return present

    def _one_by_one(self, evidence: Evidence, total_gap: float) -> tuple[Evidence, list[Finding]]:
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
            if (
                self._explained(undone) * self._total >= _MOST * total_gap
                and present.gap.value <= present.expected.high
            ):
                break  # what is left is as expected, or cannot be undone
        return present, undone

    def _of_any_share(self, evidence: Evidence, findings: Sequence[Finding]) -> Evidence:
        """Undo those that are causes whatever their share of the gap."""
        for finding in findings:
            if _is_any_share(finding.check):
                evidence = self.undo(self.answer(finding.check, evidence), evidence)
        return evidence

    def _strongest(self, waiting: Sequence[str], total_gap: float) -> Finding | None:
        """The cause that explains most of what is left, unless that is too little."""
        least = max(_LEAST * total_gap / self._total, _LEAST_OF_ALL) if self._total else 0.0
        causes = [self.answers[name] for name in waiting if self.answers[name].status == "found"]
        causes = [
            cause
            for cause in causes
            if (cause.explains or 0.0) >= least or _is_any_share(cause.check)
        ]
        return max(causes, key=lambda cause: cause.explains or 0.0, default=None)

    @staticmethod
    def _explained(findings: Sequence[Finding]) -> float:
        return sum(finding.explains or 0.0 for finding in findings)

    def tails(self, evidence: Evidence) -> Evidence:
        """Run the checks for a few tokens with most of the gap; they count only if the rest is
        as expected.
        """
        faults = [
            f
            for f in self.answers.values()
            if f.status == "found" and _stage(f.check) < PRECISION_STAGE
        ]
        for name in self._tails:
            if faults:  # a fault that is not wholly undone leaves a tail
                title = module(faults[0].check).TITLE
                self.answers[name] = untested(
                    name, f"what is left of “{title}” looks like a tail: fix that first"
                )
                continue
            without = self.undo(self.answer(name, evidence), evidence)
            if without.gap_is_too_large:
                self._demote(
                    [self.answers[name]],
                    "explains {share} of the gap; the rest is too large",
                )
            else:
                evidence = without
        return evidence

    def leave_alone(self) -> None:
        """Withdraw what another fault causes as well: findings that count only by themselves."""
        found = [f for f in self.answers.values() if f.status == "found"]
        spoiling = [f for f in found if _stage(f.check) < PRECISION_STAGE]
        others = [f for f in spoiling if f.check not in _HARMLESS and not _is_alone(f.check)]
        if not others:
            return
        first = f"fix “{module(others[0].check).TITLE}” first"
        for finding in found:
            if _is_alone(finding.check):
                self.answers[finding.check] = untested(finding.check, first)

    def _answer_again(self, name: str, present: Evidence, undone: Sequence[Finding]) -> None:
        """Require that a check still finds its fault in what stronger causes leave of the gap."""
        before, now = self.answers.get(name), self.answer(name, present)
        if before is None or now.status == "found":
            return
        self.answers[name] = before
        if before.status == "found":
            self._demote([before], f"gone once “{module(undone[-1].check).TITLE}” is undone")

    def _demote(self, findings: Sequence[Finding], reason: str) -> None:
        for finding in findings:
            if finding.status == "found":
                share = f"{100 * (finding.explains or 0.0):.0f} %"
                self.answers[finding.check] = replace(
                    finding, status="clear", reason=reason.format(share=share)
                )


def _stage(name: str) -> int:
    return int(module(name).STAGE)


def _is_alone(name: str) -> bool:
    return bool(getattr(module(name), "ALONE", False))


def _compares_parts(name: str) -> bool:
    """Whether a check compares some responses with the others, which a part has not."""
    return bool(getattr(module(name), "COMPARES_PARTS", False))


def _is_any_share(name: str) -> bool:
    """Whether what the check finds is a cause however little of the gap it explains."""
    return bool(getattr(module(name), "ANY_SHARE", False))


def run_check(name: str, evidence: Evidence) -> Finding:
    check = module(name)
    gap = evidence.gap.value
    reads = getattr(check, "READS", False) and evidence.model is not None  # a model is always read
    if check.STAGE >= COMPETE_STAGE and gap < _NO_GAP and getattr(check, "NEEDS_A_GAP", not reads):
        return Finding(
            name, "clear", sentence=f"The mean gap is {gap:.2g} nats: there is nothing to explain."
        )
    try:
        finding: Finding = check.check(evidence)
    except SkippedReading as reason:
        return untested(name, str(reason))
    return finding
