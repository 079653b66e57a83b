"""slime and its fork miles: `train/train_rollout_logprob_abs_diff`, the TIS metrics and those of mis.py."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mismatch_cli.dialects._line import (
    ABS_D,
    ABS_RATIO_LESS_1,
    ENGINE_GAP,
    K3,
    MINUS_D,
    PRODUCT_LESS_1,
    RATIO,
    SQUARED_RATIO_LESS_1,
    UPDATE,
    Line,
    OfResponses,
    ResponseMeans,
    mean,
    perplexity_lines,
    ratio_above,
)

WHEN = (
    "The first is always logged; the others need --use-tis or --get-mismatch-metrics, those with mis_ also "
    "examples/train_infer_mismatch_helper/mis.py as the TIS function. Everything is the mean over responses of the "
    "mean over their tokens; with --calculate-per-token-loss slime takes the mean over tokens instead."
)
_LOSS = "slime/backends/megatron_utils/loss.py"
_MIS = "examples/train_infer_mismatch_helper/mis.py"
_BOUND = "log r, and Σ log r of a response, held at ±20"


def _perplexity_lines() -> Iterator[Line]:
    """As verl's, with 0 instead of e^0 for a response that is masked as a whole, and without extremes."""
    for line in perplexity_lines("train/mis_", _MIS):
        if line.reduce is mean:
            if isinstance(line.measured, OfResponses) and line.measured.function is np.exp:
                line = replace(line, measured=replace(line.measured, empty=0.0))
            yield line


LINES = (
    Line("train/train_rollout_logprob_abs_diff", ENGINE_GAP, "E_y mean |d|", _LOSS, ResponseMeans(ABS_D), word="gap",
         note="a short response weighs as much as a long one"),
    Line("train/tis", ENGINE_GAP, "E_y mean r", _LOSS, ResponseMeans(RATIO), word="importance ratio",
         note="before truncation"),
    Line("train/tis_abs", ENGINE_GAP, "E_y mean |r − 1|", _LOSS, ResponseMeans(ABS_RATIO_LESS_1)),
    Line("train/tis_clipfrac", ENGINE_GAP, "E_y share with r > 2", _LOSS, ResponseMeans(ratio_above(2.0)),
         note="tis_clip_low 0, tis_clip 2"),
    Line("train/ois", UPDATE, "E_y mean r", _LOSS, ResponseMeans(RATIO), word="importance ratio",
         note="what the update changed, not the engine gap"),
    Line("train/mis_kl", ENGINE_GAP, "E_y mean (−d)", _MIS, ResponseMeans(MINUS_D), word="KL"),
    Line("train/mis_k3_kl", ENGINE_GAP, "E_y mean (r − 1 − d)", _MIS, ResponseMeans(K3), word="KL"),
    *_perplexity_lines(),
    Line("train/mis_chi2_token", ENGINE_GAP, "E_y mean r² − 1", _MIS, ResponseMeans(SQUARED_RATIO_LESS_1), word="χ²",
         note=_BOUND),
    Line("train/mis_chi2_seq", ENGINE_GAP, "E_y exp(2 Σd) − 1", _MIS, PRODUCT_LESS_1, word="χ²", note=_BOUND),
)  # fmt: skip
