"""All checks in the order in which they make sense: what a fault has spoiled, later checks do not judge."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np

from mismatch_cli import registry
from mismatch_cli.diagnosis.counts import UNCERTAIN
from mismatch_cli.diagnosis.evidence import Evidence
from mismatch_cli.diagnosis.finding import Finding, untested
from mismatch_cli.diagnosis.sample import seen_before

_PACKAGE = "mismatch_cli.diagnosis.checks"
PRECISION_STAGE = 6  # from here on causes are floors, not faults
_NO_GAP = 2e-5  # nats on an average token: the rounding of float32, of which there is nothing to explain
_SPOILED = 0.2  # of the responses misaligned: nothing about distributions can be said
_EXPLAINED = 0.5


@dataclass(frozen=True)
class Diagnosis:
    """Every finding in the order of the checks, and the found ones, the likeliest cause first."""

    evidence: Evidence
    findings: tuple[Finding, ...]

    @property
    def found(self) -> tuple[Finding, ...]:
        """By stage, within one by what they explain: what comes first can make what comes after."""
        found = [finding for finding in self.findings if finding.status == "found"]
        return tuple(sorted(found, key=lambda f: (module(f.check).STAGE, -(f.explains or 0.0))))

    @property
    def faults(self) -> tuple[Finding, ...]:
        """What is found and no mere floor of the precision."""
        return tuple(f for f in self.found if module(f.check).STAGE < PRECISION_STAGE)


def names() -> list[str]:
    """The checks, in the order in which they are made."""
    return sorted(registry.names(_PACKAGE), key=lambda name: (module(name).STAGE, name))


def module(name: str) -> ModuleType:
    return registry.load(_PACKAGE, name, "check")


def diagnose(evidence: Evidence) -> Diagnosis:
    """Make every check; a later one sees the tokens that earlier faults have left whole."""
    findings: list[Finding] = []
    blocked, present = "", evidence
    for name in names():
        finding = untested(name, blocked) if blocked else _check(name, present)
        findings.append(finding)
        if finding.status == "found":
            present = _cleaned(present, finding)
            blocked = blocked or _blocks(present, finding)
    return Diagnosis(evidence, tuple(findings))


def _check(name: str, evidence: Evidence) -> Finding:
    check = module(name)
    gap = float(np.abs(evidence.sample.d_N).mean()) if len(evidence.sample.kept) else 0.0
    if check.STAGE >= 3 and name != "lm-head" and gap < _NO_GAP:
        return Finding(name, "clear", sentence=f"The mean gap is {gap:.2g} nats: there is nothing to explain.")
    finding: Finding = check.check(evidence)
    return finding


def _cleaned(evidence: Evidence, finding: Finding) -> Evidence:
    """What is left to judge once the tokens of a fault are out."""
    sample = evidence.sample
    if finding.check in ("placeholders", "masked-tokens", "end-of-sequence"):
        with np.errstate(invalid="ignore"):
            d_T = np.abs(sample.logp_T - sample.logq_T)
        zero_T = ((sample.logq_T == 0) | (sample.logp_T == 0)) & (d_T > -UNCERTAIN)
        drop_T = zero_T | (d_T > 2.0) if finding.check == "masked-tokens" else zero_T
        drop_T = drop_T | sample.last_T if finding.check == "end-of-sequence" else drop_T
        return evidence.without_tokens(drop_T)
    if finding.check in ("index-shift", "retokenised"):
        alignment = evidence.alignment
        kept = replace(sample, counts_T=sample.counts_T & (alignment.lag_S == 0)[sample.response_T])
        return replace(evidence, sample=kept)
    if finding.check == "prefix-cache":
        return evidence.without_tokens(seen_before(sample)[sample.response_T])
    return evidence


def _blocks(evidence: Evidence, finding: Finding) -> str:
    """Why later checks make no sense, if they do not."""
    title = module(finding.check).TITLE
    if not evidence.sample.counts_T.any():
        return f"nothing is left to judge: first repair “{title}”"
    if module(finding.check).STAGE == 2 and (finding.effect or 0) > _SPOILED:
        return f"most responses are misaligned: first repair “{title}”"
    if module(finding.check).STAGE == 3 and (finding.explains or 0) > _EXPLAINED:
        return f"“{title}” makes most of the gap: first repair that"
    return ""
