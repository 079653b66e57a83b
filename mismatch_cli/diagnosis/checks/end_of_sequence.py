"""The token that ends a response: appended by hand, without its log-probability or with another
token's.
"""

import numpy as np

from mismatch_cli.diagnosis.checks.placeholders import zeros_finding, zeros_T
from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.group_estimates import mean_over_prompts
from mismatch_cli.diagnosis.power import clear

NAME, STAGE = "end-of-sequence", 1
TITLE = "The end-of-sequence token"
CAUSE = (
    "The end-of-sequence token was appended or replaced after sampling, or one side ends on "
    "another token."
)
CHANGE = (
    "Keep the engine's own last token and its log-probability; mask a token that was appended by "
    "hand."
)
SOURCE = (
    "open-instruct PR 1041 (appended EOS has no log-prob), SkyRL PR 2148 (sampled EOS replaced, "
    "log-prob 0.0)"
)
# An fp8 cache moves the end of SmolLM2's responses 5.1 times as far as tokens as probable
_TIMES, _Z = 10.0, 4.0
_FEWEST = 8  # responses that ended on their own


def check(evidence: Evidence) -> Finding:
    """Find exact zeros at last tokens; else a gap there far above that of the other tokens, and
    larger than expected.
    """
    zeros = zeros_finding(evidence, NAME)
    if zeros is not None:
        return zeros
    sample = evidence.sample
    last_N = sample.last_T[sample.index_N] & ~sample.truncated_S[sample.response_N]
    if last_N.sum() < _FEWEST:
        return untested(NAME, f"fewer than {_FEWEST} responses ended on their own")
    abs_d_N = np.abs(sample.d_N)
    last = mean_over_prompts(abs_d_N[last_N], sample.group_N[last_N])
    others = mean_over_prompts(abs_d_N[~last_N], sample.group_N[~last_N])
    factor, z = last.times(others), last.z_of_log_ratio(others)
    rows = (
        ("mean |Δlog p| at the end, nats", last.value),
        ("elsewhere, nats", others.value),
        ("z", z),
    )
    if not (factor > _TIMES and z > _Z and last.value > evidence.expected.high):
        least = max(_TIMES * others.value, evidence.expected.high)
        power = f"a gap of ≥ {least:.2g} nats there"
        return clear(NAME, factor, "times the gap elsewhere", power, rows)
    left_N = np.where(last_N, sample.d_N / factor, sample.d_N)
    sentence = (
        f"The gap at the token that ends a response is {factor:.3g} times that of other tokens."
    )
    return Finding(NAME, "found", factor, "times the gap elsewhere", sentence, rows, left_N=left_N)


def spoiled_T(evidence: Evidence) -> np.ndarray:
    """The zeros, and every last token."""
    return zeros_T(evidence.sample) | evidence.sample.last_T
