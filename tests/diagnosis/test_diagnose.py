"""How findings are ordered, weighed, undone and withdrawn, each with shares by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mismatch_cli.diagnosis import diagnose
from mismatch_cli.diagnosis.diagnose import Findings, Unexplained, Weighing, run_check
from mismatch_cli.diagnosis.evidence import Finding
from mismatch_cli.diagnosis.far_responses import Subset
from mismatch_cli.diagnosis.model import SkippedReading
from mismatch_cli.diagnosis.origins import Traces
from mismatch_cli.diagnosis.rare_gaps import RARE
from mismatch_cli.diagnosis.sample import Sample
from mismatch_cli.limits.expected import Expected
from tests.diagnosis.samples import few_responses

TEMPERATURE, PENALTY, STALE, TAIL = (
    "temperature",
    "repetition-penalty",
    "stale-weights",
    "heavy-tail",
)
LATTICE, UNEXPLAINED = "logit-lattice", "unexplained-gap"


@dataclass(frozen=True)
class Evidence:
    """Of a sample, with up to 0.05 nats per token expected."""

    sample: Sample
    undone: tuple[str, ...] = ()
    subsets: tuple[Subset, ...] = ()
    model: Any = None
    gap_is_rare: bool = False
    traces: Traces = Traces()
    expected: Expected = Expected(0.01, 0.05, "", "", of_this_trace=False)

    @property
    def gap(self) -> SimpleNamespace:
        return SimpleNamespace(value=float(np.abs(self.sample.d_N).mean()))

    @property
    def gap_is_too_large(self) -> bool:
        return self.gap.value > self.expected.high


def evidence_of(d_T: list[float], lengths: list[int] | None = None, **values: object) -> Evidence:
    gaps_T = np.array(d_T)
    return Evidence(few_responses(lengths or [len(d_T)], logp_T=-1.0 + gaps_T), **values)


def found(check: str, explains: float | None = None, **values: Any) -> Finding:
    return Finding(check, "found", explains=explains, **values)


def findings_of(*findings: Finding, nats: float = 0.01, share: float = 0.5) -> Findings:
    return Findings(evidence_of([0.1, 0.3]), findings, Unexplained(nats, share))


def names(findings: tuple[Finding, ...]) -> list[str]:
    return [finding.check for finding in findings]


def test_found_faults_come_by_their_share_before_tails_floors_and_what_is_unexplained():
    findings = findings_of(
        found(UNEXPLAINED, 1.0),
        found(LATTICE, 0.9),
        found(TAIL, 0.8),
        found(TEMPERATURE, 0.2),
        Finding(STALE, "clear", explains=0.7),
        found("values"),
        found(PENALTY, 0.3),
    )
    assert names(findings.found) == [
        TAIL,
        PENALTY,
        TEMPERATURE,
        "values",
        LATTICE,
        UNEXPLAINED,
    ]
    assert names(findings.faults) == [PENALTY, TEMPERATURE, "values", UNEXPLAINED]
    beyond = findings_of(found(TAIL, 0.8, beyond_expected=True), found(LATTICE, 0.9))
    assert names(beyond.faults) == [TAIL]


@pytest.mark.parametrize(("findings", "first", "is_minor", "is_mostly"), [
    ([(TEMPERATURE, 0.5)], TEMPERATURE, False, True),
    ([(TEMPERATURE, 0.49)], TEMPERATURE, False, False),
    ([(TEMPERATURE, 0.49), (UNEXPLAINED, 1.0)], None, False, False),
    ([(TEMPERATURE, 0.5), (UNEXPLAINED, 1.0)], TEMPERATURE, False, False),
    ([(TAIL, 0.49)], TAIL, True, False),
    ([(TAIL, 0.5)], TAIL, False, False),
    ([(LATTICE, 0.9)], None, False, False),
    ([], None, False, False),
])  # fmt: skip
def test_the_first_cause_explains_half_or_leaves_what_is_expected(
    findings, first, is_minor, is_mostly
):
    result = findings_of(*(found(*finding) for finding in findings))
    cause = result.first_cause
    assert (cause and cause.check) == first
    assert (result.is_minor, result.is_mostly_explained) == (is_minor, is_mostly)


@pytest.mark.parametrize(("nats", "share", "shares", "decided"), [
    (0.05, 0.4, (0.6, 0.4, 0.0), True), (0.2, 0.4, (0.6, 0.1, 0.3), False),
    (0.2, 1.2, (0.0, 0.25, 0.75), False),
])  # fmt: skip
def test_the_gap_is_explained_expected_or_neither(nats, share, shares, decided):
    findings = findings_of(nats=nats, share=share)
    parts = findings.shares
    assert (parts.explained, parts.expected, parts.unexplained) == pytest.approx(shares)
    assert findings.is_decided == decided
    assert findings_of(found(UNEXPLAINED), nats=nats).is_decided


def test_suspects_show_in_a_tenth_of_the_gap_or_could_be_tested():
    findings = (
        Finding(TEMPERATURE, "clear", explains=0.1),
        Finding(PENALTY, "clear", explains=0.3),
        Finding("log-base", "clear", explains=0.09),
        Finding("credit", "untested"),
        Finding(STALE, "untested", needs="--earlier"),
        Finding("values", "clear"),
    )
    assert findings_of(*findings).suspects == ()
    unexplained = findings_of(*findings, found(UNEXPLAINED))
    assert names(unexplained.suspects) == [PENALTY, TEMPERATURE, STALE]
    assert names(unexplained.allowed_by_more) == [STALE]
    assert findings_of(*findings).cleared == frozenset(diagnose.module(TEMPERATURE).CLEARS)
    assert findings_of(found(TEMPERATURE)).cleared == frozenset()


@pytest.mark.parametrize(("nats", "low", "own", "is_at_own_scale", "has_a_gap"), [
    (0.011, 0.01, False, False, True), (0.009, 0.01, False, True, True),
    (0.011, 0.01, True, True, True), (1.9e-5, 1e-6, False, True, False),
    (2.1e-5, 1e-6, False, False, True),
])  # fmt: skip
def test_a_gap_is_at_its_own_scale_or_too_small_to_speak_of(
    nats, low, own, is_at_own_scale, has_a_gap
):
    expected = Expected(low, 0.05, "", "", of_this_trace=own)
    findings = Findings(evidence_of([nats], expected=expected), (), Unexplained(0.0, 0.0))
    assert (findings.is_at_own_scale, findings.has_a_gap) == (is_at_own_scale, has_a_gap)


def test_checks_run_by_their_stage():
    weighing = Weighing(1.0)
    every = diagnose.names()
    stages = [diagnose.module(name).STAGE for name in every]
    assert stages == sorted(stages) and len(set(every)) == len(every)
    assert weighing.last == [LATTICE, UNEXPLAINED] and weighing._tails == [TAIL, "uneven-responses"]
    early = [name for name, stage in zip(every, stages, strict=True) if stage < 3]
    assert weighing.exact == [*early, "attention", "columns-at-odds", "lm-head"]
    others = {*early, "attention", "columns-at-odds", "lm-head", *weighing._tails, *weighing.last}
    assert weighing.causes == [name for name in every if name not in others]


def with_answers(
    monkeypatch: pytest.MonkeyPatch, answers: Mapping[str, Callable | Finding]
) -> None:
    """Checks that answer so, or with a function of the evidence; others are clear."""

    def check(name: str, evidence: Evidence) -> Finding:
        answer = answers.get(name, Finding(name, "clear"))
        return answer(evidence) if callable(answer) else answer

    monkeypatch.setattr(diagnose, "run_check", check)


def leaving(check: str, factor: float, least: float = 0.0) -> Callable[[Evidence], Finding]:
    """A check that finds its fault in more than `least` nats, and leaves that factor of the gap."""

    def answer(evidence: Evidence) -> Finding:
        status = "found" if evidence.gap.value > least else "clear"
        return Finding(check, status, left_N=factor * evidence.sample.d_N)

    return answer


def test_an_answer_has_the_share_of_the_whole_gap_that_undoing_it_removes(monkeypatch):
    evidence = evidence_of([1.0, -2.0, 3.0])
    left_N = np.array([0.5, np.nan, -1.0])
    with_answers(monkeypatch, {TEMPERATURE: found(TEMPERATURE, left_N=left_N)})
    weighing = Weighing(9.0)
    answer = weighing.answer(TEMPERATURE, evidence)
    assert answer.explains == pytest.approx((6.0 - 1.5) / 9.0)
    assert weighing.answers == {TEMPERATURE: answer}
    assert Weighing(0.0).answer(TEMPERATURE, evidence).explains == 0.0
    assert weighing.answer(STALE, evidence).explains is None
    without = replace(evidence, sample=evidence.sample.only(np.zeros(3, dtype=bool)))
    title = diagnose.module(TEMPERATURE).TITLE
    reason = f"no tokens are left to check: fix “{title}” first"
    assert weighing.answer(PENALTY, without).reason == reason
    assert Weighing(9.0).answer(PENALTY, without).reason == "no tokens are left to check"


def test_undoing_replaces_the_gap_and_sets_spoiled_tokens_aside(monkeypatch):
    evidence = evidence_of([1.0, -2.0, 3.0, 0.5])
    weighing = Weighing(6.5)
    assert weighing.undo(Finding(TEMPERATURE, "clear", left_N=np.zeros(4)), evidence) is evidence
    assert weighing.undo(found(TEMPERATURE), evidence) is evidence
    undone = weighing.undo(found(TEMPERATURE, left_N=np.array([0.5, -1.0, np.nan, 0.25])), evidence)
    assert undone.sample.d_N.tolist() == [0.5, -1.0, 0.25] and undone.undone == (TEMPERATURE,)
    assert weighing.set_aside == []
    spoiled_T = np.array([False, True, True, False])
    monkeypatch.setattr(diagnose.module("values"), "spoiled_T", lambda _: spoiled_T, raising=False)
    later = weighing.undo(found("values", left_N=np.array([0.5, -1.0, 0.125])), undone)
    assert later.sample.d_N.tolist() == [0.5, 0.125] and later.undone == (TEMPERATURE, "values")
    assert [left_N.tolist() for left_N in weighing.set_aside] == [[1.0]]


@pytest.mark.parametrize(("shares", "total_gap", "strongest"), [
    ({TEMPERATURE: 0.06, PENALTY: 0.07}, 0.6, PENALTY),
    ({TEMPERATURE: 0.07, PENALTY: 0.059}, 0.6, TEMPERATURE),
    ({TEMPERATURE: 0.059, PENALTY: 0.0}, 0.6, None),
    ({TEMPERATURE: 0.01}, 0.05, TEMPERATURE),
    ({TEMPERATURE: 0.009}, 0.05, None),
    ({STALE: 0.001, TEMPERATURE: 0.059}, 0.6, STALE),
])  # fmt: skip
def test_the_strongest_cause_explains_a_tenth_of_what_is_left_and_a_hundredth_of_all(
    shares, total_gap, strongest
):
    """Of 1 nat in all; older weights count however little they explain."""
    weighing = Weighing(1.0)
    weighing.answers = {name: found(name, share) for name, share in shares.items()}
    cause = weighing._strongest(list(shares), total_gap)
    assert (cause and cause.check) == strongest


def test_without_a_gap_a_cause_needs_no_share():
    weighing = Weighing(0.0)
    weighing.answers = {TEMPERATURE: found(TEMPERATURE, 0.0)}
    assert weighing._strongest([TEMPERATURE], 0.0).check == TEMPERATURE


def competing(names: list[str], total: float) -> Weighing:
    weighing = Weighing(total)
    weighing.causes = names
    return weighing


def test_a_cause_that_is_gone_with_a_stronger_one_is_demoted(monkeypatch):
    """0.2 nats: a temperature leaves three tenths, in which a penalty no longer shows."""
    evidence = evidence_of([0.2, -0.2])
    answers = {TEMPERATURE: leaving(TEMPERATURE, 0.3), PENALTY: leaving(PENALTY, 0.4, least=0.1)}
    with_answers(monkeypatch, answers)
    weighing = competing([PENALTY, TEMPERATURE], 0.4)
    present = weighing.compete(evidence)
    assert present.gap.value == pytest.approx(0.06) and present.undone == (TEMPERATURE,)
    penalty = weighing.answers[PENALTY]
    assert penalty.status == "clear"
    assert penalty.reason == f"gone once “{diagnose.module(TEMPERATURE).TITLE}” is undone"
    assert penalty.explains == pytest.approx(0.6), "of its first answer"


@pytest.mark.parametrize(("factor", "status"), [(0.49, "found"), (0.51, "clear")])
def test_a_cause_of_less_than_half_is_none_where_the_rest_is_too_large(factor, status, monkeypatch):
    """Older weights are one nonetheless, and undone in the gap as it was."""
    with_answers(monkeypatch, {TEMPERATURE: leaving(TEMPERATURE, factor, least=0.15)})
    weighing = competing([TEMPERATURE], 0.4)
    evidence = evidence_of([0.2, -0.2])
    present = weighing.compete(evidence)
    assert weighing.answers[TEMPERATURE].status == status
    if status == "clear":
        assert present is evidence
        reason = "explains only 49 % of the gap, and the rest is too large"
        assert weighing.answers[TEMPERATURE].reason == reason
    else:
        assert present.gap.value == pytest.approx(0.098)
    with_answers(monkeypatch, {STALE: leaving(STALE, factor, least=0.15)})
    weighing = competing([STALE], 0.4)
    assert weighing.compete(evidence).gap.value == pytest.approx(0.2 * factor)
    assert weighing.answers[STALE].status == "found"


def test_what_is_left_as_expected_may_have_more_than_half(monkeypatch):
    """A third of 0.06 nats is undone, and 0.04 are expected."""
    with_answers(monkeypatch, {TEMPERATURE: leaving(TEMPERATURE, 2 / 3, least=0.045)})
    weighing = competing([TEMPERATURE], 0.12)
    assert weighing.compete(evidence_of([0.06, -0.06])).gap.value == pytest.approx(0.04)
    assert weighing.answers[TEMPERATURE].status == "found"


def test_causes_of_too_little_are_demoted_and_named_with_their_share(monkeypatch):
    with_answers(
        monkeypatch, {TEMPERATURE: leaving(TEMPERATURE, 0.91), STALE: leaving(STALE, 0.95)}
    )
    weighing = competing([TEMPERATURE, STALE], 0.4)
    present = weighing.compete(evidence_of([0.2, -0.2]))
    assert weighing.answers[STALE].status == "found" and present.undone == (STALE,)
    assert weighing.answers[TEMPERATURE].status == "clear"
    assert weighing.answers[TEMPERATURE].reason == "explains only 9 % of the gap"


SUBSET = Subset(np.array([True, True, False]), np.ones(3, dtype=bool), "all of rank 1")


@pytest.mark.parametrize(("factor", "elsewhere", "is_cause"), [
    (0.49, False, True), (0.51, False, False), (0.2, True, False),
])  # fmt: skip
def test_a_cause_of_a_subset_explains_half_of_its_gap_and_is_not_in_the_others(
    factor, elsewhere, is_cause, monkeypatch
):
    """The first two of three responses have 0.6 of 0.8 nats."""

    def temperature(evidence: Evidence) -> Finding:
        counted = evidence.sample.counts_T.tolist()
        is_other = counted == [False, False, True]
        status = "found" if not is_other or elsewhere else "clear"
        if evidence.undone:
            status = "clear"
        return Finding(
            TEMPERATURE, status, sentence="A temperature.", left_N=factor * evidence.sample.d_N
        )

    with_answers(monkeypatch, {TEMPERATURE: temperature})
    weighing = competing([TEMPERATURE, PENALTY], 0.8)
    evidence = evidence_of([0.3, -0.3, 0.2], [1, 1, 1], subsets=(SUBSET,))
    repaired = weighing.compete_in_subset(evidence)
    if not is_cause:
        assert repaired is evidence and weighing.causes == [TEMPERATURE, PENALTY]
        return
    assert repaired.sample.d_N == pytest.approx([0.3 * factor, -0.3 * factor, 0.2])
    answer = weighing.answers[TEMPERATURE]
    where = "in 2 of 3 responses, all of rank 1"
    assert answer.where == where and answer.sentence == f"I{where[1:]}: A temperature."
    assert answer.explains == pytest.approx((1 - factor) * 0.6 / 0.8)
    assert weighing.causes == [PENALTY]
    assert competing([TEMPERATURE], 0.0).compete_in_subset(evidence) is evidence


@pytest.mark.parametrize(("also_elsewhere", "is_cause"), [(TEMPERATURE, False), (PENALTY, True)])
def test_the_largest_cause_of_a_subset_must_not_be_in_the_others(
    also_elsewhere, is_cause, monkeypatch
):
    """A temperature explains 0.7 of the subset's gap, and a penalty 0.6 of what it leaves."""

    def cause(name: str) -> Callable[[Evidence], Finding]:
        def answer(evidence: Evidence) -> Finding:
            is_other = evidence.sample.counts_T.tolist() == [False, False, True]
            shows = name not in evidence.undone and (not is_other or name == also_elsewhere)
            left_N = (0.3 if name == TEMPERATURE else 0.4) * evidence.sample.d_N
            return Finding(name, "found" if shows else "clear", sentence="A.", left_N=left_N)

        return answer

    with_answers(monkeypatch, {name: cause(name) for name in (TEMPERATURE, PENALTY)})
    weighing = competing([TEMPERATURE, PENALTY], 0.8)
    evidence = evidence_of([0.3, -0.3, 0.2], [1, 1, 1], subsets=(SUBSET,))
    repaired = weighing.compete_in_subset(evidence)
    assert (repaired is not evidence) == is_cause
    if is_cause:
        assert repaired.sample.d_N == pytest.approx([0.036, -0.036, 0.2])
        assert weighing.answers[PENALTY].explains == pytest.approx(0.18 * 0.6 / 0.8)


def test_a_change_of_steps_is_not_looked_for_in_some_of_them(monkeypatch):
    with_answers(monkeypatch, {"step-change": leaving("step-change", 0.1)})
    weighing = Weighing(0.8)
    evidence = evidence_of([0.3, -0.3, 0.2], [1, 1, 1], subsets=(SUBSET,))
    assert weighing.compete_in_subset(evidence) is evidence


@pytest.mark.parametrize(
    ("factor", "status", "gap"), [(0.24, "found", 0.048), (0.26, "clear", 0.2)]
)
def test_a_tail_counts_if_the_rest_is_as_expected(factor, status, gap, monkeypatch):
    with_answers(monkeypatch, {TAIL: leaving(TAIL, factor)})
    weighing = Weighing(0.4)
    present = weighing.check_tails(evidence_of([0.2, -0.2]))
    assert weighing.answers[TAIL].status == status and present.gap.value == pytest.approx(gap)
    reason = "explains 74 % of the gap; the rest is too large" if status == "clear" else ""
    assert weighing.answers[TAIL].reason == reason


@pytest.mark.parametrize(("check", "hides"), [
    (TEMPERATURE, True), ("credit", False), ("repeated-responses", False), ("lm-head", False),
    ("not-as-sampled", True), (LATTICE, False),
])  # fmt: skip
def test_a_fault_hides_a_tail_unless_it_is_harmless(check, hides, monkeypatch):
    with_answers(monkeypatch, {TAIL: found(TAIL)})
    weighing = Weighing(0.4)
    weighing.answers = {check: found(check, 0.5)}
    weighing.check_tails(evidence_of([0.02, -0.02]))
    assert (weighing.answers[TAIL].status == "untested") == hides


@pytest.mark.parametrize(("check", "status"), [
    (TEMPERATURE, "untested"), ("credit", "found"), (TAIL, "found"), (None, "found"),
])  # fmt: skip
def test_what_counts_only_alone_is_withdrawn_beside_another_fault(check, status):
    weighing = Weighing(1.0)
    weighing.answers = {
        "not-as-sampled": found("not-as-sampled"),
        PENALTY: Finding(PENALTY, "clear"),
    }
    if check:
        weighing.answers[check] = found(check, 0.2)
        # The one that explains most is named
        weighing.answers["uniform-mixture"] = found("uniform-mixture", 0.1)
        if status == "found":
            del weighing.answers["uniform-mixture"]
    weighing.withdraw_uncertain()
    alone = weighing.answers["not-as-sampled"]
    assert alone.status == status
    if status == "untested":
        assert alone.reason == f"fix “{diagnose.module(check).TITLE}” first"


def test_without_a_gap_causes_are_clear_unless_a_model_was_named(monkeypatch):
    """Below 2e-5 nats, rounding of float32; values are looked at nonetheless."""
    for name in (TEMPERATURE, "values", "another-prompt", "lm-head"):
        monkeypatch.setattr(diagnose.module(name), "check", lambda _, name=name: found(name))
    little, more = evidence_of([1.9e-5]), evidence_of([2.1e-5])
    without = run_check(TEMPERATURE, little)
    assert (without.status, without.check) == ("clear", TEMPERATURE)
    assert without.sentence == "The mean gap is 1.9e-05 nats: there is nothing to explain."
    assert run_check(TEMPERATURE, more).status == "found"
    assert run_check("values", little).status == "found"
    assert run_check("another-prompt", little).status == "clear"
    assert run_check("another-prompt", replace(little, model=object())).status == "found"
    assert run_check(TEMPERATURE, replace(little, model=object())).status == "clear"


def test_a_check_that_could_not_be_made_says_why(monkeypatch):
    def skipped(_: object) -> Finding:
        raise SkippedReading("the budget ended")

    monkeypatch.setattr(diagnose.module(TEMPERATURE), "check", skipped)
    finding = run_check(TEMPERATURE, evidence_of([0.1]))
    assert (finding.status, finding.reason) == ("untested", "the budget ended")
    monkeypatch.setattr(diagnose.module(TAIL), "check", lambda _: found(TAIL))
    rare = evidence_of([0.1], gap_is_rare=True)
    assert (
        run_check(TAIL, rare).reason == RARE
        and run_check(TAIL, evidence_of([0.1])).status == "found"
    )
    assert run_check(TEMPERATURE, rare).reason == "the budget ended"


def test_a_fault_of_a_part_says_what_its_responses_share(monkeypatch):
    lengths, steps = [1] * 40, np.arange(40) % 2
    evidence = evidence_of([0.1] * 40, lengths)
    evidence = replace(evidence, sample=replace(evidence.sample, step_S=steps))
    every_S = np.ones(40, dtype=bool)
    for inside_S, status, words in (
        (steps == 1, "found", " The responses with it are all of step 1 (1 of 2)."),
        (np.arange(40) % 7 < 3, "found", ""),
        (steps == 1, "clear", None),
        (every_S, "found", None),
    ):
        answer = Finding("values", status, sentence="Odd.", part=Subset(inside_S, every_S))
        monkeypatch.setattr(diagnose.module("values"), "check", lambda _, answer=answer: answer)
        finding = run_check("values", evidence)
        if words is None:
            assert finding is answer
            continue
        assert finding.sentence == f"Odd.{words}"
        shared = ", all of step 1 (1 of 2)" if words else ""
        assert finding.where == f"in {inside_S.sum()} of 40 responses{shared}"


def test_a_diagnosis_leaves_what_nothing_explains(monkeypatch):
    """0.2 nats in the mean of eight tokens: a placeholder of 0.8 goes, and a temperature halves the
    others but for one that was set aside.
    """
    spoiled_T = np.arange(8) == 1

    def values(evidence: Evidence) -> Finding:
        left_N = np.where(np.arange(8) == 0, np.nan, evidence.sample.d_N)
        return Finding("values", "found", left_N=left_N)

    monkeypatch.setattr(diagnose.module("values"), "spoiled_T", lambda _: spoiled_T, raising=False)
    answers = {"values": values, TEMPERATURE: leaving(TEMPERATURE, 0.5, least=0.06)}
    with_answers(monkeypatch, answers)
    evidence = evidence_of([0.8, 0.2, *[0.1] * 6])
    findings = diagnose.diagnose(evidence)
    assert findings.evidence is evidence
    assert [finding.check for finding in findings.findings] == diagnose.names()
    left = [0.2, *[0.05] * 6]
    assert findings.unexplained.nats == pytest.approx(np.mean(left))
    assert findings.unexplained.share == pytest.approx(sum(left) / 1.6)
    assert names(findings.found) == ["values", TEMPERATURE]
    with_answers(monkeypatch, {})
    nothing = diagnose.diagnose(evidence_of([0.0]))
    assert (nothing.unexplained.nats, nothing.unexplained.share) == (0.0, 0.0)
