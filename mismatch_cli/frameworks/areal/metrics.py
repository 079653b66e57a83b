"""AReaL: its gap by three names, `logp_diff` against the current trainer, `train_infer/*` and
`behave_*` against the recomputed one, whose sign is the opposite of verl's; and PPO's clip.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log

import numpy as np

from mismatch_cli.frameworks.dialects._metric import (
    ABS_D,
    BLOCKED,
    CURRENT,
    ENGINE_GAP,
    MINUS_D,
    MINUS_LOG_P,
    MINUS_LOG_Q,
    UPDATE,
    ZEROED_RATIO,
    D,
    FrameworkMetric,
    Tokens,
    advantages,
    blocked,
    largest,
    least,
    mean,
    ratio_above,
    where_advantage,
)
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.rules.algorithms.table import TABLE

WHEN = (
    "Here with use_decoupled_loss, as in AReaL's examples; off, the default, lines that say "
    "recomputed compare with the rollout. update/* is always logged, except that behave_* and "
    "rs_filtered_fraction need rejection_sampling, and sapo_* needs use_sapo_loss, which "
    "excludes use_decoupled_loss. behave_imp_weight and behave_approx_kl cover the tokens that "
    "rejection_sampling keeps: here all tokens, without a filter. train_infer/* is logged where "
    "log-probs are recomputed. Shares and gates are also logged as min and max."
)
_ACTOR = "areal/trainer/ppo/actor.py"
_STATS = "areal/trainer/ppo/stats.py"
_LOSS = "areal/utils/functional/functional.py"
_PREFIX = "ppo_actor/update/"
_GAP = "ppo_actor/train_infer/"
_ZEROED = "an infinite d counts as 0"
_UPDATE = "change by the update, not the engine gap"
_SINCE, _SINCE_2 = "pull request 1572, August 2026", "pull request 1736, September 2026"
_UPPER = 5.0
_REJECTS = "rejection_sampling's own defaults: level token, action mask, metric ratio, upper 5"
_SAPO = TABLE["sapo"].weight[0].parameters
_TAU_POS, _TAU_NEG = _SAPO["tau_pos"], _SAPO["tau_neg"]
_GATE = "4/τ · σ(τ (r − 1))"
_NOT_DECOUPLED = "with recompute_logprob, off by default, against the recomputed trainer instead"
_D_SQUARED = Tokens(lambda gaps: np.square(gaps.d_N, dtype=np.float64))
_FILTERED = ratio_above(_UPPER)


def _average_and_extremes(
    name: str,
    pair: str,
    formula: str,
    source: str,
    measured: Tokens,
    metric: str,
    word: str,
    note: str = "",
) -> Iterator[FrameworkMetric]:
    """What AReaL logs of a column of tokens: avg, which is one of our metrics, min and max."""
    average = f"E {formula}"
    yield FrameworkMetric(f"{name}/avg", pair, average, source, metric=metric, word=word, note=note)
    yield FrameworkMetric(f"{name}/min", pair, f"min {formula}", source, measured, least)
    yield FrameworkMetric(f"{name}/max", pair, f"max {formula}", source, measured, largest)


def _tail_line(threshold: float) -> FrameworkMetric:
    """How many tokens have a ratio outside [1/threshold, threshold]."""
    far = Tokens(lambda gaps: gaps.abs_d_N > np.float32(log(threshold)))
    formula = f"share with |d| > log {threshold:g}"
    return FrameworkMetric(f"{_GAP}ratio_outside_{threshold:g}", ENGINE_GAP, formula, _STATS, far)


def _gate_N(gaps: TokenGaps, tau: float) -> np.ndarray:
    gate_N: np.ndarray = 4 / tau / (1 + np.exp(-tau * gaps.ratio_less_1_N.astype(np.float64)))
    return gate_N


def _soft_gate_N(gaps: TokenGaps) -> np.ndarray:
    return np.where(advantages(gaps) > 0, _gate_N(gaps, _TAU_POS), _gate_N(gaps, _TAU_NEG))


def _scaled_gate_line(sign: str, tau: float) -> FrameworkMetric:
    """What AReaL logs as the gate of one sign of A: the gate at its τ, over all tokens."""
    return FrameworkMetric(
        f"{_PREFIX}sapo_scaled_gate_{sign}/avg",
        CURRENT,
        f"E {_GATE}, τ = {tau:g}",
        _LOSS,
        Tokens(lambda gaps: _gate_N(gaps, tau), logs=False),
        note="whatever the sign of A",
    )


_GATES = (
    FrameworkMetric(
        f"{_PREFIX}sapo_soft_gate/avg",
        CURRENT,
        f"E {_GATE}, τ = {_TAU_POS:g} for A > 0 and {_TAU_NEG:g} otherwise",
        _LOSS,
        Tokens(_soft_gate_N, logs=False),
        note=f"sapo_tau_pos {_TAU_POS:g}, sapo_tau_neg {_TAU_NEG:g}; {_NOT_DECOUPLED}",
        needs=("advantage_T",),
    ),
    _scaled_gate_line("pos", _TAU_POS),
    _scaled_gate_line("neg", _TAU_NEG),
)

LINES = (
    *_average_and_extremes(
        f"{_PREFIX}logp_diff",
        CURRENT,
        "(−d)",
        _ACTOR,
        MINUS_D,
        "k1",
        "gap",
        note=f"the rollout less the current trainer; {_SINCE}",
    ),
    *_average_and_extremes(
        f"{_PREFIX}logp_abs_diff", CURRENT, "|d|", _ACTOR, ABS_D, "abs_d_mean", "gap"
    ),
    *_average_and_extremes(
        f"{_GAP}logp_diff",
        ENGINE_GAP,
        "d",
        _STATS,
        D,
        "d_mean",
        "gap",
        note=f"the trainer less the rollout; {_SINCE_2}",
    ),
    *_average_and_extremes(
        f"{_GAP}logp_abs_diff", ENGINE_GAP, "|d|", _STATS, ABS_D, "abs_d_mean", "gap"
    ),
    FrameworkMetric(f"{_GAP}logp_diff_squared", ENGINE_GAP, "E d²", _STATS, _D_SQUARED),
    FrameworkMetric(f"{_GAP}trainer_nll", ENGINE_GAP, "E (−log π)", _STATS, MINUS_LOG_P),
    FrameworkMetric(f"{_GAP}rollout_nll", ENGINE_GAP, "E (−log μ)", _STATS, MINUS_LOG_Q),
    FrameworkMetric(f"{_GAP}kl_k1", ENGINE_GAP, "E (−d)", _STATS, metric="k1", word="KL"),
    FrameworkMetric(f"{_GAP}kl_k2", ENGINE_GAP, "E d²/2", _STATS, metric="k2", word="KL"),
    FrameworkMetric(f"{_GAP}kl_k3", ENGINE_GAP, "E (r − 1 − d)", _STATS, metric="k3", word="KL"),
    *map(_tail_line, (1.5, 2, 3, 5, 10)),
    *_average_and_extremes(
        f"{_PREFIX}behave_approx_kl",
        ENGINE_GAP,
        "d",
        _ACTOR,
        D,
        "d_mean",
        "KL",
        note="with a plus sign: minus verl's kl",
    ),
    FrameworkMetric(
        f"{_PREFIX}behave_imp_weight/avg",
        ENGINE_GAP,
        "E r",
        _ACTOR,
        ZEROED_RATIO,
        mean,
        word="importance ratio",
        note=_ZEROED,
    ),
    FrameworkMetric(
        f"{_PREFIX}behave_imp_weight/min", ENGINE_GAP, "min r", _ACTOR, ZEROED_RATIO, least
    ),
    FrameworkMetric(
        f"{_PREFIX}behave_imp_weight/max", ENGINE_GAP, "max r", _ACTOR, ZEROED_RATIO, largest
    ),
    FrameworkMetric(
        f"{_PREFIX}behave_filtered_ratio/avg",
        ENGINE_GAP,
        f"share with r > {_UPPER:g}",
        _ACTOR,
        _FILTERED,
        note=f"{_REJECTS}; {_SINCE}",
    ),
    FrameworkMetric(
        f"{_PREFIX}rs_filtered_fraction",
        ENGINE_GAP,
        f"share with r > {_UPPER:g}",
        _LOSS,
        _FILTERED,
        note=f"{_REJECTS}; a mean over micro-batches, whatever their sizes",
    ),
    FrameworkMetric(
        f"{_PREFIX}approx_kl/avg", UPDATE, "E d", _ACTOR, metric="d_mean", word="KL", note=_UPDATE
    ),
    FrameworkMetric(
        f"{_PREFIX}importance_weight/avg",
        UPDATE,
        "E r",
        _ACTOR,
        metric="ratio_mean",
        word="importance ratio",
        note=_UPDATE,
    ),
    FrameworkMetric(
        f"{_PREFIX}clip_ratio/avg",
        UPDATE,
        f"share {BLOCKED}",
        _LOSS,
        blocked("ppo"),
        note="eps_clip 0.2; 0 with SAPO",
        needs=("advantage_T",),
    ),
    FrameworkMetric(
        f"{_PREFIX}dual_clip_ratio/avg",
        UPDATE,
        "share with A < 0 and r > 3",
        _LOSS,
        where_advantage(ratio_above(3.0), -1),
        note="c_clip 3, the usual value; it is off by default, and then 0 is shown",
        needs=("advantage_T",),
    ),
    *_GATES,
)
