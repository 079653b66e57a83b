"""A prefix cache that outlived a weight update: the gap is on prompts that the engine had seen
before.
"""

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.group_estimates import mean_over_prompts
from mismatch_cli.diagnosis.power import clear, times_of
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE = "prefix-cache", 4
CLEARS = ("rollout.prefix_caching",)  # settings that are not suspects if this finds nothing
TITLE = "A stale prefix cache"
CAUSE = "Keys and values of a prompt were computed with older weights and reused."
CHANGE = (
    "Call reset_prefix_cache after every weight update, or sample with --no-enable-prefix-caching."
)
SOURCE = (
    "NeMo-RL PR 4018 (up to 17 updates old), SkyRL 2246 (mean 0.87, max 28.6 nats), prime-rl PR "
    "1650"
)
_TIMES, _Z, _FEWEST = 1.5, 6.0, 10


def check(evidence: Evidence) -> Finding:
    """Compare the normalised gap on prompts seen in an earlier step with that on new prompts."""
    sample = evidence.sample
    seen_S = _seen_before(sample)
    if min(seen_S.sum(), (~seen_S).sum()) < _FEWEST:
        return untested(
            NAME, "needs some prompts that recur in a later step, and others that do not"
        )
    seen_N = seen_S[sample.response_N]
    repeated, first = (
        mean_over_prompts(sample.u_N[part], sample.group_N[part]) for part in (seen_N, ~seen_N)
    )
    factor, z = repeated.times(first), repeated.z_of_log_ratio(first)
    rows = (
        ("responses to prompts seen before", int(seen_S.sum())),
        ("to new prompts", int((~seen_S).sum())),
        ("z", z),
    )
    if not (factor > _TIMES and z > _Z):
        power = times_of(_TIMES, _Z, repeated, first)
        return clear(NAME, factor, "times the gap on new prompts", power, rows)
    left_N = np.where(seen_N, sample.d_N / factor, sample.d_N)
    sentence = f"The gap on prompts seen in an earlier step is {factor:.3g} times that on new ones."
    return Finding(
        NAME, "found", factor, "times the gap on new prompts", sentence, rows, left_N=left_N
    )


def _seen_before(sample: Sample) -> np.ndarray:
    """Whether the prompt of a response occurred in an earlier step."""
    prompt_P, prompt_index_S = np.unique(sample.prompt_id_S, return_inverse=True)
    first_P = np.full(len(prompt_P), np.iinfo(np.int64).max)
    np.minimum.at(first_P, prompt_index_S, sample.step_S.astype(np.int64))
    return sample.step_S > first_P[prompt_index_S]
