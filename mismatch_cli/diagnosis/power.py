"""What a check that found nothing would have found: the power of its answer.

A clear answer is worth as much as the smallest fault that it excludes. Where a trace excludes none,
since nothing in it could show the fault, the check was not made.
"""

from __future__ import annotations

import numpy as np

from mismatch_cli.base.numbers import things
from mismatch_cli.diagnosis.evidence import Finding, Row, untested
from mismatch_cli.diagnosis.group_estimates import Mean
from mismatch_cli.diagnosis.sample import CERTAIN, Sample

FEWEST_RESPONSES, SHARE_OF_RESPONSES = 2, 0.01  # that are more than chance
_MOST_TIMES = 20.0  # a ratio that only this many times would show is not measured
_MOST_STEP = 2.0  # nats: cap on one token, as in alignment
_NONE = "no power: "


def clear(
    check: str,
    effect: float | None,
    measure: str,
    power: str,
    evidence: tuple[Row, ...] = (),
    left_N: np.ndarray | None = None,
) -> Finding:
    """A check that found nothing, with what it would have found; not tested if that is nothing."""
    if power.startswith(_NONE):
        return untested(check, power)
    reason = f"would have found {power}"
    return Finding(check, "clear", effect, measure, evidence=evidence, reason=reason, left_N=left_N)


def no_power(why: str) -> str:
    """The power of a check that could not have found anything; `clear` makes it untested."""
    return f"{_NONE}{why}"


def percent(share: float) -> str:
    """A share of 1 in per cent, with two digits where it is small."""
    # The digits again as a number, since 99.6 with two of them is 1e+02
    return f"{float(f'{100 * min(share, 1):.2g}'):g} %"


def of_responses(testable_S: np.ndarray) -> str:
    """A fault in the fewest responses that are more than chance, if so many can show it."""
    testable = int(testable_S.sum())
    count = len(testable_S)
    fewest = max(FEWEST_RESPONSES, int(np.ceil(SHARE_OF_RESPONSES * count)))
    if testable < fewest:
        return no_power(f"{testable:,} of {things(count, 'response')} could show it")
    return f"it in ≥ {percent(fewest / testable)} of the {testable:,} responses that can show it"


def of_tokens(fewest: float, sample: Sample) -> str:
    """A fault in so many tokens of the sample."""
    count = max(1, sample.num_counted)
    return f"it in ≥ {things(int(np.ceil(fewest)), 'token')} ({percent(fewest / count)})"


def too_certain(sample: Sample) -> str:
    """No power, since so many of the tokens are certain: these show no fault of a distribution."""
    share = float((sample.logq_N > CERTAIN).mean()) if sample.num_counted else 1.0
    return no_power(f"{percent(share)} of the tokens are certain")


def of_values(count: int) -> str:
    """A fault in one value, of all that were read."""
    return f"it in one of {count:,} values"


def times_of(least: float, z: float, *means: Mean) -> str:
    """The smallest ratio of two means that is both large enough and beyond chance."""
    errors = [mean.error / mean.value for mean in means if mean.value > 0]
    beyond_chance = float(np.exp(z * np.hypot.reduce(errors))) if errors else np.inf
    if not np.isfinite(beyond_chance) or beyond_chance > _MOST_TIMES:
        return no_power("too few prompts to tell two means apart")
    return f"{max(least, beyond_chance):.2g} times"


def varied_S(sample: Sample, fewest: int, least: float) -> np.ndarray:
    """The responses whose log μ changes from token to token by `least` nats on average: only these
    show that values are at another place.
    """
    step_T = np.abs(np.diff(sample.logq_T, prepend=np.nan))
    follows_T = np.concatenate([[False], sample.counts_T[:-1]]) & (sample.position_T > 0)
    usable_T = sample.counts_T & follows_T & np.isfinite(step_T)
    response_U = sample.response_T[usable_T]
    step_U = np.minimum(step_T[usable_T], _MOST_STEP)
    count_S = np.bincount(response_U, minlength=sample.num_responses)
    sum_S = np.bincount(response_U, weights=step_U, minlength=sample.num_responses)
    return np.asarray((count_S + 1 >= fewest) & (sum_S >= least * np.maximum(count_S, 1)))
