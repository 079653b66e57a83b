"""Decoding and one prefill of the same tokens: what sets the engine's two passes apart.

A decoding step multiplies one row per response and attends with one query; a prefill multiplies
all rows of a response. Kernels for few rows add up the products in another order, and in 16 bits
each layer rounds the result: the two passes differ as any two 16-bit passes of the model may.
Then both are as far from float32. If one of them is farther, something else is wrong with it.
"""

from __future__ import annotations

from math import sqrt

from mismatch_cli.bisect.effects import Effects, GapSums
from mismatch_cli.bisect.ranking import NO_GAP
from mismatch_cli.metrics.estimate import Estimate

EQUAL, ROUNDING, UNDECIDED = "equal", "rounding", "undecided"
_LEAST = 0.25  # of the squared distance: a fault that makes less is not looked for
DECODING_FARTHER, PREFILL_FARTHER = "decoding", "prefill"  # from float32


def reason_apart(apart: Estimate, prefill: Estimate, farther: Estimate) -> str:
    """The reason for which decoding and prefill are `apart`, all in nats on the average token.

    `prefill` is the distance of the prefill from float32, `farther` by how much more decoding is
    away from it. Errors add in squares: a fault of one pass that makes a quarter of apart² would
    put it √(prefill² + apart²/4) away. It is rounding if the whole interval is nearer to 0 than
    that.
    """
    if apart.value is not None and apart.value < NO_GAP:
        return EQUAL
    if None in (apart.value, prefill.value, farther.low, farther.high):
        return UNDECIDED
    assert apart.value and prefill.value is not None
    assert farther.low is not None and farther.high is not None
    of_a_fault = sqrt(prefill.value**2 + _LEAST * apart.value**2) - prefill.value
    if max(-farther.low, farther.high) < of_a_fault:
        return ROUNDING
    if farther.low > 0:
        return DECODING_FARTHER
    if farther.high < 0:
        return PREFILL_FARTHER
    return UNDECIDED


def decode_against_prefill(
    effects: Effects, apart: Estimate, decoded: GapSums, prefilled: GapSums
) -> str:
    """The reason for which decoding and prefill are `apart`, from the sums of both passes against
    the trainer in float32.
    """
    return reason_apart(apart, effects.gap(prefilled), effects.change(prefilled, decoded))
