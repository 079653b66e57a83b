"""Bad updates: a negative sample's token that has already lost much probability is pushed down further.

A < 0 and μ − π ≥ δ (arXiv 2602.04879, figure 5). The paper does not say over which tokens the share is taken, so both
are given: tokens with A ≠ 0, and tokens with A < 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.clipping.breakdown import StepSums
from mismatch_cli.metrics.clipping.masked import Masked
from mismatch_cli.metrics.correlation import series_correlation
from mismatch_cli.metrics.estimate import SIGNED, Estimate, grouped_ratio, grouped_share
from mismatch_cli.metrics.hashing import GROUPS
from mismatch_cli.metrics.histograms import count_into

BAD_DELTA = 0.5
DELTAS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, BAD_DELTA, 0.6, 0.7, 0.8, 0.9)
_FLOAT32_DELTAS = np.array(DELTAS, dtype=np.float32)
_COLUMNS = ("tokens", "negative", "bad", "reward", "graded")
_MOST_STEPS = 2**12


class BadUpdates(Accumulator):
    """Counts of μ − π ≥ δ over negative tokens for a sweep of δ, and for δ = 0.5 by step, beside the reward."""

    def __init__(self) -> None:
        self.above = np.zeros((GROUPS, len(DELTAS) + 1), dtype=np.int64)  # column i: exactly i deltas are reached
        self.judged = np.zeros((2, GROUPS), dtype=np.int64)  # tokens with A ≠ 0, and with A < 0
        self.steps = StepSums(len(_COLUMNS), _MOST_STEPS)

    def update(self, judged: Masked) -> None:
        index_U = np.flatnonzero(judged.negative_N & (judged.difference_N <= -_FLOAT32_DELTAS[0]))
        reached_U = np.searchsorted(_FLOAT32_DELTAS, -judged.difference_N[index_U], side="right")
        count_into(self.above, judged.group_N[index_U] * (len(DELTAS) + 1) + reached_U)
        total, group_S = judged.gaps.responses.sum, judged.gaps.group_S
        judged_S, negative_S = total(judged.judged_N), total(judged.negative_N)
        for row, count_S in enumerate((judged_S, negative_S)):
            np.add.at(self.judged[row], group_S, count_S.astype(np.int64))
        bad_U = index_U[judged.difference_N[index_U] <= -np.float32(BAD_DELTA)]
        bad_S = np.bincount(judged.response_N[bad_U], minlength=judged.num_responses)
        here = slice(judged.gaps.first, judged.gaps.last)
        step_S = judged.gaps.batch.step_S.numpy()[here]
        self.steps.update(step_S, group_S, np.stack([judged_S, negative_S, bad_S, *_rewards(judged, here)], axis=1))

    def result(self, prompts: int, *, advantages: bool) -> dict[str, Any]:
        """`advantages`: whether A is measured; otherwise only the share over tokens asked as if A < 0 has a meaning."""
        reached_GD = self.above[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
        sweep = [
            {"delta": delta, "bad": int(bad_G.sum())}
            | _shares(bad_G, self.judged[0], self.judged[1], prompts, advantages)
            for delta, bad_G in zip(DELTAS, reached_GD.T, strict=True)
        ]
        at_delta = sweep[DELTAS.index(BAD_DELTA)]
        by_step = self._by_step(prompts, advantages)
        return {
            "delta": BAD_DELTA,
            "over_tokens": at_delta["over_tokens"],
            "over_negative": at_delta["over_negative"],
            "sweep": sweep,
            "by_step": by_step,
            "correlations": _correlations(by_step) if advantages and len(by_step) > 2 else [],
        }

    def _by_step(self, prompts: int, advantages: bool) -> list[dict[str, Any]]:
        rows = []
        for first, last, sums_GM in self.steps:
            tokens_G, negative_G, bad_G, reward_G, graded_G = sums_GM.T
            tokens = tokens_G if advantages else negative_G  # otherwise every token was asked once for each sign
            counts = {"tokens": int(tokens.sum()), "negative": int(negative_G.sum()), "bad": int(bad_G.sum())}
            rows.append(
                {"first": first, "last": last} | counts | _shares(bad_G, tokens_G, negative_G, prompts, advantages)
                | {"reward": grouped_ratio(reward_G, graded_G, prompts, SIGNED).to_dict()}
            )  # fmt: skip
        for before, row in zip([None, *rows], rows, strict=False):
            row["reward_change"] = None if before is None else _difference(before["reward"], row["reward"])
        return rows


def _difference(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    return None if None in (before["value"], after["value"]) else after["value"] - before["value"]


def _rewards(judged: Masked, here: slice) -> tuple[np.ndarray, np.ndarray]:
    """The reward of each response and whether it has one."""
    reward = judged.gaps.batch.reward_S
    reward_S = np.full(judged.num_responses, np.nan) if reward is None else reward.numpy()[here]
    return np.nan_to_num(reward_S, nan=0.0), ~np.isnan(reward_S)


def _shares(
    bad_G: np.ndarray, tokens_G: np.ndarray, negative_G: np.ndarray, prompts: int, advantages: bool
) -> dict[str, Any]:
    over_tokens = grouped_share(bad_G, tokens_G, prompts) if advantages else Estimate(None, note="no advantages")
    return {"over_tokens": over_tokens.to_dict(), "over_negative": grouped_share(bad_G, negative_G, prompts).to_dict()}


def _correlations(by_step: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pearson correlations over steps, between the share of bad updates and the reward, and how it fluctuates."""
    reward = np.array([_value(row["reward"]) for row in by_step])
    rows = []
    for key, name in (("over_negative", "tokens with A < 0"), ("over_tokens", "tokens with A ≠ 0")):
        bad = np.array([_value(row[key]) for row in by_step])
        pairs = (
            ("reward", bad, reward),
            ("change of the reward to the next step", bad[:-1], np.diff(reward)),
            ("size of that change", bad[:-1], np.abs(np.diff(reward))),
        )
        for other, x, y in pairs:
            known = ~np.isnan(x) & ~np.isnan(y)
            estimate = series_correlation(x[known], y[known])
            rows.append(
                {"of": f"bad updates among {name}", "with": other, "steps": int(known.sum())} | estimate.to_dict()
            )
    return rows


def _value(estimate: dict[str, Any]) -> float:
    return np.nan if estimate["value"] is None else estimate["value"]
