"""All checks in the order in which they make sense: what a fault has spoiled, later checks do not judge."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np

from mismatch_cli import registry
from mismatch_cli.diagnosis.evidence import Evidence
from mismatch_cli.diagnosis.finding import Finding, untested

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
            present = _cleaned(present, module(name))
            blocked = blocked or _blocks(present, finding)
    return Diagnosis(evidence, tuple(findings))


def _check(name: str, evidence: Evidence) -> Finding:
    check = module(name)
    gap = float(np.abs(evidence.sample.d_N).mean()) if len(evidence.sample.kept) else 0.0
    if check.STAGE >= 3 and gap < _NO_GAP and getattr(check, "NEEDS_A_GAP", True):
        return Finding(name, "clear", sentence=f"The mean gap is {gap:.2g} nats: there is nothing to explain.")
    finding: Finding = check.check(evidence)
    return finding


def _cleaned(evidence: Evidence, check: ModuleType) -> Evidence:
    """What is left to judge once the tokens that a fault has spoiled are out, where its check names them."""
    return evidence.without_tokens(check.spoiled_T(evidence)) if hasattr(check, "spoiled_T") else evidence


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
