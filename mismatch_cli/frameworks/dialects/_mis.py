"""The metrics of `mis.py`, which slime and miles ship as an example TIS function, each under its
own path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mismatch_cli.frameworks.dialects._line import (
    ENGINE_GAP,
    K3,
    MINUS_D,
    PRODUCT_LESS_1,
    SQUARED_RATIO_LESS_1,
    Line,
    OfResponses,
    ResponseMeans,
    mean,
    perplexity_lines,
    ratio_above,
    ratio_below,
    weight,
)
from mismatch_cli.metrics.gaps import TokenGaps

_PREFIX = "train/mis_"
_BOUND = "log r, and Σ log r of a response, clamped to ±20"
_HELD = "log r clamped to ±20"
_CAP, _VETO = 2.0, 1e-4
_TIS = "tis_level token, tis_mode truncate, tis_upper_bound 2"
_RS = "rs_level token, bounds 1/2 and 2"
_BATCH_NORM = "the micro-batches in which weights are divided by their mean"


def _perplexity_lines(source: str) -> Iterator[Line]:
    """verl's lines, with 0 instead of e^0 for a fully masked response, and without extremes."""
    for line in perplexity_lines(_PREFIX, source):
        if line.reduce is mean:
            if isinstance(line.measured, OfResponses) and line.measured.function is np.exp:
                line = replace(line, measured=replace(line.measured, empty=0.0))
            yield line


def _with_catastrophe(gaps: TokenGaps) -> np.ndarray:
    """Whether a response has a token with a ratio below the veto threshold."""
    return ResponseMeans(ratio_below(_VETO))(gaps) > 0


def mis_lines(source: str) -> tuple[Line, ...]:
    """The lines of a framework with `mis.py` at this path; weights and rejection use the
    settings of mis.yaml.
    """
    return (
        Line(
            f"{_PREFIX}kl", ENGINE_GAP, "E_y mean (−d)", source, ResponseMeans(MINUS_D), word="KL"
        ),
        Line(
            f"{_PREFIX}k3_kl",
            ENGINE_GAP,
            "E_y mean (r − 1 − d)",
            source,
            ResponseMeans(K3),
            word="KL",
        ),
        *_perplexity_lines(source),
        Line(
            f"{_PREFIX}chi2_token",
            ENGINE_GAP,
            "E_y mean r² − 1",
            source,
            ResponseMeans(SQUARED_RATIO_LESS_1),
            word="χ²",
            note=_BOUND,
        ),
        Line(
            f"{_PREFIX}chi2_seq",
            ENGINE_GAP,
            "E_y exp(2 Σd) − 1",
            source,
            PRODUCT_LESS_1,
            word="χ²",
            note=_BOUND,
        ),
        Line(
            f"{_PREFIX}tis_weight_before_bound",
            ENGINE_GAP,
            "E_y mean r",
            source,
            ResponseMeans(weight()),
            word="importance ratio",
            note=_HELD,
        ),
        Line(
            f"{_PREFIX}tis_weight_after_bound",
            ENGINE_GAP,
            "E_y mean min(r, 2)",
            source,
            ResponseMeans(weight(_CAP)),
            word="importance ratio",
            note=_TIS,
        ),
        Line(
            f"{_PREFIX}tis_truncate_fraction",
            ENGINE_GAP,
            "E_y share with r > 2",
            source,
            ResponseMeans(ratio_above(_CAP)),
            note=_TIS,
        ),
        Line(
            f"{_PREFIX}rs_mask_fraction_low",
            ENGINE_GAP,
            "E_y share with r < 1/2",
            source,
            ResponseMeans(ratio_below(1 / _CAP)),
            note=_RS,
        ),
        Line(
            f"{_PREFIX}rs_mask_fraction_high",
            ENGINE_GAP,
            "E_y share with r > 2",
            source,
            ResponseMeans(ratio_above(_CAP)),
            note=_RS,
        ),
        Line(
            f"{_PREFIX}rs_catastrophic_token_fraction",
            ENGINE_GAP,
            "E_y share with r < 1e-4",
            source,
            ResponseMeans(ratio_below(_VETO)),
            note="rs_veto_threshold 1e-4",
        ),
        Line(
            f"{_PREFIX}rs_catastrophic_seq_fraction",
            ENGINE_GAP,
            "share of responses with a token r < 1e-4",
            source,
            _with_catastrophe,
            note="rs_veto_threshold 1e-4",
        ),
        Line(
            f"{_PREFIX}is_ratio_mean_after_tis_rs",
            ENGINE_GAP,
            "E_y mean min(r, 2)",
            source,
            ResponseMeans(weight(_CAP)),
            word="importance ratio",
            note=_TIS,
        ),
        Line(
            f"{_PREFIX}batch_norm_factor",
            ENGINE_GAP,
            "mean min(r, 2) of a micro-batch",
            source,
            lacks=_BATCH_NORM,
        ),
        *(
            Line(
                f"{_PREFIX}is_ratio_{part}_final",
                ENGINE_GAP,
                f"E_y {part} w, w = min(r, 2) over its mean",
                source,
                lacks=_BATCH_NORM,
            )
            for part in ("mean", "min", "max")
        ),
    )
