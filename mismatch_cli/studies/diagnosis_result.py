"""What a diagnosis says, as docs/json/diagnose.md describes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mismatch_cli.base.json_form import left_out_if_none
from mismatch_cli.diagnosis.diagnose import Shares, module
from mismatch_cli.diagnosis.evidence import Status
from mismatch_cli.limits.expected import Expected
from mismatch_cli.trace.origin import About


@dataclass(frozen=True)
class SampleSize:
    """How much the checks of tokens read."""

    responses: int
    tokens: int


@dataclass(frozen=True)
class CoveredTokens:
    """What the gap was measured on."""

    tokens: int
    responses: int
    prompts: int
    prompts_exact: bool = True


@dataclass(frozen=True)
class ResolvedGap(Expected):
    """What is expected without a fault, and the gap above which it is too large, nats per token."""

    resolution: float = field(kw_only=True)


@dataclass(frozen=True, kw_only=True)
class UnexplainedGap:
    """What is left once everything found is undone: nats per token, and its share of Σ|d|."""

    nats: float
    share: float
    expected: ResolvedGap


@dataclass(frozen=True, kw_only=True)
class SuspectRow:
    """A setting that may cause a gap, or a check that shows in the gap or was not made.

    A setting has none of the first three fields, a check none of those from `setting` to `change`.
    """

    check: str | None = None
    explains: float | None = None  # share of Σ|d|
    needs: str | None = None  # what to type to make the check
    setting: str | None = None
    value: Any = None
    why: str | None = None
    source: str | None = None
    seen: str | None = None
    change: str | None = None
    test: Sequence[str] = ()


@dataclass(frozen=True)
class EvidenceRow:
    """A figure that a check rests on."""

    label: str
    value: float | int | str | None


@dataclass(frozen=True, kw_only=True)
class FindingRow:
    """The answer of one check, with what causes such a fault and what to change in this trace."""

    title: str
    cause: str
    change: str
    source: str
    check: str
    status: Status
    effect: float | None  # in the unit `measure`
    measure: str
    sentence: str
    evidence: Sequence[EvidenceRow]
    reason: str
    needs: str
    where: str
    explains: float | None  # share of Σ|d|
    beyond_expected: bool
    at_most: bool  # whether `explains` is an upper bound

    @property
    def stage(self) -> int:
        return int(module(self.check).STAGE)


@dataclass(frozen=True, kw_only=True)
class DiagnosisResult:
    """The settings among the suspects come first; the findings are in the order of the checks."""

    traces: Sequence[str]
    about: About
    pair: str
    responses: int
    sample: SampleSize
    abs_d_mean: float | None  # nats per token
    faults: Sequence[str]
    first_cause: str | None
    unexplained: UnexplainedGap
    shares: Shares
    suspects: Sequence[SuspectRow]
    findings: Sequence[FindingRow]
    custom_code: Mapping[str, Sequence[str]] | None = left_out_if_none()  # classes by model

    @property
    def untested(self) -> list[FindingRow]:
        return [row for row in self.findings if row.status == "untested"]

    def finding(self, check: str) -> FindingRow:
        """The answer of a check that was asked for one."""
        return next(row for row in self.findings if row.check == check)
