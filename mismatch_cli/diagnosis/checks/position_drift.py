"""A gap that grows along the response: the two sides encode positions differently."""

import numpy as np

from mismatch_cli.diagnosis.checks.sharp_onset import sharpest_jump
from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.group_estimates import Mean, mean_over_prompts
from mismatch_cli.diagnosis.power import clear, times_of
from mismatch_cli.diagnosis.sample import Sample
from mismatch_cli.limits.manifest_sides import precision

NAME, STAGE = "position-drift", 5
TITLE = "A gap that grows with position"
CAUSE = (
    "The position encodings differ (RoPE base, scaling, YaRN truncation), so distant tokens are "
    "read differently."
)
CHANGE = (
    "Compare rope_theta and rope_scaling as resolved on both sides; pass the same --hf-overrides "
    "to the engine."
)
SOURCE = "vLLM 27722 (gpt-oss YaRN), vLLM PR 43419 (OLMo3: 0.003227 to 0.000054)"
_OF_A_COARSE_CACHE = 1.25  # times: its rounding accumulates along the context, which is not a fault
_BINS, _LEAST_TOKENS = 12, 400
_MEASURE = "times, second half against first quarter"
_TIMES, _TIMES_STEADY, _STEADY, _Z = 1.8, 1.35, 0.78, 4.0


def check(evidence: Evidence) -> Finding:
    """Compare the normalised gap in the second half of the positions with the first quarter,
    unless it jumps.
    """
    drift = drift_of(evidence.sample)
    if drift is None:
        return untested(NAME, "too few tokens")
    early, late, correlation = drift
    factor, z = late.times(early), late.z_of_log_ratio(early)
    rows = (
        ("typical gaps, first quarter of the positions", early.value), ("second half", late.value),
        ("z", z),
        ("correlation of log gap and position", correlation),
    )  # fmt: skip
    least = _TIMES_STEADY
    if precision(evidence.about) in ("fp8", "int8"):
        least *= _OF_A_COARSE_CACHE
    rises = factor > max(_TIMES, least) or (factor > least and correlation > _STEADY)
    jump = sharpest_jump(evidence.sample)
    may_be_a_jump = jump is not None and jump.may_be_sharp
    if not (rises and z > _Z) or may_be_a_jump:
        return clear(NAME, factor, _MEASURE, times_of(least, _Z, late, early), rows)
    sentence = (
        f"Along the response, the gap grows by a factor of {factor:.3g} at equal probabilities."
    )
    left_N = evidence.sample.d_N * _share_without_context_N(evidence.sample)
    return Finding(NAME, "found", factor, _MEASURE, sentence, rows, left_N=left_N)


def drift_of(sample: Sample) -> tuple[Mean, Mean, float] | None:
    """The mean gap in the first quarter and in the second half of the tokens by position, and how
    steadily it rises.

    Steadiness is the correlation of the log gap of twelfths with their order.
    """
    count = sample.num_counted
    if count < _LEAST_TOKENS:
        return None

    def mean(tokens: np.ndarray) -> Mean:
        return mean_over_prompts(sample.u_N[tokens], sample.group_N[tokens])

    by_position = np.argsort(sample.position_T[sample.index_N], kind="stable")
    early, late = mean(by_position[: count // 4]), mean(by_position[count // 2 :])
    twelfths = np.array_split(by_position, _BINS)
    log_gap = np.log([max(mean(tokens).value, 1e-9) for tokens in twelfths])
    if not np.ptp(log_gap):
        return early, late, 0.0
    return early, late, float(np.corrcoef(np.arange(_BINS), log_gap)[0, 1])


def _share_without_context_N(sample: Sample) -> np.ndarray:
    """The share of a token's gap that is left without context: a line through the gaps, at
    position 0.
    """
    position_N = sample.axis_N("context").astype(np.float64)
    slope, start = np.polyfit(position_N, sample.u_N, 1)
    return np.clip(start / np.maximum(start + slope * position_N, 1e-9), 0.0, 1.0)
