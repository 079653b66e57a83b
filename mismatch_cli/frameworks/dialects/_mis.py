"""What slime and miles share: the metrics of `mis.py`, which both ship as an example TIS function,
and of off-policy sequence masking.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

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
    Quantity,
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
_CLAMPED = "log r clamped to ±20"
_CAP = 2.0
_VETO = 1e-4
_TIS = "tis_level token, tis_mode truncate, tis_upper_bound 2"
_RS = "rs_level token, bounds 1/2 and 2"
_RATIO = "importance ratio"
_RS_VETO = "rs_veto_threshold 1e-4"
_BATCH_NORM = "the micro-batches in which weights are divided by their mean"
_TRUNCATED = ResponseMeans(weight(_CAP))
_SHARE_ABOVE = ResponseMeans(ratio_above(_CAP))
_SHARE_BELOW = ResponseMeans(ratio_below(1 / _CAP))
_SHARE_VETOED = ResponseMeans(ratio_below(_VETO))


def _perplexity_lines(source: str) -> Iterator[FrameworkMetric]:
    """verl's perplexity lines, with 0 instead of e^0 for a fully masked response, and without
    extremes.
    """
    for line in perplexity_lines(_PREFIX, source):
        if line.reduce is not mean:
            continue
        measured = line.measured
        if isinstance(measured, OfResponses) and measured.function is np.exp:
            line = replace(line, measured=replace(measured, empty=0.0))
        yield line


def _with_catastrophe(gaps: TokenGaps) -> np.ndarray:
    """Whether a response has a token with a ratio below the veto threshold."""
    return _SHARE_VETOED(gaps) > 0


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
    """What slime and miles log with --use-opsm; `source` is the file of the framework."""
    return FrameworkMetric(
        "train/opsm_clipfrac",
        UPDATE,
        "E_y n/|y| if mean (−d) > 1e-4, with n the tokens of y with A < 0; 0 otherwise",
        source,
        _opsm_share,
        note="opsm_delta 1e-4; n counts untrained tokens too, |y| does not: it can exceed 1",
        needs=("advantage_T",),
    )


def _line(
    source: str,
    name: str,
    formula: str,
    measured: Quantity | tuple[Quantity, ...] = (),
    *,
    word: str = "",
    note: str = "",
    lacks: str = "",
) -> FrameworkMetric:
    return FrameworkMetric(
        f"{_PREFIX}{name}",
        ENGINE_GAP,
        formula,
        source,
        measured,
        word=word,
        note=note,
        lacks=lacks,
    )


def mis_lines(source: str) -> tuple[FrameworkMetric, ...]:
    """What `mis.py` logs, with the settings of mis.yaml for weights and rejection; `source` is its
    path in the framework.
    """
    line = partial(_line, source)
    return (
        line("kl", "E_y mean (−d)", ResponseMeans(MINUS_D), word="KL"),
        line("k3_kl", "E_y mean (r − 1 − d)", ResponseMeans(K3), word="KL"),
        *_perplexity_lines(source),
        line(
            "chi2_token",
            "E_y mean r² − 1",
            ResponseMeans(SQUARED_RATIO_LESS_1),
            word="χ²",
            note=_BOUND,
        ),
        line("chi2_seq", "E_y exp(2 Σd) − 1", PRODUCT_LESS_1, word="χ²", note=_BOUND),
        line(
            "tis_weight_before_bound",
            "E_y mean r",
            ResponseMeans(weight()),
            word=_RATIO,
            note=_CLAMPED,
        ),
        line("tis_weight_after_bound", "E_y mean min(r, 2)", _TRUNCATED, word=_RATIO, note=_TIS),
        line("tis_truncate_fraction", "E_y share with r > 2", _SHARE_ABOVE, note=_TIS),
        line("rs_mask_fraction_low", "E_y share with r < 1/2", _SHARE_BELOW, note=_RS),
        line("rs_mask_fraction_high", "E_y share with r > 2", _SHARE_ABOVE, note=_RS),
        line(
            "rs_catastrophic_token_fraction",
            "E_y share with r < 1e-4",
            _SHARE_VETOED,
            note=_RS_VETO,
        ),
        line(
            "rs_catastrophic_seq_fraction",
            "share of responses with a token r < 1e-4",
            _with_catastrophe,
            note=_RS_VETO,
        ),
        line(
            "is_ratio_mean_after_tis_rs", "E_y mean min(r, 2)", _TRUNCATED, word=_RATIO, note=_TIS
        ),
        line("batch_norm_factor", "mean min(r, 2) of a micro-batch", lacks=_BATCH_NORM),
        *(
            line(
                f"is_ratio_{statistic}_final",
                f"E_y {statistic} w, w = min(r, 2) over its mean",
                lacks=_BATCH_NORM,
            )
            for statistic in ("mean", "min", "max")
        ),
    )
