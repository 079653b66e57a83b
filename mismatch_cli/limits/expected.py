"""The gap that a trace has without any fault: read from the trace where it can be, else measured on
other models.

The error of a 16-bit model comes from its layers and from rounding its logits, and both grow with
the logits: a step of 1/8 nat in one model, 1/64 in another. So a range in nats fits one model only.
What a trace says is used, best first:

1. the steps of its logits, from the top-K columns of either side;
2. the size of its logits, from a pass of the trainer's model;
3. lines in the sampled tokens' log-odds;
4. the trainer's gap to itself in other micro-batches, where that moves most tokens;
5. nothing of its own: the range of the models measured so far, by precisions and family.

The trainer's noise comes late although it needs no theory: on a CPU it moves one token in 25 of a
small model, and a trainer with dropout has a noise that explains whatever it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mismatch_cli.limits.manifest_sides import (
    Numerics,
    family,
    is_quantised,
    precision,
    precisions_in_words,
    sides_of_gap,
)
from mismatch_cli.limits.reference import Usual, usual_gap
from mismatch_cli.metrics.lattice import LatticeLine
from mismatch_cli.metrics.own_scale import OwnScale

# Error of one side's 16-bit layers, as a variance relative to that of rounding its logits: 0 in
# the bundled model, 1.2 to 2.4 in SmolLM2-135M (30 layers, temperatures from 0.1 to 1.3); more than
# twice that is not expected
_LAYERS = 5.0
# Times more with a cache or weights in 8 bits: that gap is 3.1 times what rounding the logits makes
# in the bundled model and 5.5 to 7.7 times in SmolLM2-135M, where 2.4 times are expected without;
# together 9.3 times, above the latter and no more than three times the former
_EIGHT_BITS = 3.8
# Times more where tokens may take other experts: published gaps of experts are 1.3 to 2 times those
# of dense models
_EXPERTS = 2.0
# Two passes of the trainer share its weights and kernels, the engine has others: SmolLM2-135M, 1.1
_TIMES_NOISE = 2.5
_OF_LINE = 0.5  # the mean step, of the finest visible line: 0.46 in the bundled model
_LOWEST = 0.25  # of what rounding the logits makes: engines with the trainer's kernels agree better


@dataclass(frozen=True)
class Expected:
    """The mean |Δlog p| of a trace without a fault, nats per token, from `low` to `high`.

    `basis` says what the range was read from, `who` whose precisions these are. `rounding` is what
    rounding the logits alone makes, and `share_by_grid` that over the trace's gap, at most 1; None
    where the steps are unknown.
    """

    low: float
    high: float
    who: str
    basis: str
    of_this_trace: bool
    rounding: float | None = None
    share_by_grid: float | None = None


def expected_gap(
    about: Mapping[str, Any],
    scale: OwnScale | None = None,
    lines: Sequence[LatticeLine] = (),
    logit_step: float | None = None,
    gap: float | None = None,
) -> Expected:
    """The range for a trace: `about` is its manifest, `lines` those of its log-odds gap.

    `logit_step` is the step of the model's logits in bfloat16, where somebody ran it, and `gap` the
    trace's own, of which the share of the grid is taken. Without a `scale`, for a number that
    somebody typed, it is the range of other models.
    """
    own = None
    if scale is not None:
        own = _read_from_trace(about, scale, lines, logit_step)
    if own is None:
        usual = usual_gap(about)
        return Expected(usual.low, usual.high, usual.who, "the models measured so far", False)
    if not own.rounding or not gap:
        return own
    return replace(own, share_by_grid=min(1.0, own.rounding / gap))


def _read_from_trace(
    about: Mapping[str, Any],
    scale: OwnScale,
    lines: Sequence[LatticeLine],
    logit_step: float | None,
) -> Expected | None:
    """The range that the trace itself shows; None if it shows none."""
    sides = sides_of_gap(about)
    expected = (
        _from_steps(sides, scale)
        or _from_model(sides, scale, logit_step)
        or _from_lines(sides, scale, lines)
        or _from_noise(scale, usual_gap(about).high)
    )
    coarsest = precision(about)
    # How much 4 bits or an unknown quantisation add has not been measured, so the range of other
    # models has to do.
    is_unmeasured = coarsest == "fp4" or (not coarsest and is_quantised(about))
    if expected is None or is_unmeasured:
        return None
    times = 1.0
    if coarsest in ("fp8", "int8"):
        times *= _EIGHT_BITS
    if family(about) == "moe":
        times *= _EXPERTS
    return replace(expected, high=expected.high * times, who=precisions_in_words(about))


def _from_steps(sides: Sequence[Numerics], scale: OwnScale) -> Expected | None:
    """The range by the steps of each side's own logits; a side without a grid has that of the other
    side's logits.
    """
    if not scale.shows_steps:
        return None
    grids = (scale.reference, scale.current)
    largest = max(grid.step for grid in grids if grid.are_rounded)
    rounding = [grid.gap_of_rounding for grid in grids]
    return _range(sides, rounding, f"logits in steps of {largest:.2g}")


def _from_model(
    sides: Sequence[Numerics], scale: OwnScale, logit_step: float | None
) -> Expected | None:
    """The range by the size of the logits in a pass of the trainer's model."""
    if logit_step is None or not any(side.is_16_bits for side in sides):
        return None
    rounding = _rounding_by_side(sides, scale, logit_step)
    return _range(sides, rounding, f"logits in steps of {logit_step:.2g}, read from the model")


def _from_lines(
    sides: Sequence[Numerics], scale: OwnScale, lines: Sequence[LatticeLine]
) -> Expected | None:
    """The range by the finest line of the log-odds gap, which shows the coarser steps only."""
    if not lines or not any(side.is_16_bits for side in sides):
        return None
    spacing = min(line.spacing for line in lines)
    rounding = _rounding_by_side(sides, scale, _OF_LINE * spacing)
    return _range(sides, rounding, f"a line of the log-odds gap at {spacing:g} nats")


def _from_noise(scale: OwnScale, most: float) -> Expected | None:
    """The range by the trainer's noise, up to `most` nats: more is not precision but a fault of
    its own.
    """
    noise = scale.trainer_noise
    if noise is None or noise > most:
        return None
    basis = f"the trainer's gap to itself, {noise:.2g} nats"
    return Expected(0.0, min(_TIMES_NOISE * noise, most), "", basis, True)


def _rounding_by_side(sides: Sequence[Numerics], scale: OwnScale, step: float) -> list[float]:
    """What each side's rounding makes, nats, if a bfloat16 logit has this step."""
    rounding = [0.0] * len(sides)
    for number, side in enumerate(sides):
        if side.is_16_bits:
            own_step = step * side.step_of_bfloat16
            rounding[number] = scale.gap_of_rounding(own_step, side.temperature)
    return rounding


def _range(sides: Sequence[Numerics], rounding: Sequence[float], basis: str) -> Expected:
    """From rounding alone to rounding and layers, whose errors are independent; `rounding`: nats
    that each side's logits make, 0 for a float32 head.
    """
    largest = max(rounding)
    heads = layers = 0.0
    for nats, side in zip(rounding, sides, strict=True):
        heads += nats**2
        # The layers of a side with a float32 head are as coarse as those of the other side.
        if side.is_16_bits:
            layers += _LAYERS * (nats or largest) ** 2
    alone = float(np.sqrt(heads))
    return Expected(_LOWEST * alone, float(np.sqrt(heads + layers)), "", basis, True, alone)


def position_in_range(gap: float, expected: Expected | Usual) -> str:
    """Where a gap is relative to a range: below, within or above."""
    if gap < expected.low:
        return "below"
    if gap <= expected.high:
        return "within"
    return "above"


def expected_sentence(gap: float, expected: Expected) -> str:
    """A gap beside what is expected, and how that is known."""
    position = position_in_range(gap, expected)
    span = f"{_short(expected.low)} to {_short(expected.high)}"
    if not expected.of_this_trace:
        return (
            f"The gap of {_short(gap)} nats is {position} the range of the models measured so far, "
            f"{span} for {expected.who}."
        )
    grid = ""
    if expected.share_by_grid is not None:
        grid = f"; rounding them alone makes {100 * expected.share_by_grid:.0f} % of it"
    return (
        f"The gap of {_short(gap)} nats is {position} what {expected.who} makes of this model, "
        f"{span} ({expected.basis}){grid}."
    )


def _short(value: float) -> str:
    return f"{value:.2g}"
