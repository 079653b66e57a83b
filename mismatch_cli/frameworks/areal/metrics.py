"""AReaL: `behave_approx_kl`, whose sign is the opposite of verl's, and `behave_imp_weight`."""

from mismatch_cli.frameworks.dialects._line import (
    ENGINE_GAP,
    UPDATE,
    ZEROED_RATIO,
    D,
    Line,
    largest,
    least,
    mean,
)

WHEN = (
    "behave_* need rejection_sampling, and cover the tokens that it keeps: here all tokens, "
    "without a filter. Each is logged as avg, min and max."
)
_ACTOR = "areal/trainer/ppo/actor.py"
_PREFIX = "ppo_actor/update/"
_ZEROED = "an infinite d counts as 0"
_UPDATE = "change by the update, not the engine gap"

LINES = (
    Line(
        f"{_PREFIX}behave_approx_kl/avg",
        ENGINE_GAP,
        "E d",
        _ACTOR,
        metric="d_mean",
        word="KL",
        note="with a plus sign: minus verl's kl",
    ),
    Line(f"{_PREFIX}behave_approx_kl/min", ENGINE_GAP, "min d", _ACTOR, D, least),
    Line(f"{_PREFIX}behave_approx_kl/max", ENGINE_GAP, "max d", _ACTOR, D, largest),
    Line(
        f"{_PREFIX}behave_imp_weight/avg",
        ENGINE_GAP,
        "E r",
        _ACTOR,
        ZEROED_RATIO,
        mean,
        word="importance ratio",
        note=_ZEROED,
    ),
    Line(f"{_PREFIX}behave_imp_weight/min", ENGINE_GAP, "min r", _ACTOR, ZEROED_RATIO, least),
    Line(f"{_PREFIX}behave_imp_weight/max", ENGINE_GAP, "max r", _ACTOR, ZEROED_RATIO, largest),
    Line(
        f"{_PREFIX}approx_kl/avg", UPDATE, "E d", _ACTOR, metric="d_mean", word="KL", note=_UPDATE
    ),
    Line(
        f"{_PREFIX}importance_weight/avg",
        UPDATE,
        "E r",
        _ACTOR,
        metric="ratio_mean",
        word="importance ratio",
        note=_UPDATE,
    ),
)
