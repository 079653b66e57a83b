"""Values that were stored, not computed: rounded to decimals, or constants that code writes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mismatch_cli.base.numbers import things
from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row
from mismatch_cli.diagnosis.far_responses import responses_with
from mismatch_cli.diagnosis.power import clear
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE = "stored-values", 1
TITLE = "Rounded or replaced log-probabilities"
CAUSE = (
    "A log-probability was rounded where it was written, or replaced by a constant where the "
    "model's value was an overflow, a zero or missing."
)
CHANGE = (
    "Store log-probabilities in float32 as they are computed: no round(), no log(p + ε), no "
    "masked_fill."
)
SOURCE = "log(p + 1e-10); masked_fill(finfo.min); JSON written with few decimals"
_DECIMALS = (1, 2, 3, 4)
_ALL = 0.98  # of the values that a rounding decides
_FEWEST = 200  # values that are not rounded to 0
_NEAR = 3e-7  # relative: float32
_NEAR_WHOLE = 3e-6  # the same after a multiplication by a power of ten
_APART = 1.0  # nats from the other side
# What a line of code writes, by the value; a computed log-probability is as exact once in 10⁷
_CONSTANTS = {
    -65504.0: "the smallest float16",
    float(np.finfo(np.float32).min): "the smallest float32",
    -3.3895313892515355e38: "the smallest bfloat16",
    -1e4: "−1e4",
    -1e5: "−1e5",
    -1e6: "−1e6",
    -1e8: "−1e8",
    -1e9: "−1e9",
    -1e10: "−1e10",
    -9999.0: "−9999",
    **{math.log(10.0**-k): f"log 1e−{k}" for k in (5, 6, 7, 8, 9, 10, 12, 15, 16, 20, 30)},
}


@dataclass(frozen=True)
class _Stored:
    """What was stored in a column in place of log-probabilities."""

    side: str
    kind: str  # such as `rounded to 3 decimals`
    tokens: int
    left_N: np.ndarray  # log π − log μ without it, nats


def check(evidence: Evidence) -> Finding:
    """Find columns whose values are multiples of a power of ten, and single constants that code
    writes where the other side has another value.
    """
    sample = evidence.sample
    stored = [*_constants(sample), *_rounded(sample)]
    if not stored:
        return clear(NAME, 0.0, "share of tokens", _power(sample))
    largest = max(stored, key=lambda each: _explained(sample, each))
    rows: tuple[Row, ...] = tuple((f"{s.side}: {s.kind}", s.tokens) for s in stored)
    share = largest.tokens / max(1, sample.num_counted)
    sentence = f"{things(largest.tokens, 'token')} of the sample: {largest.side} is {largest.kind}."
    replaced = sample.index_N[np.isnan(largest.left_N)]
    return Finding(
        NAME,
        "found",
        share,
        "share of tokens",
        sentence,
        rows,
        left_N=largest.left_N,
        part=responses_with(replaced, sample.counts_T, sample),
    )


def _power(sample: Sample) -> str:
    """A constant shows wherever it is; decimals only in enough values that are not 0."""
    power = "one constant that code writes"
    if all((own_N != 0).sum() >= _FEWEST for _, own_N in _columns(sample)):
        power += f", or a column of ≤ {_DECIMALS[-1]} decimals"
    return power


def _explained(sample: Sample, stored: _Stored) -> float:
    """How much of Σ|d| a stored value explains, nats."""
    return float(np.abs(sample.d_N).sum() - np.nansum(np.abs(stored.left_N)))


def _columns(sample: Sample) -> Iterator[tuple[str, np.ndarray]]:
    yield "logp_rollout", sample.logq_N
    yield "logp_trainer", sample.logp_N


def _constants(sample: Sample) -> Iterator[_Stored]:
    """Each constant that is in a column, from one token on."""
    far_N = np.abs(sample.d_N) > _APART
    for side, own_N in _columns(sample):
        for value, name in _CONSTANTS.items():
            same_N = far_N & (np.abs(own_N - value) <= _NEAR * abs(value))
            if same_N.any():
                left_N = np.where(same_N, np.nan, sample.d_N)
                yield _Stored(side, f"{name}, a constant", int(same_N.sum()), left_N)


def _rounded(sample: Sample) -> Iterator[_Stored]:
    """The fewest decimals that hold a whole column, on each side that was rounded."""
    for side, own_N in _columns(sample):
        decimals = _decimals_of(own_N)
        if decimals is not None:
            half = 0.5 * 10.0**-decimals
            left_N = np.copysign(np.maximum(np.abs(sample.d_N) - half, 0.0), sample.d_N)
            kind = f"rounded to {things(decimals, 'decimal')}"
            yield _Stored(side, kind, sample.num_counted, left_N)


def _decimals_of(own_N: np.ndarray) -> int | None:
    """To how many decimals a column is rounded; None if it is not.

    Values of 0 are left out: a rounded column has many, and so has a confident policy.
    """
    value_M = own_N[own_N != 0]
    if len(value_M) < _FEWEST:
        return None
    for decimals in _DECIMALS:
        scaled_M = value_M * 10.0**decimals
        whole_M = np.round(scaled_M)
        is_whole_M = np.abs(scaled_M - whole_M) <= _NEAR_WHOLE * np.abs(scaled_M)
        if (is_whole_M & (whole_M != 0)).mean() >= _ALL:
            return decimals
    return None


def spoiled_T(evidence: Evidence) -> np.ndarray:
    """Every token with one of the constants."""
    sample = evidence.sample
    spoiled_T = np.zeros(len(sample.logq_T), dtype=bool)
    for stored in _constants(sample):
        spoiled_T[sample.index_N[np.isnan(stored.left_N)]] = True
    return spoiled_T
