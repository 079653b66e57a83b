"""SkyRL: `policy/rollout_train_logprobs_abs_diff_*`, before the update and in each of its
minibatches, what its off-policy correction drops, and the clip of the update.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mismatch_cli.frameworks.dialects._metric import (
    ABS_D,
    BLOCKED,
    CURRENT,
    ENGINE_GAP,
    LOG_PRODUCT,
    LOG_RATIO,
    UPDATE,
    FrameworkMetric,
    OfResponses,
    Quantity,
    ResponseMeans,
    blocked,
    largest,
    least,
    mean,
    population_sd,
    ratio_above,
    ratio_below,
    ratio_outside,
    sample_sd,
    weight,
)

WHEN = (
    "The first four are logged if log-probs are recomputed before the update; minibatch_* "
    "compare with the trainer in that minibatch; clip_ratio is logged with every loss, here "
    "regular, the default, and cispo/* with policy_loss_type cispo. is_ratio_* need any "
    "off_policy_correction, and each other line its own, alone: tis_ratio_type token or sequence, "
    "outlier_token_is_threshold_*, token_mask_is_threshold_*, sequence_mask_metric geometric or "
    "product, with their defaults or the values that SkyRL's page suggests. async/* is of the "
    "fully asynchronous trainer."
)
_TRAINER = "skyrl/train/trainer.py"
_WORKER = "skyrl/backends/skyrl_train/workers/worker_utils.py"
_CORRECTION = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"
_LOSS = "skyrl/backends/skyrl_train/utils/ppo_utils.py"
_ASYNC = "skyrl/train/fully_async_trainer.py"
_STEPS = "the trainer's step when a prompt was sent to the engine"
_CLAMPED = "log r clamped to ±20"
_PADDING = "the amount of padding, which it counts as zeros"
_BEFORE = "policy/rollout_train_logprobs_abs_diff"
_WITHIN = "policy/minibatch_rollout_logprobs_abs_diff"
_CISPO = f"cispo_anchor old, the default; change by the update, not the engine gap; {_CLAMPED}"
_PRODUCT = OfResponses(np.exp, LOG_PRODUCT)
_GEOMETRIC = OfResponses(np.exp, ResponseMeans(LOG_RATIO))


def _band_lines(
    name: str, symbol: str, values: Quantity, low: float, high: float
) -> Iterator[FrameworkMetric]:
    """What SkyRL logs of a correction: the shares of responses that it drops above a threshold,
    below one, and in all.
    """
    share = f"share of y with {symbol}"
    for where, formula, flags in (
        ("masked", f"outside [{low:g}, {high:g}]", lambda x_S: (x_S < low) | (x_S > high)),
        ("over_high", f"> {high:g}", lambda x_S: x_S > high),
        ("under_low", f"< {low:g}", lambda x_S: x_S < low),
    ):
        yield FrameworkMetric(
            f"policy/{name}_{where}_ratio",
            ENGINE_GAP,
            f"{share} {formula}",
            _CORRECTION,
            OfResponses(flags, values),
        )


def _outlier_lines() -> Iterator[FrameworkMetric]:
    """What SkyRL logs of outliers: the shares of responses with at least one token beyond a
    threshold.
    """
    for where, formula, tokens in (
        ("masked", "r outside [1e-4, 100]", ratio_outside(1e-4, 100.0)),
        ("over_high", "r > 100", ratio_above(100.0)),
        ("under_low", "r < 1e-4", ratio_below(1e-4)),
    ):
        yield FrameworkMetric(
            f"policy/outlier_seq_{where}_ratio",
            ENGINE_GAP,
            f"share of y with a token {formula}",
            _CORRECTION,
            OfResponses(lambda share_S: share_S > 0, ResponseMeans(tokens)),
            note="outlier_token_is_threshold_low 1e-4 and _high 100, as suggested",
        )


LINES = (
    FrameworkMetric(
        f"{_BEFORE}_mean", ENGINE_GAP, "E |d|", _TRAINER, metric="abs_d_mean", word="gap"
    ),
    FrameworkMetric(
        f"{_BEFORE}_std",
        ENGINE_GAP,
        "standard deviation of |d|, ÷ (n − 1)",
        _TRAINER,
        ABS_D,
        sample_sd,
    ),
    FrameworkMetric(f"{_BEFORE}_max", ENGINE_GAP, "max |d|", _TRAINER, ABS_D, largest),
    FrameworkMetric(f"{_BEFORE}_min", ENGINE_GAP, "min |d|", _TRAINER, ABS_D, least),
    FrameworkMetric(f"{_WITHIN}_mean", CURRENT, "E |d|", _WORKER, metric="abs_d_mean", word="gap"),
    FrameworkMetric(f"{_WITHIN}_std", CURRENT, "√(E d² − (E |d|)²)", _WORKER, ABS_D, population_sd),
    FrameworkMetric(f"{_WITHIN}_max", CURRENT, "max |d|", _WORKER, ABS_D, largest),
    FrameworkMetric(
        f"{_WITHIN}_min", CURRENT, "min |d|, or 0 if anything is masked", _WORKER, lacks=_PADDING
    ),
    FrameworkMetric(
        "policy/is_ratio_mean",
        ENGINE_GAP,
        "E r",
        _CORRECTION,
        weight(),
        word="importance ratio",
        note=f"before truncation; {_CLAMPED}",
    ),
    FrameworkMetric(
        "policy/is_ratio_max", ENGINE_GAP, "max r", _CORRECTION, weight(), largest, note=_CLAMPED
    ),
    FrameworkMetric(
        "policy/is_ratio_std",
        ENGINE_GAP,
        "standard deviation of r and zeros",
        _CORRECTION,
        lacks=_PADDING,
    ),
    FrameworkMetric(
        "policy/is_ratio_min",
        ENGINE_GAP,
        "min r, or 0 if anything is masked",
        _CORRECTION,
        lacks=_PADDING,
    ),
    FrameworkMetric(
        "policy/tis_token_clip_high_ratio",
        ENGINE_GAP,
        "share with r > 2",
        _CORRECTION,
        ratio_above(2.0),
        note="tis_ratio_type token, token_tis_ratio_clip_high 2",
    ),
    FrameworkMetric(
        "policy/tis_seq_clip_high_ratio",
        ENGINE_GAP,
        "share of y with exp(Σd) > 5",
        _CORRECTION,
        OfResponses(lambda product_S: product_S > 5, _PRODUCT),
        note="tis_ratio_type sequence, sequence_tis_ratio_clip_high 5",
    ),
    *_outlier_lines(),
    FrameworkMetric(
        "policy/token_mask_ratio",
        ENGINE_GAP,
        "share with r outside [0.5, 2]",
        _CORRECTION,
        ratio_outside(0.5, 2.0),
        note="token_mask_is_threshold_low 0.5 and _high 2, as suggested",
    ),
    *_band_lines("geo_sequence_mask", "exp(mean d)", _GEOMETRIC, 0.99, 1.01),
    *_band_lines("product_sequence_mask", "exp(Σd)", _PRODUCT, 0.5, 2.0),
    FrameworkMetric(
        "policy/clip_ratio",
        UPDATE,
        f"share {BLOCKED}",
        _LOSS,
        blocked("ppo"),
        note="eps_clip_low and eps_clip_high 0.2",
        needs=("advantage_T",),
    ),
    *(
        FrameworkMetric(
            f"policy/cispo/ratio_{statistic}",
            UPDATE,
            formula,
            _LOSS,
            measured,
            reduce,
            word=word,
            note=_CISPO,
        )
        for statistic, formula, measured, reduce, word in (
            ("mean", "E r", weight(), mean, "importance ratio"),
            ("clamped_mean", "E min(r, 5)", weight(5.0), mean, ""),
            ("max", "max r", weight(), largest, ""),
            ("min", "min r", weight(), least, ""),
        )
    ),
    *(
        FrameworkMetric(f"async/staleness_{statistic}", CURRENT, formula, _ASYNC, lacks=_STEPS)
        for statistic, formula in (
            ("mean", "E steps since a prompt was sent"),
            ("max", "max steps since a prompt was sent"),
            ("min", "min steps since a prompt was sent"),
            ("ratio", "share of prompts sent in an earlier step"),
        )
    ),
)
