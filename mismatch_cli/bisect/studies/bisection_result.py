"""What a search says, as docs/json/bisect.md describes it; parts of it are in `search.json` too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_cli.base.json_form import left_out_if_none
from mismatch_cli.bisect.model_config import ConfigDifference
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.trace.origin import About


@dataclass(frozen=True)
class Measures:
    """The mean of |d| and of k3, nats, and the share of tokens with |d| > ln 2; or their changes."""

    abs_d: Estimate
    k3: Estimate
    beyond_ln2: Estimate


@dataclass(frozen=True)
class StageRow:
    """A stage of the search: how it ended, why it did not if so, and its seconds."""

    stage: int
    name: str
    status: str
    why: str
    seconds: float

    @property
    def is_done(self) -> bool:
        return self.status == "done"


@dataclass(frozen=True)
class LegRow:
    """One side under a change, kept as a trace; seconds are None where nothing was run."""

    name: str
    side: str  # empty: both, as recorded
    what: str
    change: Mapping[str, Any]
    seconds: float | None
    responses: int
    trace: str


@dataclass(frozen=True, kw_only=True)
class Triangle:
    """Mean |difference| between legs, nats; None where a leg was not read.

    The reference is the trainer in float32. `nearer` is the side that is closer to it with 95 %
    confidence; `decode_prefill_is` is what sets decoding and prefill apart (`decoding.py`).
    """

    as_recorded: Estimate
    decode_prefill: Estimate | None
    rollout_noise: Estimate | None
    trainer_noise: Estimate | None
    rollout_reference: Estimate | None
    trainer_reference: Estimate | None
    prefill_reference: Estimate | None
    nearer: str | None
    decode_prefill_is: str | None

    @property
    def between(self) -> dict[str, Estimate]:
        """By name, the distances between the sides and the reference, as far as they were read."""
        return _without_none(
            {
                "engine – trainer, as recorded": self.as_recorded,
                "engine – float32": self.rollout_reference,
                "trainer – float32": self.trainer_reference,
                "engine in one prefill – float32": self.prefill_reference,
            }
        )

    @property
    def within(self) -> dict[str, Estimate]:
        """By name, how far a side is from itself."""
        return _without_none(
            {
                "engine: decode – prefill": self.decode_prefill,
                "engine: batches – single": self.rollout_noise,
                "trainer: micro-batches": self.trainer_noise,
            }
        )


def _without_none(distances: Mapping[str, Estimate | None]) -> dict[str, Estimate]:
    return {name: distance for name, distance in distances.items() if distance is not None}


@dataclass(frozen=True)
class Cost:
    """Seconds per response with a change relative to those without it, on the side that changes."""

    factor: float
    seconds_before: float
    seconds_after: float


@dataclass(frozen=True)
class LegsOfCause:
    """The legs of rollout and trainer, without the change and with it."""

    before: Sequence[str]
    after: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class CauseRow:
    """What one change does to the gap."""

    rank: int
    name: str
    setting: str
    side: str
    stage: int
    value: Any
    better: Any
    change: str  # what to do, a clause
    floor: bool  # whether it is a precision that both sides share
    cause: str
    check: str | None  # of `diagnose`, if that names it
    share: Estimate  # of the recorded Σ|d|
    effect: Measures  # with − without; below 0 the gap shrinks
    left: float  # mean |d| with the change, nats
    cost: Cost | None
    command: Sequence[str]
    trace: str
    legs: LegsOfCause
    parts: Sequence[str]  # tensors or modules


@dataclass(frozen=True)
class CombinedChanges:
    """The settings that help, changed at once."""

    settings: Sequence[str]
    legs: Sequence[str]
    share: Estimate
    left: float  # nats


@dataclass(frozen=True)
class Fault:
    """What `diagnose` finds in the recorded columns."""

    setting: str
    check: str
    title: str
    cause: str
    change: str
    sentence: str
    explains: float | None  # share of Σ|d|


@dataclass(frozen=True)
class TensorRow:
    """A tensor of the trainer whose numbers differ in the engine."""

    tensor: str
    relation: str  # scaled, rounded, other
    relative: float | None
    detail: str


@dataclass(frozen=True)
class TensorsOfRelation:
    """Tensors that one experiment replaces together."""

    name: str
    relation: str
    tensors: Sequence[str]


@dataclass(frozen=True)
class Classes:
    """The classes of the two models."""

    rollout: str
    trainer: str


@dataclass(frozen=True)
class LackingTensors:
    """Tensors that a side's model lacks though the other's computes with them."""

    rollout: Sequence[str] = ()
    trainer: Sequence[str] = ()


@dataclass(frozen=True)
class ComparedModels:
    """The engine's tensors and configuration beside the trainer's."""

    compared: int = 0
    unread: Sequence[str] = ()  # `NAME: reason`
    differing: Sequence[TensorRow] = ()
    groups: Sequence[TensorsOfRelation] | None = left_out_if_none()
    config: Sequence[ConfigDifference] = ()
    architectures: Classes | None = None  # None: they agree
    lacking: LackingTensors | None = left_out_if_none()


@dataclass(frozen=True)
class PointError:
    """The relative error of the residual stream at a point, and that which its block added."""

    inherited: float
    added: float | None = left_out_if_none()


@dataclass(frozen=True)
class StreamErrors:
    """The errors before a layer, after its attention and after its MLP, as far as they show."""

    layer: int
    before: PointError | None = left_out_if_none()
    attention: PointError | None = left_out_if_none()
    mlp: PointError | None = left_out_if_none()


@dataclass(frozen=True)
class ModuleRow:
    """A module of the engine on the trainer's input."""

    module: str
    kind: str
    relation: str  # bits, rounding, different
    relative: float
    differing: float  # share of the elements


@dataclass(frozen=True)
class GraftRow:
    """The engine's modules of one kind in the trainer's pass."""

    kind: str
    share: float  # of the gap of these responses
    left: float  # nats
    alone: float | None = None  # the gap with all kinds but this one, nats


@dataclass(frozen=True)
class Modules:
    """Both models' modules on some responses, with the settings that cause gaps undone."""

    responses: int
    gap: float  # nats
    layers: Sequence[StreamErrors] = ()
    isolated: Sequence[ModuleRow] = ()
    grafts: Sequence[GraftRow] = ()
    missing: Sequence[str] = ()


@dataclass(frozen=True)
class UntriedRow:
    """A setting that could not be changed here."""

    setting: str
    side: str
    better: Any
    why: str


@dataclass(frozen=True, kw_only=True)
class BisectionResult:
    """What a search says; causes are in the order of their shares, a precision of both sides comes
    last.
    """

    trace: str
    about: About
    responses: int
    prompts: int
    tokens: int
    gap: Measures
    verdict: str
    differences: Sequence[str]
    not_tested: Sequence[str]
    stages: Sequence[StageRow]
    legs: Sequence[LegRow]
    triangle: Triangle
    causes: Sequence[CauseRow]
    tested: Sequence[CauseRow]
    together: CombinedChanges | None
    overlap: float | None  # by how much the shares exceed what all causes explain together
    noise: Estimate | None  # share of the gap
    unexplained: Estimate
    findings: Sequence[Fault] | None
    weights: ComparedModels | None
    modules: Modules | None
    untried: Sequence[UntriedRow]

    @property
    def prompts_exact(self) -> bool:
        return True
