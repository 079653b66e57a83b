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
    own = None if scale is None else _of_this_trace(about, scale, lines, logit_step)
    if own is None:
        usual = usual_gap(about)
        return Expected(usual.low, usual.high, usual.who, "the models measured so far", False)
    share = min(1.0, own.rounding / gap) if own.rounding and gap else None
    return replace(own, share_by_grid=share)


def _of_this_trace(
    about: Mapping[str, Any],
    scale: OwnScale,
    lines: Sequence[LatticeLine],
    logit_step: float | None,
) -> Expected | None:
    """The range that the trace itself shows; None if it shows none."""
    both, narrowest = sides_of_gap(about), precision(about)
    read = (
        _from_steps(both, scale)
        or _from_model(both, scale, logit_step)
        or _from_lines(both, scale, lines)
        or _from_noise(scale, usual_gap(about).high)
    )
    if read is None or narrowest == "fp4":
        return None
    wider = _EIGHT_BITS if narrowest in ("fp8", "int8") else 1.0
    wider *= _EXPERTS if family(about) == "moe" else 1.0
    return replace(read, high=read.high * wider, who=precisions_in_words(about))


def _from_steps(both: Sequence[Numerics], scale: OwnScale) -> Expected | None:
    """From each side's own steps; a side without a grid has that of the other side's logits."""
    steps = (scale.reference, scale.current)
    rounding = [side.gap_of_rounding for side in steps]
    if not scale.shows_steps:
        return None
    largest = max(side.step for side in steps if side.are_rounded)
    basis = f"logits in steps of {largest:.2g}"
    return _range(both, rounding, basis)


def _from_model(
    both: Sequence[Numerics], scale: OwnScale, logit_step: float | None
) -> Expected | None:
    """From the size of the logits that a pass of the trainer's model has."""
    if logit_step is None or all(not side.is_16_bits for side in both):
        return None
    basis = f"logits in steps of {logit_step:.2g}, read from the model"
    return _range(both, _rounding(both, scale, logit_step), basis)


def _from_lines(
    both: Sequence[Numerics], scale: OwnScale, lines: Sequence[LatticeLine]
) -> Expected | None:
    """From the finest line of the log-odds gap, which shows the coarser steps only."""
    if not lines:
        return None
    line = min(line.spacing for line in lines)
    rounding = _rounding(both, scale, _OF_LINE * line)
    return _range(both, rounding, f"a line of the log-odds gap at {line:g} nats")


def _rounding(both: Sequence[Numerics], scale: OwnScale, step: float) -> list[float]:
    """What each side's rounding makes, nats, if a bfloat16 logit has this step."""
    return [
        scale.gap_of_rounding(step * side.step_of_bfloat16, side.temperature)
        if side.is_16_bits
        else 0.0
        for side in both
    ]


def _range(both: Sequence[Numerics], rounding: Sequence[float], basis: str) -> Expected:
    """From rounding alone to rounding and layers; `rounding`: nats that each side's logits make,
    0 for a float32 head.
    """
    largest = max(rounding)
    heads = sum(nats**2 for nats in rounding)
    layers = sum(
        _LAYERS * (nats or largest) ** 2
        for nats, side in zip(rounding, both, strict=True)
        if side.is_16_bits
    )
    alone = float(np.sqrt(heads))
    return Expected(_LOWEST * alone, float(np.sqrt(heads + layers)), "", basis, True, alone)


def _from_noise(scale: OwnScale, most: float) -> Expected | None:
    """From the trainer's noise, up to `most` nats: more is not precision but a fault of its own."""
    noise = scale.trainer_noise
    if noise is None or noise > most:
        return None
    basis = f"the trainer's gap to itself, {noise:.2g} nats"
    return Expected(0.0, min(_TIMES_NOISE * noise, most), "", basis, True)


def position_in_range(gap: float, expected: Expected | Usual) -> str:
    """Where a gap is relative to a range: below, within or above."""
    if gap < expected.low:
        return "below"
    return "within" if gap <= expected.high else "above"


def expected_sentence(gap: float, expected: Expected) -> str:
    """A gap beside what is expected, and how that is known."""
    where, span = (
        position_in_range(gap, expected),
        f"{_short(expected.low)} to {_short(expected.high)}",
    )
    if not expected.of_this_trace:
        return (
            f"The gap of {_short(gap)} nats is {where} the range of the models measured so far, "
            f"{span} for {expected.who}."
        )
    grid = ""
    if expected.share_by_grid is not None:
        grid = f"; rounding them alone makes {100 * expected.share_by_grid:.0f} % of it"
    return (
        f"The gap of {_short(gap)} nats is {where} what {expected.who} makes of this model, {span} "
        f"({expected.basis}){grid}."
    )


def _short(value: float) -> str:
    return f"{value:.2g}"
