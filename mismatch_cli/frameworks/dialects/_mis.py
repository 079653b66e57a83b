"""What slime and miles share: the metrics of `mis.py`, which both ship as an example TIS function,
and of off-policy sequence masking.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mismatch_cli.base.arrays import Segments
from mismatch_cli.frameworks.dialects._metric import (
    ENGINE_GAP,
    K3,
    LOG_RATIO,
    MINUS_D,
    PRODUCT_LESS_1,
    SQUARED_RATIO_LESS_1,
    UPDATE,
    FrameworkMetric,
    OfResponses,
    ResponseMeans,
    included,
    mean,
    perplexity_lines,
    ratio_above,
    ratio_below,
    weight,
)
from mismatch_cli.metrics.gaps import TokenGaps

_MAX_KL = 1e-4  # opsm_delta
_PREFIX = "train/mis_"
_BOUND = "log r, and Σ log r of a response, clamped to ±20"
_HELD = "log r clamped to ±20"
_CAP, _VETO = 2.0, 1e-4
_TIS = "tis_level token, tis_mode truncate, tis_upper_bound 2"
_RS = "rs_level token, bounds 1/2 and 2"
_BATCH_NORM = "the micro-batches in which weights are divided by their mean"


def _perplexity_lines(source: str) -> Iterator[FrameworkMetric]:
    """verl's lines, with 0 instead of e^0 for a fully masked response, and without extremes."""
    for line in perplexity_lines(_PREFIX, source):
        if line.reduce is mean:
            if isinstance(line.measured, OfResponses) and line.measured.function is np.exp:
                line = replace(line, measured=replace(line.measured, empty=0.0))
            yield line


def _with_catastrophe(gaps: TokenGaps) -> np.ndarray:
    """Whether a response has a token with a ratio below the veto threshold."""
    return ResponseMeans(ratio_below(_VETO))(gaps) > 0


def _opsm_share(gaps: TokenGaps) -> np.ndarray:
    """How many tokens of a response that OPSM drops have A < 0, over its trained tokens.

    Untrained tokens of the response count above the line and not below it.
    """
    assert gaps.batch.advantage_T is not None  # the line needs it
    first, last = gaps.batch.offset_S1[[gaps.first, gaps.last]].tolist()
    negative_S = Segments(gaps.response_offset_S1).sum(gaps.batch.advantage_T[first:last] < 0)
    share_S = negative_S / np.maximum(gaps.responses.length_S, 1)
    drops_S = LOG_RATIO.response_means(gaps) < -_MAX_KL
    return np.where(drops_S, share_S, 0.0)[included(gaps)]


def opsm_line(source: str) -> FrameworkMetric:
    """What both log with --use-opsm, in a framework with this function at this path."""
    return FrameworkMetric(
        "train/opsm_clipfrac",
        UPDATE,
        "E_y n/|y| if mean (−d) > 1e-4, with n the tokens of y with A < 0; 0 otherwise",
        source,
        _opsm_share,
        note="opsm_delta 1e-4; n counts untrained tokens too, |y| does not: it can exceed 1",
        needs=("advantage_T",),
    )


def mis_lines(source: str) -> tuple[FrameworkMetric, ...]:
    """The lines of a framework with `mis.py` at this path; weights and rejection use the
    settings of mis.yaml.
    """
    return (
        FrameworkMetric(
            f"{_PREFIX}kl", ENGINE_GAP, "E_y mean (−d)", source, ResponseMeans(MINUS_D), word="KL"
        ),
        FrameworkMetric(
            f"{_PREFIX}k3_kl",
            ENGINE_GAP,
            "E_y mean (r − 1 − d)",
            source,
            ResponseMeans(K3),
            word="KL",
        ),
        *_perplexity_lines(source),
        FrameworkMetric(
            f"{_PREFIX}chi2_token",
            ENGINE_GAP,
            "E_y mean r² − 1",
            source,
            ResponseMeans(SQUARED_RATIO_LESS_1),
            word="χ²",
            note=_BOUND,
        ),
        FrameworkMetric(
            f"{_PREFIX}chi2_seq",
            ENGINE_GAP,
            "E_y exp(2 Σd) − 1",
            source,
            PRODUCT_LESS_1,
            word="χ²",
            note=_BOUND,
        ),
        FrameworkMetric(
            f"{_PREFIX}tis_weight_before_bound",
            ENGINE_GAP,
            "E_y mean r",
            source,
            ResponseMeans(weight()),
            word="importance ratio",
            note=_HELD,
        ),
        FrameworkMetric(
            f"{_PREFIX}tis_weight_after_bound",
            ENGINE_GAP,
            "E_y mean min(r, 2)",
            source,
            ResponseMeans(weight(_CAP)),
            word="importance ratio",
            note=_TIS,
        ),
        FrameworkMetric(
            f"{_PREFIX}tis_truncate_fraction",
            ENGINE_GAP,
            "E_y share with r > 2",
            source,
            ResponseMeans(ratio_above(_CAP)),
            note=_TIS,
        ),
        FrameworkMetric(
            f"{_PREFIX}rs_mask_fraction_low",
            ENGINE_GAP,
            "E_y share with r < 1/2",
            source,
            ResponseMeans(ratio_below(1 / _CAP)),
            note=_RS,
        ),
        FrameworkMetric(
            f"{_PREFIX}rs_mask_fraction_high",
            ENGINE_GAP,
            "E_y share with r > 2",
            source,
            ResponseMeans(ratio_above(_CAP)),
            note=_RS,
        ),
        FrameworkMetric(
            f"{_PREFIX}rs_catastrophic_token_fraction",
            ENGINE_GAP,
            "E_y share with r < 1e-4",
            source,
            ResponseMeans(ratio_below(_VETO)),
            note="rs_veto_threshold 1e-4",
        ),
        FrameworkMetric(
            f"{_PREFIX}rs_catastrophic_seq_fraction",
            ENGINE_GAP,
            "share of responses with a token r < 1e-4",
            source,
            _with_catastrophe,
            note="rs_veto_threshold 1e-4",
        ),
        FrameworkMetric(
            f"{_PREFIX}is_ratio_mean_after_tis_rs",
            ENGINE_GAP,
            "E_y mean min(r, 2)",
            source,
            ResponseMeans(weight(_CAP)),
            word="importance ratio",
            note=_TIS,
        ),
        FrameworkMetric(
            f"{_PREFIX}batch_norm_factor",
            ENGINE_GAP,
            "mean min(r, 2) of a micro-batch",
            source,
            lacks=_BATCH_NORM,
        ),
        *(
            FrameworkMetric(
                f"{_PREFIX}is_ratio_{part}_final",
                ENGINE_GAP,
                f"E_y {part} w, w = min(r, 2) over its mean",
                source,
                lacks=_BATCH_NORM,
            )
            for part in ("mean", "min", "max")
        ),
    )
