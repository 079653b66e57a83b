"""A temperature that only one side applied: the trainer's distribution is the rollout's, sharper
or flatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mismatch_cli.diagnosis.checks.truncated_support import OneSided
from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row, untested
from mismatch_cli.diagnosis.group_estimates import as_normal, slope_over_prompts
from mismatch_cli.diagnosis.power import clear, too_certain
from mismatch_cli.diagnosis.sample import Sample
from mismatch_cli.limits.manifest_sides import temperatures_of, trainer_of

NAME, STAGE = "temperature", 3
CLEARS = (
    "config.sampling.temperature",
    "rollout.logprobs_mode",
)  # settings that are not suspects if this finds nothing
TITLE = "Temperature on one side only"
CAUSE = (
    "The sampling temperature was applied to one side's logits and not to the other's, or the "
    "engine reported raw log-probabilities."
)
CHANGE = (
    "vLLM: --logprobs-mode processed_logprobs (SGLang ignores the temperature for prompt "
    "log-probs); divide the trainer's logits by the rollout's temperature."
)
SOURCE = "vime 64, TRL 4159, NeMo-RL 902, tinker-cloud PR 26 (fitted 0.70)"
_LEAST, _Z, _TAKES, _MAIN = 0.004, 6.0, 0.1, 0.25
# Of the gap, left by a temperature that only sampled tokens show: noise, or nothing
_LESS, _NEXT_TO_NOTHING = 0.5, 0.1
_MOST_OF_ALL = 1.0  # of β − 1: a temperature twice as high that would not show
_MOST_T = 1000.0  # of a table of Student's t
_AT_MOST = (
    " Its share is an upper bound: sampled tokens alone do not show how much another cause adds."
)
FEWEST = 200  # ids, or tokens
DEEPEST = -12.0  # nats: rarer tokens carry little information and the most rounding
_SPREAD = 6.0  # nats: unknown ids are as probable as possible, or this much less
_SAME = 1e-3  # nats
# Ratio of β − 1 on tokens in the context to that on others: 1.4 for a temperature
_TIMES_WHERE_SEEN, _APART = 1.8, 3.0  # and standard errors
_STATED = "the manifest"
_MOST_LOG_ODDS, _NEARLY_CERTAIN = 7.0, -1e-12  # beyond these, odds are mostly rounding


def check(evidence: Evidence) -> Finding:
    """Fit π ∝ μ^β; β is the temperature of the rollout over that of the trainer, 1 if both are the
    same. Where the manifest names two, there is nothing to fit.

    With top-K log-probabilities β is the slope of log π on log μ among the ids of one token (whose
    differences are free of the normaliser); else the slope of the sampled tokens' log-odds. What β
    makes of log μ(y) depends on how the rest of the probability is spread, within bounds; what is
    between them is not a gap. A temperature explains far more of it than its mirror image 2 − β;
    noise fits both alike.
    """
    sample = evidence.sample
    fit = _stated(evidence) or _from_topk(sample) or _from_log_odds(sample)
    if fit is None:
        return untested(NAME, too_certain(sample))
    if not np.isfinite(fit.error):
        return untested(NAME, "too few prompts to know the error of a fit")
    # Another check may have undone all of the gap
    if not sample.d_N.any():
        return Finding(NAME, "clear", fit.beta, "fitted β")
    betas = np.array(fit.of_other_half)
    left_N, takes = _left_by(sample, fit, betas)
    _, mirrored_takes = _left_by(sample, fit, 2 - betas)
    rows = _rows(evidence, fit, takes, mirrored_takes)
    # A share of what rounding does not make: noise and coarse caches flatten a distribution, too
    least = max(_TAKES, _MAIN * (1 - (evidence.expected.share_by_grid or 0.0)))
    explains = takes - max(mirrored_takes, 0.0) > least
    if not (explains and is_certain(sample, fit) and _is_like_one(evidence, fit, left_N)):
        return clear(NAME, fit.beta, "fitted β", power(sample, fit, least), rows)
    sentence = _sentence(evidence, fit)
    return Finding(
        NAME, "found", fit.beta, "fitted β", sentence, rows, left_N=left_N, at_most=fit.is_bound
    )


def _rows(
    evidence: Evidence, fit: TemperatureFit, takes: float, mirrored_takes: float
) -> tuple[Row, ...]:
    stated = evidence.sampling.get("temperature", "unknown")
    return (
        ("fitted β = T of the rollout / T of the trainer", fit.beta),
        ("its standard error over prompts, of the fit alone", fit.error),
        ("the same if all noise is the trainer's", fit.bounds[0]),
        ("if all noise is the rollout's", fit.bounds[1]), ("fitted from", fit.source),
        ("temperature in the manifest", stated),
        ("the trainer's", trainer_of(evidence.about).get("temperature", stated)),
        ("share of the gap that β explains", takes), ("that 2 − β would explain", mirrored_takes),
    )  # fmt: skip


def _is_like_one(evidence: Evidence, fit: TemperatureFit, left_N: np.ndarray) -> bool:
    """Whether sampled tokens alone show a temperature, and not what its bounds absorb as well.

    A temperature leaves noise. Where next to nothing is left, it is one; else what is left must be
    as expected and less than what it explains, and both sides distributions (`OneSided`): the mean
    ratio of what is none, such as an entropy, is above 1 by as much as the gap.
    """
    d_N, gap = evidence.sample.d_N, evidence.gap.value
    left = float(np.abs(left_N).mean())
    if not fit.is_bound or left <= _NEXT_TO_NOTHING * gap:
        return True
    is_noise = left <= min(evidence.expected.high, _LESS * gap)
    return is_noise and not OneSided.of(d_N, evidence.sample.group_N).is_no_distribution


def is_certain(sample: Sample, fit: TemperatureFit) -> bool:
    """Whether β is not 1: not by chance, not by noise on one side, and not by a penalty."""
    if fit.source == _STATED:
        return True
    z = 0.0
    if fit.error > 0:
        z = as_normal((fit.beta - 1) / fit.error, len(np.unique(sample.group_N)))
    if abs(fit.beta - 1) <= _LEAST or abs(z) <= _Z or fit.may_be_noise:
        return False
    return fit.topk or not differs_where_seen(sample)


def power(sample: Sample, fit: TemperatureFit, least: float) -> str:
    """The temperature that would have been found: more than chance, than noise on one side, and
    with the least share of the gap.

    A β that is 1 % larger moves log p by 1 % of (1 − p) times the log-odds, if the other ids were
    one.
    """
    x_N, _, usable_N = log_odds(sample)
    moves_N = np.where(usable_N, np.abs(x_N) * -np.expm1(sample.logq_N), 0.0)
    by_share = least * float(np.abs(sample.d_N).sum()) / max(float(moves_N.sum()), 1e-300)
    noise = max(abs(bound - fit.beta) for bound in fit.bounds)
    by_chance = _t_of_z(len(np.unique(sample.group_N))) * fit.error
    size = max(_LEAST, by_chance, noise, by_share)
    if not size < _MOST_OF_ALL:
        return too_certain(sample)
    return f"a temperature of ≥ {1 + size:.4g} times"


def _t_of_z(groups: int) -> float:
    """The Student's t that is as improbable as the z that a temperature needs."""
    # `as_normal` has no inverse of its own
    t_I = np.linspace(0, _MOST_T, 1024)
    z_I = np.array([as_normal(float(t), groups) for t in t_I])
    return float(np.interp(_Z, z_I, t_I))


def _sentence(evidence: Evidence, fit: TemperatureFit) -> str:
    if fit.source == _STATED:
        engine, trainer = temperatures_of(evidence.about)
        return f"The engine's temperature is {engine:g}, and the trainer's {trainer:g}."
    shape = "flatter" if fit.beta > 1 else "sharper"
    bound = _AT_MOST if fit.is_bound else ""
    return (
        f"The rollout's distribution is the trainer's at {fit.beta:.3g} times its temperature "
        f"({shape}).{bound}"
    )


@dataclass(frozen=True)
class TemperatureFit:
    """β of all prompts with its error, and of each half, for use on the other.

    `bounds` are β if all noise is the trainer's, and if all of it is the rollout's.
    """

    beta: float
    error: float
    bounds: tuple[float, float]
    of_other_half: tuple[float, float]
    source: str
    topk: bool

    @property
    def is_bound(self) -> bool:
        """Whether sampled tokens alone were fitted, so that β explains at most what it takes."""
        return not self.topk and self.source != _STATED

    @property
    def may_be_noise(self) -> bool:
        """Whether noise on one side, which flattens its distribution, would do as well."""
        return min(self.bounds) <= 1 <= max(self.bounds)


def _stated(evidence: Evidence) -> TemperatureFit | None:
    """From the manifest, if it names two temperatures."""
    engine, trainer = temperatures_of(evidence.about)
    if engine == trainer:
        return None
    beta, has_topk = engine / trainer, evidence.sample.topk_logq_TK is not None
    return TemperatureFit(beta, 0.0, (beta, beta), (beta, beta), _STATED, has_topk)


def _fit(
    sample: Sample, x_M: np.ndarray, y_M: np.ndarray, group_M: np.ndarray, source: str, topk: bool
) -> TemperatureFit | None:
    """β as the slope of log π (y) on log μ (x); None for too few values, or no slope above 0."""
    if len(x_M) < FEWEST:
        return None
    first_M = sample.half_G[group_M] == 0
    whole = _slope(x_M, y_M, group_M)
    first = _slope(x_M[first_M], y_M[first_M], group_M[first_M])
    second = _slope(x_M[~first_M], y_M[~first_M], group_M[~first_M])
    if whole is None or first is None or second is None:
        return None
    return TemperatureFit(*whole, (second[0], first[0]), source, topk)


def _slope(
    x_M: np.ndarray, y_M: np.ndarray, group_M: np.ndarray
) -> tuple[float, float, tuple[float, float]] | None:
    """The slope of y on x through the origin, averaged with that of x on y, since errors flatten
    either; its standard error; and both slopes.
    """
    down, error = slope_over_prompts(x_M, y_M, group_M)
    up, _ = slope_over_prompts(y_M, x_M, group_M)
    if not down > 0:  # nor is the other: both have the sign of Σ x y
        return None
    return float(np.sqrt(down / up)), error, (down, 1 / up)


def _from_topk(sample: Sample) -> TemperatureFit | None:
    ranks = ranks_of(sample)
    if ranks is None:
        return None
    q_NK, p_NK, usable_NK = ranks
    x_M, y_M = centred(q_NK, usable_NK)[usable_NK], centred(p_NK, usable_NK)[usable_NK]
    token_M, _ = np.nonzero(usable_NK)
    group_M = sample.group_N[token_M]
    return _fit(sample, x_M, y_M, group_M, f"top-{q_NK.shape[1]} log-probabilities", topk=True)


def ranks_of(sample: Sample) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """log μ and log π of the top-K ids of the tokens that count, and where both sides have
    values for two or more.
    """
    if sample.topk_logq_TK is None or sample.topk_logp_TK is None:
        return None
    q_NK = sample.topk_logq_TK[sample.index_N].astype(np.float64)
    p_NK = sample.topk_logp_TK[sample.index_N].astype(np.float64)
    with np.errstate(invalid="ignore"):
        usable_NK = np.isfinite(q_NK) & np.isfinite(p_NK) & (np.minimum(q_NK, p_NK) > DEEPEST)
    has_two_N = usable_NK.sum(axis=1) >= 2
    return q_NK, p_NK, usable_NK & has_two_N[:, None]


def centred(v_NK: np.ndarray, among_NK: np.ndarray) -> np.ndarray:
    """Values minus their mean over the ids of the same token; 0 outside `among_NK`."""
    count_N = np.maximum(among_NK.sum(axis=1), 1)
    mean_N = np.where(among_NK, v_NK, 0).sum(axis=1) / count_N
    return np.where(among_NK, v_NK - mean_N[:, None], 0)


def _from_log_odds(sample: Sample) -> TemperatureFit | None:
    """Fit the log-odds, as if all other ids were one: exact for two ids; else the log-odds are
    off by a constant.
    """
    return _fit(sample, *_odds(sample), "the sampled tokens' log-odds, approximate", topk=False)


def _odds(
    sample: Sample, chosen_N: np.ndarray | bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both sides' log-odds of some tokens, minus their means, and the prompt groups."""
    x_N, y_N, usable_N = log_odds(sample)
    usable_N = chosen_N & usable_N
    x_M, y_M = x_N[usable_N], y_N[usable_N]
    if len(x_M):
        x_M, y_M = x_M - x_M.mean(), y_M - y_M.mean()
    return x_M, y_M, sample.group_N[usable_N]


def log_odds(sample: Sample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both sides' log-odds of the tokens that count, and where they are more than rounding."""
    logp_2N = np.stack([sample.logq_N, sample.logp_N])
    odds_2N = logp_2N - np.log(-np.expm1(np.minimum(logp_2N, _NEARLY_CERTAIN)))
    return odds_2N[0], odds_2N[1], np.abs(odds_2N).max(axis=0) < _MOST_LOG_ODDS


def differs_where_seen(sample: Sample) -> bool:
    """Whether the slope differs clearly on tokens that are in the context: a penalty, not a
    temperature.
    """
    if sample.seen_T is None:
        return False
    seen_N = sample.seen_T[sample.index_N]
    on_seen, on_others = _odds(sample, seen_N), _odds(sample, ~seen_N)
    if min(len(on_seen[0]), len(on_others[0])) < FEWEST:
        return False
    slope_on_seen, slope_on_others = _slope(*on_seen), _slope(*on_others)
    if slope_on_seen is None or slope_on_others is None:
        return False
    beta_seen, error_seen, _ = slope_on_seen
    beta_others, error_others, _ = slope_on_others
    times = max(abs(beta_seen - 1), 1e-9) / max(abs(beta_others - 1), 1e-9)
    if max(times, 1 / times) <= _TIMES_WHERE_SEEN:
        return False
    return bool(abs(beta_seen - beta_others) > _APART * np.hypot(error_seen, error_others))


def _left_by(sample: Sample, fit: TemperatureFit, betas: np.ndarray) -> tuple[np.ndarray, float]:
    """log π − log μ, nats, beyond what β makes of μ, however the unknown rest is spread; and the
    share of the gap that this takes. `betas` are those of the two halves.
    """
    beta_N = betas[sample.half_N]
    known_NK, rest_N, likeliest_N = _known_and_rest(sample, use_topk=fit.topk)
    bounds = []
    # What a certain policy fits may be any β
    with np.errstate(over="ignore", invalid="ignore"):
        powers_N = np.exp(beta_N[:, None] * known_NK).sum(axis=1)
        for spread in (0.0, _SPREAD):
            rest_power_N = rest_N * np.exp((beta_N - 1) * (likeliest_N - spread))
            bounds.append(beta_N * sample.logq_N - np.log(powers_N + rest_power_N))
    left_N = beyond(sample, bounds)
    return left_N, 1 - float(np.abs(left_N).sum()) / float(np.abs(sample.d_N).sum())


def _known_and_rest(sample: Sample, *, use_topk: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log μ of the known ids of each token, the probability of all other ids, and the largest log μ
    that one of these can have.
    """
    logq_N, q_TK = sample.logq_N, sample.topk_logq_TK
    if not use_topk or q_TK is None:
        rest_N = -np.expm1(np.minimum(logq_N, 0.0))
        return logq_N[:, None], rest_N, np.log(np.maximum(rest_N, 1e-300))
    q_NK = q_TK[sample.index_N]
    q_NK = np.where(np.isnan(q_NK), -np.inf, q_NK).astype(np.float64)
    last_N = q_NK.min(axis=1, initial=0.0, where=np.isfinite(q_NK))
    # The sampled token may not be among the ranks
    sampled_N1 = np.where(logq_N < last_N - _SAME, logq_N, -np.inf)[:, None]
    known_NK = np.concatenate([q_NK, sampled_N1], axis=1)
    return known_NK, np.maximum(1 - np.exp(known_NK).sum(axis=1), 0.0), last_N


def beyond(sample: Sample, bounds: Sequence[np.ndarray]) -> np.ndarray:
    """How far log π of the tokens that count is outside two bounds, nats."""
    logp_N = sample.logp_N
    return np.asarray(logp_N - np.clip(logp_N, np.minimum(*bounds), np.maximum(*bounds)))
