"""How an engine's tensor differs from the trainer's: scaled, rounded beyond what dtypes explain,
or otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Relation = Literal["scaled", "rounded", "other"]
_CHUNK = 1 << 22  # elements to compare at a time, in float64
# Elements of a large tensor, in whole rows, that suffice to recognise a rounding
_MOST_ELEMENTS = 1 << 24
_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
# Half a step: relative, least
_FP8 = ((torch.float8_e4m3fn, 1 / 16, 2.0**-9), (torch.float8_e5m2, 1 / 8, 2.0**-16))
_LEVELS = {127: "int8", 128: "int8", 7: "int4", 8: "int4"}  # level that the largest value maps to
_IN_A_ROW = (128, 64, 32)  # neighbours that share a scale
_FEWEST = 16  # elements in which a grid shows
_NEARLY_ALL = 0.999  # of the elements: double rounding may go either way


@dataclass(frozen=True)
class TensorDifference:
    """`relative`: the L2 norm of the difference over that of the trainer's tensor; `share`:
    elements that differ.
    """

    relation: Relation
    relative: float
    share: float
    detail: str


def difference(
    engine: Tensor, trainer: Tensor, computes: torch.dtype | None = None
) -> TensorDifference | None:
    """None if both hold the same numbers up to the lower precision: dtype rounding is a cause of
    its own.

    `computes` is the trainer's dtype, if not that of its folder.
    """
    if engine.shape != trainer.shape:
        shapes = f"of shape {tuple(engine.shape)}, not {tuple(trainer.shape)}"
        return TensorDifference("other", math.inf, 1.0, shapes)
    # The plain cast of the trainer's tensor is the usual case, and needs no float64.
    if _eps(engine.dtype) >= _eps(trainer.dtype) and _is_equal(engine, trainer.to(engine.dtype)):
        return None
    if computes is not None:
        trainer = trainer.to(computes)
    common = max(engine.dtype, trainer.dtype, key=_eps)
    sums = _TensorSums()
    for e, t in _chunks(engine, trainer, common):
        sums.add(e, t)
    if not sums.differing:
        return None
    relation, detail = _relation(engine, trainer, common, sums)
    return TensorDifference(relation, sums.relative, sums.differing / engine.numel(), detail)


@dataclass
class _TensorSums:
    """Sums over the elements of both tensors, in float64."""

    differing: int = 0  # elements
    squares: float = 0.0  # Σ (engine − trainer)²
    own: float = 0.0  # Σ trainer²
    product: float = 0.0  # Σ engine · trainer

    def add(self, e: Tensor, t: Tensor) -> None:
        """Add a chunk; NaN on both sides is equal."""
        self.differing += int(((e != t) & ~(e.isnan() & t.isnan())).sum())
        self.squares += float((e - t).square().sum())
        self.own += float(t.square().sum())
        self.product += float((e * t).sum())

    @property
    def relative(self) -> float:
        """‖engine − trainer‖ / ‖trainer‖."""
        return math.sqrt(self.squares / self.own) if self.own else math.inf

    @property
    def factor(self) -> float:
        """The multiple of the trainer's tensor that is nearest to the engine's."""
        return self.product / self.own if self.own else math.nan


def _relation(
    engine: Tensor, trainer: Tensor, common: torch.dtype, sums: _TensorSums
) -> tuple[Relation, str]:
    factor = sums.factor
    if engine.numel() >= 2 and _is_scaled(engine, trainer, common, factor):
        digits = 4 if abs(factor - 1) >= 5e-4 else 7
        return "scaled", f"× {factor:.{digits}f}"
    if not math.isfinite(sums.relative):
        return "other", ""
    engine_rows, trainer_rows = _sampled_rows(engine), _sampled_rows(trainer)
    grid = _rounding(engine_rows, trainer_rows, float(engine.abs().max()))
    if grid:
        return "rounded", f"to {grid}"
    grid = _rounding(trainer_rows, engine_rows, float(trainer.abs().max()))
    if grid:
        return "rounded", f"the trainer's to {grid}"
    return "other", ""


def _is_equal(engine: Tensor, trainer: Tensor) -> bool:
    return torch.equal(engine.to(trainer.device), trainer)


def _eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def _chunks(
    engine: Tensor, trainer: Tensor, common: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of both, rounded to the lower precision, in float64."""
    pairs = zip(engine.flatten().split(_CHUNK), trainer.flatten().split(_CHUNK), strict=True)
    for e, t in pairs:
        yield e.cpu().to(common).double(), t.cpu().to(common).double()


def _is_scaled(engine: Tensor, trainer: Tensor, common: torch.dtype, factor: float) -> bool:
    """Whether only rounding is left once the factor is removed."""
    left = own = 0.0
    for e, t in _chunks(engine, trainer, common):
        left += float((e - factor * t).square().sum())
        own += float(t.square().sum())
    residual = math.sqrt(left / own) if own else math.inf
    eps = max(_eps(common), _stored_eps(engine), _stored_eps(trainer))
    # A factor so near 1 that rounding could make it is none.
    return residual <= abs(factor) * eps / 2 and abs(factor - 1) > 3 * residual


def _stored_eps(tensor: Tensor) -> float:
    """ε of the dtype in which a tensor was saved: float32 weights may come from bfloat16 files."""
    fits = [d for d in _DTYPES if torch.equal(tensor.to(d).to(tensor.dtype), tensor)]
    return max(map(_eps, fits), default=_eps(tensor.dtype))


def _sampled_rows(tensor: Tensor) -> Tensor:
    """The tensor as rows, on the CPU; every n-th row of a large one."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)
    return rows[:: max(1, math.ceil(tensor.numel() / _MOST_ELEMENTS))].cpu()


def _rounding(coarse: Tensor, fine: Tensor, largest: float) -> str:
    """What `coarse` is rounded to and `fine` is not: a dtype, or values on a grid; empty for
    neither.
    """
    finest = max(coarse.dtype, fine.dtype, key=_eps)
    for dtype in _DTYPES:
        if _eps(dtype) > _eps(finest) and torch.equal(fine.to(dtype).float(), coarse.float()):
            return _name(dtype)
    # Two roundings, of half of this each: of a value and its step, or of both values.
    error = _eps(finest) * (1.1 if finest != torch.float32 else 8)
    for scope, shape in _scopes(coarse.shape[1]):
        c, f = coarse.float().reshape(shape), fine.float().reshape(shape)
        if c.shape[1] < _FEWEST:
            continue
        # The rows are a sample: the largest value of a tensor, which set its step, may be missing.
        top = torch.tensor([[largest]]) if scope == "tensor" else c.abs().amax(1, keepdim=True)
        for kind, step, fits in _grids(c, f, top, error):
            if fits >= _NEARLY_ALL:
                return f"{kind} values per {scope}, {_steps(step)}"
    return ""


def _scopes(columns: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """What shares a step: the tensor, a row, or neighbours in it; with the shape that makes it a
    row.
    """
    yield "tensor", (1, -1)
    yield "row", (-1, columns)
    for n in _IN_A_ROW:
        if columns % n == 0 and columns > n:
            yield f"{n} neighbours", (-1, n)


def _grids(c: Tensor, f: Tensor, top: Tensor, error: float) -> Iterator[tuple[str, Tensor, float]]:
    """The grids that quantisers use: each with its step, and the share of elements at their
    nearest grid point.
    """
    for levels, kind in _LEVELS.items():
        step = _refine_step(c, (top / levels).clamp_min(1e-30))
        yield kind, step, _fit(c, f, (c / step).round() * step, step / 2, error)
    gap = _smallest_gap(c, top, error)
    if gap is not None:
        kind = "int8" if float((top / gap).max()) > 16 else "int4"
        yield kind, gap, _fit(c, f, (c / gap).round() * gap, gap / 2, error)
    for dtype, half, least in _FP8:
        step = (top / torch.finfo(dtype).max).clamp_min(1e-30)
        on_grid = (c / step).to(dtype).float() * step
        yield _name(dtype), step, _fit(c, f, on_grid, f.abs() * half + step * least, error)


def _fit(c: Tensor, f: Tensor, on_grid: Tensor, half: Tensor, error: float) -> float:
    """The share of elements of `c` that are on a grid, at the point nearest to `f`: within `half`
    a step of it.
    """
    is_on_grid = (on_grid - c).abs() <= error * c.abs()
    is_nearest = (c - f).abs() <= half * 1.001 + error * f.abs()
    return float((is_on_grid & is_nearest).float().mean())


def _smallest_gap(c: Tensor, top: Tensor, error: float) -> Tensor | None:
    """The step of each row whose largest value is not at the end of the grid; None if it has too
    many values.
    """
    gaps = c.sort(dim=1).values.diff(dim=1)
    step = gaps.masked_fill(gaps <= 2 * error * top + 1e-30, torch.inf).amin(1, keepdim=True)
    if not bool((top <= 256 * step).all()):
        return None
    return _refine_step(c, step.where(step.isfinite(), top.clamp_min(1e-30)))


def _refine_step(c: Tensor, step: Tensor) -> Tensor:
    """The step that fits all values best, since the step from the largest value inherits its
    rounding.

    First from small multiples, whose factors are certain, then from all.
    """
    for most in (32.0, torch.inf):
        number = (c / step).round()
        number = number.where(number.abs() <= most, 0.0)
        better = (c * number).sum(1, keepdim=True) / number.square().sum(1, keepdim=True)
        step = better.where(better.isfinite() & (better > 0), step)
    return step


def _steps(step: Tensor) -> str:
    low, high = float(step.min()), float(step.max())
    return f"step {low:.3g}" if low == high else f"steps {low:.3g} to {high:.3g}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
