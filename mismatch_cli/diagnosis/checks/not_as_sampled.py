"""Tokens that were not drawn from the distribution that the engine recorded."""

from dataclasses import dataclass

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.group_estimates import mean_over_prompts
from mismatch_cli.diagnosis.power import clear, percent
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE = "not-as-sampled", 2
ALONE = True  # a column that another fault spoils contradicts the tokens, too
TITLE = "Not drawn from the recorded distribution"
CAUSE = (
    "The engine recorded log-probabilities before it applied the temperature, top-p or a penalty, "
    "and the trainer agrees with the record, not with what was sampled: every ratio is biased, "
    "although both sides agree."
)
CHANGE = (
    "vLLM: --logprobs-mode processed_logprobs, and the same temperature and truncation in the "
    "trainer; or sample at temperature 1 without truncation."
)
SOURCE = "vLLM --logprobs-mode raw_logprobs, its default"
_FEWEST = 200  # tokens
# Choosing responses by their reward makes them up to 5 % more probable
_LEAST, _Z = 0.1, 6.0
_TEST = ("z over prompts", "a share that would have been found")
_TIMES_GAP = 4.0  # the entropy is the trainer's, and may differ from the engine's by its gap
_SAME = 1e-4  # nats: equally probable ranks
_ROUNDED = 2.0**-8  # of a log-probability: the sampled column may be stored in bfloat16


@dataclass(frozen=True)
class _Measure:
    """What is expected of each token under the recorded distribution, and what was sampled."""

    expected_M: np.ndarray
    sampled_M: np.ndarray
    group_M: np.ndarray
    labels: tuple[str, ...]
    sentence: str
    resolution: float  # of the mean difference


def check(evidence: Evidence) -> Finding:
    """Compare the tokens with the recorded distribution, over groups of prompts.

    Of a token that is drawn from μ the mean of −log μ is the entropy of μ, and the first rank is
    missed with probability 1 − μ(first rank). The ranks need the engine alone; without them the
    trainer's entropy has to do.
    """
    sample = evidence.sample
    measure = _by_first_rank(sample) or _by_entropy(sample)
    if measure is None:
        return untested(NAME, "the trace has neither top-K columns nor entropies")
    if len(measure.expected_M) < _FEWEST:
        return untested(NAME, f"fewer than {_FEWEST} tokens")
    expected, sampled = float(measure.expected_M.mean()), float(measure.sampled_M.mean())
    if not expected > 0:
        return untested(NAME, "every token is certain")
    difference = mean_over_prompts(measure.sampled_M - measure.expected_M, measure.group_M)
    share, z = sampled / expected - 1, difference.z_from(0.0)
    least = max(_LEAST * expected, measure.resolution)
    shows = max(least, _Z * difference.error) / expected
    rows = tuple(zip(measure.labels, (sampled, expected, z, shows), strict=True))
    if abs(z) <= _Z or abs(difference.value) <= least:
        power = f"a difference of ≥ {percent(shows)}"
        return clear(NAME, share, "share of the expected", power, rows)
    how = "more" if share < 0 else "less"
    sentence = measure.sentence.format(sampled=sampled, expected=expected, how=how, z=z)
    return Finding(NAME, "found", share, "share of the expected", sentence, rows)


def _by_first_rank(sample: Sample) -> _Measure | None:
    """How often the most probable token was not taken; of equally probable ones, any counts."""
    if sample.topk_logq_TK is None:
        return None
    logq_NK = sample.topk_logq_TK[sample.index_N].astype(np.float64)
    usable_N = np.isfinite(logq_NK[:, 0])
    logq_MK = logq_NK[usable_N]
    least_first_M = logq_MK[:, 0] - np.maximum(_SAME, _ROUNDED * np.abs(logq_MK[:, 0]))
    is_first_MK = logq_MK >= least_first_M[:, None]
    mass_of_first_M = np.where(is_first_MK, np.exp(logq_MK), 0.0).sum(axis=1)
    return _Measure(
        expected_M=np.maximum(1 - mass_of_first_M, 0.0),
        sampled_M=(sample.logq_N[usable_N] < least_first_M).astype(np.float64),
        group_M=sample.group_N[usable_N],
        labels=("share of the tokens that are not of the first rank", "as recorded", *_TEST),
        sentence=(
            "The sampled tokens are {how} probable than the engine recorded: {sampled:.3g} of "
            "them are not of the first rank, where {expected:.3g} is recorded (z = {z:.0f})."
        ),
        resolution=0.0,
    )


def _by_entropy(sample: Sample) -> _Measure | None:
    """How improbable the tokens were, beside the trainer's entropy."""
    if sample.entropy_T is None:
        return None
    entropy_N = sample.entropy_T[sample.index_N].astype(np.float64)
    usable_N = np.isfinite(entropy_N)
    gap = float(np.abs(sample.d_N).mean()) if len(sample.d_N) else 0.0
    return _Measure(
        expected_M=entropy_N[usable_N],
        sampled_M=-sample.logq_N[usable_N],
        group_M=sample.group_N[usable_N],
        labels=("mean −log μ of the sampled tokens, nats", "mean entropy, nats", *_TEST),
        sentence=(
            "The sampled tokens are {how} probable than the recorded distribution makes them: "
            "their mean −log μ is {sampled:.3g} nats, and its entropy {expected:.3g} (z = {z:.0f})."
        ),
        resolution=_TIMES_GAP * gap,
    )
