"""Bad updates: a negative sample's token that has already lost much probability is pushed down
further.

A < 0 and μ − π ≥ δ (arXiv 2602.04879, figure 5). The paper does not state the denominator of the
share, so both are given: tokens with A ≠ 0, and tokens with A < 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mismatch_cli.base.hashing import GROUPS
from mismatch_cli.base.json_form import beside_if_any
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.clipping.masked_slice import MaskedSlice
from mismatch_cli.metrics.correlation import series_correlation
from mismatch_cli.metrics.estimate import SIGNED, Estimate, grouped_ratio, grouped_share
from mismatch_cli.metrics.histograms import count_into
from mismatch_cli.metrics.step_sums import StepSums

BAD_DELTA = 0.5
DELTAS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, BAD_DELTA, 0.6, 0.7, 0.8, 0.9)
_FLOAT32_DELTAS = np.array(DELTAS, dtype=np.float32)
_MOST_STEPS = 2**12
_NO_ADVANTAGES = Estimate(None, note="no advantages")


@dataclass(frozen=True)
class BadUpdatesAtDelta:
    """Bad updates at a threshold δ of μ − π, as shares of tokens with A ≠ 0 and with A < 0."""

    delta: float
    bad: int
    over_tokens: Estimate
    over_negative: Estimate


@dataclass(frozen=True)
class BadUpdatesOfStep:
    """Bad updates in some steps, and their mean reward."""

    first: int
    last: int
    tokens: int
    negative: int
    bad: int
    over_tokens: Estimate
    over_negative: Estimate
    reward: Estimate
    reward_change: float | None  # since the row before; None without a reward in either


@dataclass(frozen=True)
class StepCorrelation:
    """Pearson's r of two values per step."""

    of: str
    with_: str
    steps: int
    estimate: Estimate = beside_if_any()


@dataclass(frozen=True)
class BadUpdatesSummary:
    """Bad updates at `delta`, at others, and by step."""

    delta: float
    over_tokens: Estimate
    over_negative: Estimate
    sweep: Sequence[BadUpdatesAtDelta]
    by_step: Sequence[BadUpdatesOfStep]
    correlations: Sequence[StepCorrelation]


class BadUpdates(Accumulator):
    """Counts of μ − π ≥ δ over negative tokens for a sweep of δ, and for δ = 0.5 by step, with
    the reward.
    """

    def __init__(self) -> None:
        # Column i: exactly i deltas reached
        self.above = np.zeros((GROUPS, len(DELTAS) + 1), dtype=np.int64)
        # Tokens with A ≠ 0, those with A < 0, bad ones, Σ reward, rewards
        self.steps = StepSums(_MOST_STEPS)

    def update(self, judged: MaskedSlice) -> None:
        index_U = np.flatnonzero(judged.negative_N & (judged.difference_N <= -_FLOAT32_DELTAS[0]))
        reached_U = np.searchsorted(_FLOAT32_DELTAS, -judged.difference_N[index_U], side="right")
        count_into(self.above, judged.group_N[index_U] * (len(DELTAS) + 1) + reached_U)
        bad_U = index_U[reached_U > DELTAS.index(BAD_DELTA)]
        sums_SM = np.stack(
            [
                judged.gaps.responses.sum(judged.judged_N),
                judged.gaps.responses.sum(judged.negative_N),
                judged.responses_at(bad_U).length_S,
                np.nan_to_num(judged.reward_S, nan=0.0),
                ~np.isnan(judged.reward_S),
            ],
            axis=1,
        )
        step_S = judged.gaps.batch.step_S[judged.gaps.first : judged.gaps.last]
        self.steps.update(step_S, judged.gaps.group_S, sums_SM)

    def result(self, prompts: int, *, advantages: bool) -> BadUpdatesSummary:
        """`advantages`: whether A is measured; otherwise only the share over tokens judged as A
        < 0 is meaningful.
        """
        shares = partial(_shares, prompts=prompts, advantages=advantages)
        by_step = self._by_step(prompts, advantages)
        total_2G = np.zeros((2, GROUPS))
        for _, _, sums_GM in self.steps:
            total_2G += sums_GM[:, :2].T
        # Tokens that reach at least i deltas, from those that reach exactly i; without i = 0
        reached_GD = self.above[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
        sweep = [
            BadUpdatesAtDelta(delta, int(bad_G.sum()), *shares(bad_G, *total_2G))
            for delta, bad_G in zip(DELTAS, reached_GD.T, strict=True)
        ]
        at_delta = sweep[DELTAS.index(BAD_DELTA)]
        return BadUpdatesSummary(
            delta=BAD_DELTA,
            over_tokens=at_delta.over_tokens,
            over_negative=at_delta.over_negative,
            sweep=sweep,
            by_step=by_step,
            correlations=_correlations(by_step) if advantages and len(by_step) > 2 else [],
        )

    def _by_step(self, prompts: int, advantages: bool) -> list[BadUpdatesOfStep]:
        rows: list[BadUpdatesOfStep] = []
        reward_before: float | None = None
        for first, last, sums_GM in self.steps:
            tokens_G, negative_G, bad_G, reward_G, graded_G = sums_GM.T
            # Without advantages every token was judged once per sign, and counts once
            judged_G = tokens_G if advantages else negative_G
            over_tokens, over_negative = _shares(
                bad_G, judged_G, negative_G, prompts=prompts, advantages=advantages
            )
            reward = grouped_ratio(reward_G, graded_G, prompts, SIGNED)
            reward_change = None
            if reward_before is not None and reward.value is not None:
                reward_change = reward.value - reward_before
            reward_before = reward.value
            rows.append(
                BadUpdatesOfStep(
                    first,
                    last,
                    tokens=int(judged_G.sum()),
                    negative=int(negative_G.sum()),
                    bad=int(bad_G.sum()),
                    over_tokens=over_tokens,
                    over_negative=over_negative,
                    reward=reward,
                    reward_change=reward_change,
                )
            )
        return rows


def _shares(
    bad_G: np.ndarray,
    tokens_G: np.ndarray,
    negative_G: np.ndarray,
    *,
    prompts: int,
    advantages: bool,
) -> tuple[Estimate, Estimate]:
    """Bad updates over tokens with A ≠ 0, and over those with A < 0."""
    over_negative = grouped_share(bad_G, negative_G, prompts)
    if not advantages:
        return _NO_ADVANTAGES, over_negative
    return grouped_share(bad_G, tokens_G, prompts), over_negative


def _correlations(by_step: Sequence[BadUpdatesOfStep]) -> list[StepCorrelation]:
    """Pearson correlations over steps between the share of bad updates and the reward and its
    changes.
    """
    negative = _values([row.over_negative for row in by_step])
    tokens = _values([row.over_tokens for row in by_step])
    reward = _values([row.reward for row in by_step])
    rows = []
    for name, bad in (("tokens with A < 0", negative), ("tokens with A ≠ 0", tokens)):
        pairs = (
            ("reward", bad, reward),
            ("change of the reward to the next step", bad[:-1], np.diff(reward)),
            ("size of that change", bad[:-1], np.abs(np.diff(reward))),
        )
        for other, x, y in pairs:
            measured = ~np.isnan(x) & ~np.isnan(y)
            rows.append(
                StepCorrelation(
                    of=f"bad updates among {name}",
                    with_=other,
                    steps=int(measured.sum()),
                    estimate=series_correlation(x[measured], y[measured]),
                )
            )
    return rows


def _values(estimates: Sequence[Estimate]) -> np.ndarray:
    return np.array([estimate.value for estimate in estimates], dtype=np.float64)
