"""ROLL: `actor/train_infer_ratio_*` and `actor/train_infer_diff_*` at four levels, and PPO's
ratio.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import numpy as np

from mismatch_cli.base.arrays import Segments
from mismatch_cli.frameworks.dialects._metric import (
    BLOCKED,
    DP,
    ENGINE_GAP,
    LOG_RATIO,
    RATIO,
    UPDATE,
    D,
    FrameworkMetric,
    Moments,
    OfResponses,
    Quantity,
    ResponseMeans,
    ResponseSums,
    Tokens,
    blocked,
    largest,
    least,
    ratio_above,
    ratio_below,
    ratio_outside,
    weight,
)
from mismatch_cli.metrics.gaps import TokenGaps

WHEN = (
    "Always logged, against the trainer before the update, or in each pass if ROLL does not "
    "recompute it; a response without a trained token is not averaged. is_weight_clipfrac needs "
    "is_weight.enabled of train_infer_correction, here with its defaults: level token, "
    "upper_bound 1.2. *_mask_mean need a filter: here one, with its defaults. tis_*, topr_*, "
    "cispo_* and kimi15_* need that pg_variant of the agentic pipeline."
)
_CORRECTION = "roll/utils/train_infer_corrections.py"
_WORKER = "roll/pipeline/rlvr/actor_worker.py"
_AGENTIC = "roll/pipeline/agentic/agentic_actor_pg_worker.py"
_PREFIX = "actor/train_infer_"
_OF_UPDATE = "change by the update, not the engine gap"
_SAME = "the mean of means is the mean over tokens, so it equals that of level token"
_PLACES = "the amount of padding: prompts and padding count as places with r = 1"
_PADDING = "the amount of padding: a padded position counts as one that passes"


def _turn_ratio_N(gaps: TokenGaps) -> np.ndarray:
    """exp(mean d) of each turn, at each of its tokens."""
    # Two edges coincide where a turn has no counted token; such a turn has no ratio.
    edges = np.concatenate([gaps.offset_S1, gaps.counted_before(gaps.later_turns)])
    turns = Segments(np.unique(edges))
    with np.errstate(over="ignore"):
        ratio = np.exp(turns.sum(LOG_RATIO.column(gaps)) / turns.length_S)
    return np.repeat(ratio, turns.length_S)


def _complement(moments: Moments) -> float:
    return 1 - moments.mean


def _means(tokens: Tokens) -> ResponseMeans:
    return ResponseMeans(tokens, include_empty=False)


def _level_line(
    kind: str, level: str, formula: str, measured: Quantity, note: str = "", word: str = ""
) -> FrameworkMetric:
    return FrameworkMetric(
        f"{_PREFIX}{kind}_{level}_mean",
        ENGINE_GAP,
        formula,
        _CORRECTION,
        measured,
        note=note,
        word=word,
    )


# ROLL compares r in float32, in which exp of a d up to 2⁻²⁴ is 1.
# numpy's own exp errs by one step there, so d is compared instead.
_ABOVE_1 = Tokens(lambda gaps: gaps.d_N > 2**-24, logs=False)


def _tis_lines() -> Iterator[FrameworkMetric]:
    """What pg_variant tis logs: r is its ratio to the trainer before the update, not to the
    rollout.
    """
    note = "pg_variant tis, tis_upper_bound 1"
    for bound in ("upper", "total"):
        name = f"actor/tis_{bound}_clipfrac"
        yield FrameworkMetric(name, UPDATE, "share with r > 1", _AGENTIC, _ABOVE_1, note=note)
    yield FrameworkMetric(
        "actor/tis_lower_clipfrac",
        UPDATE,
        "share with r < 0",
        _AGENTIC,
        ratio_below(0.0),
        note="0 with tis_lower_bound 0, its default",
    )
    yield FrameworkMetric(
        "actor/tis_clipped_ratio_mean",
        UPDATE,
        "E_y mean min(r, 1)",
        _AGENTIC,
        _means(weight(1.0, bound=inf)),
        word="importance ratio",
        note=note,
    )


def _lines_over_places() -> Iterator[FrameworkMetric]:
    """What the agentic variants average over every place of the padded batch."""
    for name, formula in (
        ("topr_negative_upper_clipfrac", "share of places with r > 1 and score ≤ 0"),
        ("topr_negative_total_clipfrac", "share of places with r > 1 and score ≤ 0"),
        ("cispo_cispo_lower_clipfrac", "share of places with r < 0.9"),
        ("cispo_cispo_upper_clipfrac", "share of places with r > 1.1"),
        ("cispo_cispo_total_clipfrac", "share of places with r outside [0.9, 1.1]"),
        ("kimi15_kimi15_log_ratio_mean", "Σd over places"),
        ("kimi15_kimi15_log_ratio_std", "standard deviation of d over places"),
        ("kimi15_kimi15_log_ratio_abs_mean", "Σ|d| over places"),
        ("kimi15_kimi15_kl_reg_magnitude", "0.05 Σd² over places"),
    ):
        yield FrameworkMetric(f"actor/{name}", UPDATE, formula, _AGENTIC, lacks=_PLACES)


_SUM = ResponseSums(LOG_RATIO, include_empty=False)
_MEAN = _means(LOG_RATIO)
_HALF_D2 = Tokens(lambda gaps: np.square(gaps.d_N, dtype=np.float64) / 2)

LINES = (
    _level_line("ratio", "token", "E_y mean r", _means(RATIO), word="importance ratio"),
    _level_line(
        "ratio", "geometric", "E_y exp(mean d)", OfResponses(np.exp, _MEAN), word="importance ratio"
    ),
    _level_line(
        "ratio",
        "sequence",
        "E_y exp(Σd)",
        OfResponses(np.exp, _SUM),
        "not truncated: the tail may overflow",
        "importance ratio",
    ),
    _level_line(
        "ratio",
        "segment",
        "E_y mean exp(mean d of its turn)",
        _means(Tokens(_turn_ratio_N, logs=False)),
        "a turn is a run of trained tokens; for a single turn it equals level geometric",
        "importance ratio",
    ),
    _level_line("diff", "token", "E_y mean (π − μ)", _means(DP), "of probabilities, signed", "gap"),
    _level_line(
        "diff",
        "geometric",
        "E_y mean (π − μ)",
        _means(DP),
        f"an arithmetic mean, despite the name; {_SAME}",
    ),
    _level_line(
        "diff",
        "sequence",
        "E_y Σ(π − μ)",
        ResponseSums(DP, include_empty=False),
        "grows with the length",
    ),
    _level_line("diff", "segment", "E_y mean (π − μ)", _means(DP), _SAME),
    FrameworkMetric(
        "actor/is_weight_clipfrac", ENGINE_GAP, "share with r > 1.2", _CORRECTION, ratio_above(1.2)
    ),
    FrameworkMetric(
        f"{_PREFIX}final_mask_mean",
        ENGINE_GAP,
        "share with r in [0.8, 1.2]",
        _CORRECTION,
        ratio_outside(0.8, 1.2),
        _complement,
        note="the share that passes; 1 − this is masked",
    ),
    *(
        FrameworkMetric(
            f"{_PREFIX}{level}_{kind}_mask_mean",
            ENGINE_GAP,
            f"places with {passes} over tokens, at level {level}",
            _CORRECTION,
            lacks=_PADDING,
        )
        for level in ("token", "geometric", "sequence", "segment")
        for kind, passes in (("ratio", "r in [0.8, 1.2]"), ("diff", "|π − μ| ≤ 0.2"))
    ),
    FrameworkMetric(
        "actor/ratio_mean",
        UPDATE,
        "E_y mean r",
        _WORKER,
        _means(RATIO),
        word="importance ratio",
        note=_OF_UPDATE,
    ),
    FrameworkMetric("actor/ratio_max", UPDATE, "max r", _WORKER, RATIO, largest),
    FrameworkMetric("actor/ratio_min", UPDATE, "min r", _WORKER, RATIO, least),
    FrameworkMetric(
        "actor/ppo_ratio_high_clipfrac",
        UPDATE,
        "share with r > 1.2",
        _WORKER,
        ratio_above(1.2),
        note="for either sign of A; pg_clip 0.2",
    ),
    FrameworkMetric(
        "actor/ppo_ratio_low_clipfrac",
        UPDATE,
        "share with r < 0.8",
        _WORKER,
        ratio_below(0.8),
        note="for either sign of A; pg_clip 0.2",
    ),
    FrameworkMetric(
        "actor/ppo_ratio_clipfrac",
        UPDATE,
        "share with r outside [0.8, 1.2]",
        _WORKER,
        ratio_outside(0.8, 1.2),
        note="the sum of the two above",
    ),
    FrameworkMetric(
        "actor/clipfrac",
        UPDATE,
        f"E_y share {BLOCKED}",
        _WORKER,
        _means(blocked("ppo")),
        note="pg_clip 0.2",
        needs=("advantage_T",),
    ),
    FrameworkMetric(
        "actor/approxkl",
        UPDATE,
        "E_y mean d²/2",
        _WORKER,
        _means(_HALF_D2),
        word="KL",
        note=_OF_UPDATE,
    ),
    FrameworkMetric(
        "actor/policykl",
        UPDATE,
        "E_y mean d",
        _WORKER,
        _means(D),
        word="KL",
        note=f"with a plus sign, the opposite of verl's ppo_kl; {_OF_UPDATE}",
    ),
    *_tis_lines(),
    FrameworkMetric(
        "actor/cispo_clipped_ratio_mean",
        UPDATE,
        "E_y mean of r clamped to [0.9, 1.1]",
        _AGENTIC,
        _means(weight(1.1, 0.9, inf)),
        word="importance ratio",
        note="pg_variant cispo, cispo_epsilon_low and cispo_epsilon_high 0.1",
    ),
    *_lines_over_places(),
)
