"""The engine kept older weights: it agrees better with an earlier checkpoint than with the
current one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mismatch_cli.diagnosis.checks.index_shift import too_few
from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row, untested
from mismatch_cli.diagnosis.far_responses import Subset
from mismatch_cli.diagnosis.group_estimates import Mean, mean_over_prompts, slope_over_prompts
from mismatch_cli.diagnosis.model import rounded_to
from mismatch_cli.diagnosis.power import clear, no_power, of_responses, percent
from mismatch_cli.diagnosis.shared_origins import shared_by
from mismatch_cli.models.torch_settings import sends_rounded

NAME, STAGE = "stale-weights", 4
TITLE = "Stale weights"
CAUSE = (
    "The weight sync reached the engine late, only partly or never, or an adapter was not loaded."
)
CHANGE = (
    "Reload the full state dict and reset the prefix cache after every update; with LoRA, merge "
    "before the sync or check that the engine lists the adapter."
)
SOURCE = "TRL 5312 (sleep mode: 0.010 to 0.201 at step 3), verl 7904, prime-rl PR 3543, SkyRL 1776"
ANY_SHARE = True  # with the weights themselves: no share of the gap is too small to be named
_LESS, _Z = 0.8, 4.0
_STALE = 0.6  # of the way to the earlier checkpoint; the current one is as near 0
_APART = 0.15  # error of that at most: a third of the way from either end to the middle
_MOSTLY = 0.8  # of the responses that tell are at one of both ends
_SHORTEST = 8  # tokens of a response
_U_MOST = 10.0  # typical gaps: cap on one token
_LEAST_SQUARE = 1e-12  # of typical gaps: with less, both checkpoints are alike
_MEASURE = "gap to the earlier / to the current"
_AS_WELL = 1.1  # times: rounded weights explain the gap as well


def check(evidence: Evidence) -> Finding:
    """Compare the gap to the earlier checkpoint with the gap to the current one, on the same
    tokens: over all responses, and response by response.
    """
    if evidence.earlier_logp_T is None:
        return untested(NAME, "needs an earlier checkpoint", needs="--earlier-model MODEL")
    fit = fit_other_weights(evidence, evidence.earlier_logp_T)
    ways = ways_of_responses(evidence, fit.d_N)
    rows: tuple[Row, ...] = (
        ("mean |Δlog p| to the current checkpoint, nats", fit.now.value),
        ("to the earlier one, nats", fit.other.value),
        ("tokens", fit.now.count),
        *ways.rows,
    )
    reason, rounded_rows = _rounds_as_well(evidence, fit)
    rows = (*rows, *rounded_rows)
    if reason:
        return Finding(NAME, "clear", fit.factor, _MEASURE, evidence=rows, reason=reason)
    stale = ways.stale_among_current(evidence)
    if stale is not None:
        return _mixed_finding(evidence, fit, stale, rows)
    if not fit.fits:
        return clear(NAME, fit.factor, _MEASURE, ways.power, rows)
    sentence = (
        f"The engine is closer to the earlier checkpoint: that gap is {fit.factor:.2g} times "
        "the gap to the current one."
    )
    dtype = narrower(evidence)
    if dtype is not None and evidence.model is None:
        sentence += (
            f" It may still have the new weights, if rounding to {dtype} swallowed the step: "
            "--trainer-model tells the two apart."
        )
    return finding_of(NAME, evidence, fit, _MEASURE, rows, sentence)


def _rounds_as_well(evidence: Evidence, fit: OtherWeightsFit) -> tuple[str, tuple[Row, ...]]:
    """Why rounding explains the gap as well, empty if it does not; and the gap to rounded weights.

    Rounded to the engine's dtype, new weights may hardly differ from the earlier ones: the sync was
    right.
    """
    dtype = narrower(evidence)
    if dtype is None or evidence.model is None:
        return "", ()
    rounded = fit_other_weights(evidence, evidence.model.logp_T(rounded_to(dtype)))
    rows: tuple[Row, ...] = ((f"to the current one in {dtype}, nats", rounded.other.value),)
    if rounded.fits and rounded.factor <= _AS_WELL * fit.factor:
        return f"the current checkpoint in {dtype} fits as well: see rounded-weights", rows
    return "", rows


@dataclass(frozen=True)
class _Ways:
    """How far each response is on the way from the current checkpoint to the earlier one: 0 if
    the engine has the current weights, 1 if it has the earlier ones.

    With s = log π − log π_earlier and d = log π − log μ, that is the slope of d on s.
    """

    way_S: np.ndarray
    error_S: np.ndarray  # its standard error, from what the slope leaves; inf = not scored
    better_S: np.ndarray  # bool: the earlier checkpoint leaves clearly less of its gap
    way: float  # of all tokens
    error: float  # of that, over prompts

    @property
    def decided_S(self) -> np.ndarray:
        """The responses that tell both checkpoints apart."""
        return np.asarray(self.error_S < _APART)

    @property
    def stale_S(self) -> np.ndarray:
        return np.asarray(self.decided_S & self.better_S & (self.way_S > _STALE))

    def stale_among_current(self, evidence: Evidence) -> Subset | None:
        """The stale responses, if others are current; None if all are alike, or in between."""
        decided_S, stale_S = self.decided_S, self.stale_S
        current_S = decided_S & (self.way_S < 1 - _STALE)
        if too_few(stale_S[decided_S]) or too_few(current_S[decided_S]):
            return None
        if (stale_S | current_S).sum() < _MOSTLY * decided_S.sum():
            return None
        shared = shared_by(evidence.sample, stale_S, decided_S, evidence.traces)
        return Subset(stale_S, decided_S, shared)

    @property
    def rows(self) -> tuple[Row, ...]:
        return (
            ("on the way from the current (0) to the earlier checkpoint (1)", self.way),
            ("its standard error over prompts", self.error),
            ("responses that tell both apart", int(self.decided_S.sum())),
            ("of these at the earlier one", int(self.stale_S.sum())),
        )

    @property
    def power(self) -> str:
        """The share of stale responses that would have been found."""
        decided = int(self.decided_S.sum())
        if decided:
            return of_responses(self.decided_S)
        share = _Z * self.error
        if not share < 1:
            return no_power("both checkpoints are alike beside the noise")
        return f"it in ≥ {percent(share)} of the responses"


def ways_of_responses(evidence: Evidence, earlier_d_N: np.ndarray) -> _Ways:
    """The slope of each response, in units of what is typical at the same probability (`_M`: the
    tokens that the earlier checkpoint scored).
    """
    sample = evidence.sample
    scored_N = np.isfinite(earlier_d_N)
    response_M = sample.response_N[scored_N]

    def sum_S(value_M: np.ndarray) -> np.ndarray:
        return np.bincount(response_M, value_M, sample.num_responses)

    now_M, earlier_M = sample.d_N[scored_N], earlier_d_N[scored_N]
    unit_M = sample.typical_N[scored_N]
    d_M, s_M = np.clip([now_M / unit_M, (now_M - earlier_M) / unit_M], -_U_MOST, _U_MOST)
    square_S = np.maximum(sum_S(s_M**2), _LEAST_SQUARE)
    way_S = sum_S(d_M * s_M) / square_S
    rest_M = d_M - way_S[response_M] * s_M
    error_S = np.sqrt(sum_S(s_M**2 * rest_M**2)) / square_S
    # Few tokens, or tokens that both checkpoints score alike, do not tell them apart
    usable_S = (sum_S(unit_M > 0) >= _SHORTEST) & (square_S > _LEAST_SQUARE)
    better_S = sum_S(np.abs(earlier_M)) < _LESS * sum_S(np.abs(now_M))
    way_of_all = slope_over_prompts(s_M, d_M, sample.group_N[scored_N])
    return _Ways(way_S, np.where(usable_S, error_S, np.inf), better_S, *way_of_all)


def _mixed_finding(
    evidence: Evidence, fit: OtherWeightsFit, stale: Subset, rows: tuple[Row, ...]
) -> Finding:
    """Found in these responses: those of the rest keep their gap, and those that were not scored
    shrink as the others do.
    """
    d_N = evidence.sample.d_N
    scored_N = np.isfinite(fit.d_N)
    stale_N = stale.inside_S[evidence.sample.response_N] & scored_N
    now = float(np.abs(d_N[stale_N]).mean())
    earlier = float(np.abs(fit.d_N[stale_N]).mean())
    left_N = np.where(stale_N, fit.d_N, d_N)
    shrinks = float(np.abs(left_N[scored_N]).sum() / np.abs(d_N[scored_N]).sum())
    sentence = (
        f"The engine has the weights of the earlier checkpoint {stale.where}: the gap there is "
        f"{now:.2g} nats to the current one and {earlier:.2g} to the earlier one."
    )
    return Finding(
        NAME,
        "found",
        float(stale.inside_S.mean()),
        "share of responses at the earlier checkpoint",
        sentence,
        rows,
        left_N=np.where(scored_N, left_N, d_N * shrinks),
        where=stale.where,
    )


class OtherWeightsFit(NamedTuple):
    """Mean |Δlog p| to the recorded trainer and to other weights, on the tokens that the latter
    scored.
    """

    now: Mean
    other: Mean
    factor: float  # other / now
    fits: bool  # the other weights fit clearly better
    d_N: np.ndarray  # log π − log μ at the other weights


def fit_other_weights(evidence: Evidence, other_logp_T: np.ndarray) -> OtherWeightsFit:
    """The engine's gap to other weights, beside its gap to the recorded trainer."""
    sample = evidence.sample
    other_d_N = other_logp_T[sample.index_N] - sample.logq_N
    scored_N = np.isfinite(other_d_N)
    now_M, other_M = np.abs(sample.d_N[scored_N]), np.abs(other_d_N[scored_N])
    group_M = sample.group_N[scored_N]
    now, other = mean_over_prompts(now_M, group_M), mean_over_prompts(other_M, group_M)
    change = mean_over_prompts(now_M - other_M, group_M)
    factor = other.times(now)
    fits = factor < _LESS and change.z_from(0.0) > _Z
    return OtherWeightsFit(now, other, factor, bool(fits), other_d_N)


def finding_of(
    name: str,
    evidence: Evidence,
    fit: OtherWeightsFit,
    measure: str,
    rows: tuple[Row, ...],
    sentence: str,
) -> Finding:
    """Found if the other weights fit clearly better; tokens that they did not score shrink by
    the same factor.
    """
    if not fit.fits:
        least = max(1 - _LESS, _Z * fit.now.error / max(fit.now.value, 1e-12))
        power = f"a gap that is {percent(least)} smaller"
        if not least < 1:
            power = no_power("too few prompts")
        return clear(name, fit.factor, measure, power, rows)
    left_N = np.where(np.isfinite(fit.d_N), fit.d_N, evidence.sample.d_N * fit.factor)
    return Finding(name, "found", fit.factor, measure, sentence, rows, left_N=left_N)


def narrower(evidence: Evidence) -> str | None:
    """The engine's dtype, if the manifest says that it has 16 bits and the trainer float32."""
    engine, trainer = (evidence.about.get(side, {}).get("dtype") for side in ("rollout", "trainer"))
    return engine if sends_rounded(trainer, engine) else None
