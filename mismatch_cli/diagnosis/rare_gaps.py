"""Whether the gap is on few tokens, since rounded logits differ by a whole step or are equal.

A confident policy has few tokens that can move, and 16 bits move few of these: the gap of a
response, a prompt or a step is then that of one or two tokens, and no shape of it means a fault.
"""

from __future__ import annotations

import numpy as np

from mismatch_cli.diagnosis.sample import CERTAIN, Sample

RARE = (
    "no power: most uncertain tokens have no gap: steps of rounded logits on the others decide it"
)
STEP = 1.0  # nats at temperature 1: twice the step of bfloat16 at logits of 64 to 128
_NO_GAP = 1e-3  # of the mean gap of the tokens that can move
_MOST = 0.5  # of them: at temperature 1 and 0.7 at most a quarter has none, at 0.1 three quarters


def is_rare(sample: Sample, step: float) -> bool:
    """Whether most tokens that can move have no gap, and none has more than `step` nats."""
    abs_d_N = np.abs(sample.d_N)
    abs_d_M = abs_d_N[np.minimum(sample.logq_N, sample.logp_N) < CERTAIN]
    if not abs_d_M.any() or abs_d_N.max() > step:
        return False
    return bool((abs_d_M < _NO_GAP * abs_d_M.mean()).mean() > _MOST)
