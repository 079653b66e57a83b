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
    is_old_S = _is_old_S(sample)
    old, new = int(is_old_S.sum()), int((~is_old_S).sum())
    if min(old, new) < _FEWEST:
        reason = "needs some prompts that recur in a later step, and others that do not"
        return untested(NAME, reason)
    is_old_N = is_old_S[sample.response_N]
    on_old = mean_over_prompts(sample.u_N[is_old_N], sample.group_N[is_old_N])
    on_new = mean_over_prompts(sample.u_N[~is_old_N], sample.group_N[~is_old_N])
    factor, z = on_old.times(on_new), on_old.z_of_log_ratio(on_new)
    rows = (("responses to prompts seen before", old), ("to new prompts", new), ("z", z))
    measure = "times the gap on new prompts"
    if not (factor > _TIMES and z > _Z):
        return clear(NAME, factor, measure, times_of(_TIMES, _Z, on_old, on_new), rows)
    left_N = np.where(is_old_N, sample.d_N / factor, sample.d_N)
    sentence = f"The gap on prompts seen in an earlier step is {factor:.3g} times that on new ones."
    return Finding(NAME, "found", factor, measure, sentence, rows, left_N=left_N)


def _is_old_S(sample: Sample) -> np.ndarray:
    """Whether the prompt of a response occurred in an earlier step."""
    prompt_P, index_S = np.unique(sample.prompt_id_S, return_inverse=True)
    first_step_P = np.full(len(prompt_P), np.iinfo(np.int64).max)
    np.minimum.at(first_step_P, index_S, sample.step_S.astype(np.int64))
    return sample.step_S > first_step_P[index_S]
