"""Top-entropy tokens: only the batch's tokens with the highest entropy learn.

The paper ranks the tokens of the batch; its code and ms-swift rank those of a micro-batch, TRL
those of all ranks' micro-batches. The authors' code divides by the kept tokens; TRL, ms-swift and
this divide by all.

Source: arXiv 2506.01939; TRL, ms-swift.
"""

from collections.abc import Sequence

import numpy as np

from mismatch_cli.base.arrays import Array
from mismatch_cli.rules.decisions import shares
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = "the trainer's entropy is not among the highest {share} of the batch"
NOT_ONE_SIDED = "It ignores the policies: a token of low entropy is dropped wherever it has moved."
SCOPE = "batch"
MEASURES_NO_DISTANCE = True
READS_ENTROPY = True


def collect(compared: Compared, advantage_T: Array, *, share: float = 0.2) -> Array:
    """The entropy of each token."""
    shares(share=share)
    return compared.entropy_T[:, None]


def settle(rows_UM: np.ndarray, *, share: float = 0.2) -> Sequence[float]:
    """The smallest entropy to keep: the quantile 1 − share, interpolated linearly as in TRL."""
    if not len(rows_UM):
        return [-np.inf]
    return [np.quantile(rows_UM[:, 0], 1 - share)]


def trust_region(
    compared: Compared, advantage_T: Array, settled_TF: Array, *, share: float = 0.2
) -> Decision:
    """Block tokens whose entropy is below that quantile. The statistic is the entropy, nats."""
    return Decision(compared.entropy_T >= settled_TF[:, 0], compared.entropy_T)
