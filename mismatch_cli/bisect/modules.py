"""Both models taken apart on the same responses: module by module, layer by layer, and what grafts
leave of the gap.

*Isolated*: each engine module on the trainer's own input. *Layers*: how far the two residual
streams are apart, and what each block adds. *Grafted*: log π of a trainer in which one kind of
modules is the engine's, which is causal (`grafting.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mismatch_cli.models.dissection.streams import POINTS, Stream, sum_stream

BITS, ROUNDING, DIFFERENT = "bits", "rounding", "different"
# The number of successive roundings in a module of each kind, with that of its output.
_ROUNDINGS = {
    "embedding": 1, "norm": 3, "rotary": 3, "attention": 8, "router": 2, "mlp": 5, "experts": 8,
    "head": 2,
}  # fmt: skip
# The RMS error of rounding to a dtype, in units of its ε: ε/2 · 1/√3, and 0.73 of that averaged
# over mantissas.
_RMS = 0.21
_SLACK = 1.5  # cancellation enlarges errors relative to the sum
ALL = "all"


@dataclass
class IsolatedModule:
    """One module over all responses: the engine's outputs for the trainer's inputs, compared
    with the trainer's.
    """

    module: str
    kind: str
    width: int = 1
    eps: float = 0.0  # of the less precise dtype
    same: bool = True
    differing: int = 0
    elements: int = 0
    error: float = 0.0  # Σ (engine − trainer)²
    size: float = 0.0  # Σ trainer²

    def add(self, engine: Tensor, trainer: Tensor) -> None:
        """Add a call; equality to the bit is judged after rounding to the less precise dtype."""
        lower = max(engine.dtype, trainer.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        self.eps = max(self.eps, torch.finfo(lower).eps)
        self.width = max(self.width, trainer.shape[-1])
        engine, trainer = (x.detach().flatten().to("cpu") for x in (engine, trainer))
        unequal = engine.to(lower) != trainer.to(lower)
        self.same &= not bool(unequal.any())
        self.differing += int(unequal.sum())
        self.elements += len(unequal)
        self.error += float((engine.double() - trainer.double()).square().sum())
        self.size += float(trainer.double().square().sum())

    @property
    def relative(self) -> float:
        """‖engine − trainer‖ / ‖trainer‖; 1 where only the trainer's is 0."""
        if not self.size:
            return float(self.error > 0)
        return float(np.sqrt(self.error / self.size))

    @property
    def bound(self) -> float:
        """The relative error that rounding explains: independent roundings on both sides, each with
        an RMS of 0.21 ε.

        In float32 sums round too, term by term: their errors grow with the root of the number of
        terms.
        """
        terms = self.width if self.eps == torch.finfo(torch.float32).eps else 1
        return _SLACK * _RMS * self.eps * float(np.sqrt(2 * _ROUNDINGS[self.kind] * terms))

    @property
    def relation(self) -> str:
        """Whether the outputs are equal to the bit, up to rounding, or not."""
        if self.same:
            return BITS
        if self.relative <= self.bound:
            return ROUNDING
        return DIFFERENT

    def to_json(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "kind": self.kind,
            "relation": self.relation,
            "relative": self.relative,
            "differing": self.differing / max(self.elements, 1),
        }


@dataclass
class _Sums:
    """Sums of squares (float64) over the tokens of all responses: the error, what its block
    added, and the stream.
    """

    error: float = 0.0
    added: float = 0.0
    size: float = 0.0


@dataclass
class LayerErrors:
    """How far apart the residual streams of both models' own passes are, at three points of each
    layer.
    """

    sums: list[dict[str, _Sums]] = field(default_factory=list)

    def add(
        self, engine: Sequence[dict[str, Stream]], trainer: Sequence[dict[str, Stream]]
    ) -> None:
        """Add a response; skips a point that either side does not show."""
        # What a side lacks is said where its modules are matched.
        if len(engine) != len(trainer):
            return
        for layer, (theirs, ours) in enumerate(zip(engine, trainer, strict=True)):
            if layer == len(self.sums):
                self.sums.append({})
            before: Tensor | None = None
            for point in POINTS:
                if point not in theirs or point not in ours:
                    continue
                stream_NH = sum_stream(ours[point])
                apart_NH = sum_stream(theirs[point]) - stream_NH
                sums = self.sums[layer].setdefault(point, _Sums())
                sums.error += float(apart_NH.square().sum())
                sums.size += float(stream_NH.square().sum())
                if before is not None:
                    sums.added += float((apart_NH - before).square().sum())
                before = apart_NH

    def to_json(self) -> list[dict[str, Any]]:
        """`inherited`: ‖s_e − s_t‖/‖s_t‖ at the point; `added`: the part that its block added."""
        layers: list[dict[str, Any]] = []
        for layer, points in enumerate(self.sums):
            layers.append({"layer": layer})
            for point, sums in points.items():
                errors = {"inherited": _ratio(sums.error, sums.size)}
                # No block precedes the first point of a layer.
                if point != "before":
                    errors["added"] = _ratio(sums.added, sums.size)
                layers[-1][point] = errors
        return layers


def _ratio(error: float, size: float) -> float:
    return float(np.sqrt(error / size)) if size else 0.0


@dataclass
class ModuleFindings:
    """What stage 3 measures on some responses; `_T` arrays are float32, one per response."""

    logp_prefill: list[np.ndarray] = field(default_factory=list)  # of the engine's pass
    # Of the trainer, one response at a time
    logp_trainer: list[np.ndarray] = field(default_factory=list)
    # Of the trainer with one kind from the engine
    grafted: dict[str, list[np.ndarray]] = field(default_factory=dict)
    alone: dict[str, list[np.ndarray]] = field(default_factory=dict)  # with all kinds but this one
    isolated: dict[str, IsolatedModule] = field(default_factory=dict)
    layers: LayerErrors = field(default_factory=LayerErrors)
    # Kinds, or modules, that could not be compared, and why
    missing: list[str] = field(default_factory=list)

    @property
    def gap(self) -> float:
        """Mean |log π − log μ| of these tokens, both sides as they read a prompt."""
        return self._mean_gap(self.logp_trainer)

    def left(self, kind: str) -> float:
        """The gap with that kind grafted."""
        return self._mean_gap(self.grafted[kind])

    def made_alone(self, kind: str) -> float | None:
        """The gap that a kind causes when all others are the engine's; None for a kind nested in
        another.

        Where many kinds round, grafting one may remove nothing although it alone causes as much as
        all: rounding errors do not add up, and one disturbance is enough.
        """
        if kind not in self.alone:
            return None
        return self._mean_gap(self.alone[kind])

    def counted(self) -> list[np.ndarray]:
        """For each response, bool `[T]`: tokens in the support of both sides under every graft."""
        passes = [
            self.logp_prefill,
            self.logp_trainer,
            *self.grafted.values(),
            *self.alone.values(),
        ]
        return [np.isfinite(np.stack(logp)).all(0) for logp in zip(*passes, strict=True)]

    def _mean_gap(self, logp: Sequence[np.ndarray]) -> float:
        apart_N = [np.zeros(0)]
        for own_T, engine_T, counts_T in zip(logp, self.logp_prefill, self.counted(), strict=True):
            apart_N.append(np.abs(own_T[counts_T].astype(np.float64) - engine_T[counts_T]))
        all_N = np.concatenate(apart_N)
        return float(all_N.mean()) if len(all_N) else 0.0

    def to_json(self) -> dict[str, Any]:
        """`grafts`: shares without intervals, which are added where the prompts are known."""
        gap = self.gap
        grafts = []
        for kind in self.grafted:
            left = self.left(kind)
            share = 1 - left / gap if gap else 0.0
            alone = self.made_alone(kind)
            grafts.append({"kind": kind, "share": share, "left": left, "alone": alone})
        return {
            "responses": len(self.logp_trainer),
            "gap": gap,
            "layers": self.layers.to_json(),
            "isolated": [module.to_json() for module in self.isolated.values()],
            "grafts": grafts,
            "missing": self.missing,
        }


def choose_responses(
    abs_d: Sequence[np.ndarray], prompt_ids: Sequence[int], count: int
) -> list[int]:
    """Which responses to examine: the worst by mean |Δ|, and as many with a mean nearest to the
    median.

    They are of different prompts, as far as possible.
    """
    mean = np.array([float(np.mean(d)) if len(d) else -np.inf for d in abs_d])
    measured = np.flatnonzero(np.isfinite(mean)).tolist()
    if not measured:
        return []
    median = float(np.median(mean[measured]))
    worst = sorted(measured, key=lambda i: (-mean[i], i))
    typical = sorted(measured, key=lambda i: (abs(mean[i] - median), i))
    chosen = _pick(worst, prompt_ids, [], (count + 1) // 2)
    chosen = _pick(typical, prompt_ids, chosen, count)
    # With fewer prompts than responses to choose, some prompts give several.
    others = [i for i in worst if i not in chosen]
    return chosen + others[: count - len(chosen)]


def _pick(
    ordered: Sequence[int], prompt_ids: Sequence[int], chosen: list[int], count: int
) -> list[int]:
    """`chosen`, filled up to `count` with the first response of each prompt not yet in it."""
    chosen = list(chosen)
    prompts = {prompt_ids[i] for i in chosen}
    for i in ordered:
        if len(chosen) < count and prompt_ids[i] not in prompts:
            chosen.append(i)
            prompts.add(prompt_ids[i])
    return chosen
