"""prime-rl: `mismatch_kl/all/*`, against the current trainer, and the mask of its default loss,
ipo.
"""

from dataclasses import replace

import numpy as np

from mismatch_cli.frameworks.dialects._metric import (
    CURRENT,
    ENTROPY,
    K3,
    FrameworkMetric,
    Quantity,
    ResponseMeans,
    Tokens,
    largest,
    mean,
    ratio_of_means,
    sample_sd,
)
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.rules.algorithms.table import VARIANTS

WHEN = (
    "Always logged, at the trainer's current weights, by prime-rl since 18 September 2026 (its "
    "pull request 3586), whose default loss is ipo. By default (filter_zero_advantages) a response "
    "whose advantages are all 0 never reaches the trainer: it is left out here as well, if the "
    "trace has advantages."
)
_LOSS = "src/prime_rl/trainer/rl/loss.py"
_TRAIN = "src/prime_rl/trainer/rl/train.py"
_K3, _ENTROPY = replace(K3, trained=True), replace(ENTROPY, trained=True)
_EPS = VARIANTS["prime-rl-ipo"].masks[0].parameters["max_tv"]  # one place for its default
_NOTE = f"ipo, eps {_EPS}: whatever the advantage"


def _is_masked(gaps: TokenGaps) -> np.ndarray:
    """Whether |π − μ| is above eps."""
    return gaps.abs_dp_N > np.float32(_EPS)


def _is_kept(gaps: TokenGaps) -> np.ndarray:
    return ~_is_masked(gaps)


def _share(flags: Quantity, *, logs: bool) -> ResponseMeans:
    """The share of each response's tokens with a flag, without those that have no d if `logs`."""
    return ResponseMeans(Tokens(flags, logs=logs, trained=True))


def _kl_over(flags: Quantity) -> Quantity:
    """The mean of r − 1 − d over the tokens of a response with a flag; 0 without such a token."""
    # A product of r − 1 − d beyond float32 with a flag of 0 would be NaN.
    flagged = replace(_K3, column=lambda gaps: np.where(flags(gaps), K3.column(gaps), 0))

    def kl_S(gaps: TokenGaps) -> np.ndarray:
        sum_S, share_S = ResponseMeans(flagged)(gaps), _share(flags, logs=True)(gaps)
        return np.divide(sum_S, share_S, out=np.zeros_like(sum_S), where=share_S > 0)

    return kl_S


LINES = (
    FrameworkMetric("mismatch_kl/all/mean", CURRENT, "E (r − 1 − d)", _LOSS, _K3, mean, word="KL"),
    FrameworkMetric(
        "mismatch_kl/all/std",
        CURRENT,
        "standard deviation of r − 1 − d, ÷ (n − 1)",
        _TRAIN,
        _K3,
        sample_sd,
    ),
    FrameworkMetric("mismatch_kl/all/max", CURRENT, "max (r − 1 − d)", _TRAIN, _K3, largest),
    FrameworkMetric(
        "kl_ent_ratio/mean",
        CURRENT,
        "E (r − 1 − d) / E entropy of π",
        _TRAIN,
        (_K3, _ENTROPY),
        ratio_of_means,
        needs=("entropy_trainer_T",),
    ),
    FrameworkMetric(
        "masked_mismatch_kl/mean",
        CURRENT,
        f"E_y of E (r − 1 − d) over its tokens with |π − μ| > {_EPS}, 0 without any",
        _LOSS,
        _kl_over(_is_masked),
        note=_NOTE,
    ),
    FrameworkMetric(
        "unmasked_mismatch_kl/mean",
        CURRENT,
        f"E_y of E (r − 1 − d) over its tokens with |π − μ| ≤ {_EPS}",
        _LOSS,
        _kl_over(_is_kept),
        note=_NOTE,
    ),
    FrameworkMetric(
        "is_masked/mean",
        CURRENT,
        f"E_y share with |π − μ| > {_EPS}",
        _LOSS,
        _share(_is_masked, logs=False),
        note=_NOTE,
    ),
)
