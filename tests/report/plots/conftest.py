"""A synthetic training trace, judged by the real algorithms: engine noise, staleness, tokens
that lose much.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from mismatch_cli.metrics.clipping.approximation import Approximations
from mismatch_cli.metrics.clipping.bad_updates import (
    BadUpdatesAtDelta,
    BadUpdatesOfStep,
    BadUpdatesSummary,
)
from mismatch_cli.metrics.clipping.blocked_rows import (
    AlgorithmRow,
    BlockedInBin,
    BlockedInSteps,
    BySign,
    JudgedCounts,
    LostUpdate,
)
from mismatch_cli.metrics.clipping.breakdown import JUDGED_ROW
from mismatch_cli.metrics.clipping.overlap import OverlapCounts
from mismatch_cli.metrics.clipping.sweeps import CapRow, SweepTables, ThresholdRow
from mismatch_cli.metrics.clipping.token_table import TokensBySign
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.rules.policies import Policies
from mismatch_cli.studies.algorithm_support import AvailableColumns
from mismatch_cli.studies.clipping import ClippingPlotData
from mismatch_cli.studies.clipping_result import ClippingResult
from mismatch_cli.trace.origin import About
from tests.rules.trust_regions.cases import keep_T

LENGTH = 50  # tokens of a response
MU_EDGES = (0.0, 1e-4, 1e-3, 0.01, 0.05, 0.15, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
NOTHING = Estimate(None, note="not measured")
SUBJECT = "Qwen/Qwen3-1.7B-Base · vLLM bfloat16 against Hugging Face bfloat16 · 12 steps"


@dataclass
class Tokens:
    """Flat tokens, step after step; log-probabilities in nats."""

    policies: Policies
    advantage_T: np.ndarray
    entropy_T: np.ndarray
    step_T: np.ndarray

    @property
    def mu_T(self) -> np.ndarray:
        return np.exp(self.policies.rollout)

    @property
    def pi_T(self) -> np.ndarray:
        return np.exp(self.policies.trainer)


def make_tokens(responses: int = 400, steps: int = 8, seed: int = 0) -> Tokens:
    """The logit of a token moves with noise, with its advantage, and more with every step."""
    rng = np.random.default_rng(seed)
    count = responses * LENGTH
    step_T = np.repeat(np.arange(responses) * steps // responses, LENGTH)
    near_one, spread = -(rng.exponential(1, count) ** 3) * 2e-3, np.log(rng.beta(0.9, 0.9, count))
    kind = rng.choice(3, count, p=[0.7, 0.22, 0.08])
    log_mu = np.clip(np.choose(kind, [near_one, spread, -rng.gamma(3.0, 1.6, count)]), -13.8, -1e-6)
    advantage = np.repeat(rng.choice([-0.6, 0.4, 0.0], responses, p=[0.35, 0.5, 0.15]), LENGTH)
    noise = rng.standard_t(3, count) * 0.03
    stale = (0.3 + 0.7 * step_T / steps) * (
        0.1 * rng.standard_t(2.5, count) + 0.08 * np.sign(advantage)
    )
    # Now and then a token that should fall falls very far, more often with every step
    fallen = np.where(rng.random(count) < 0.012 * (advantage < 0) * (1 + step_T) / steps, -3.5, 0.0)

    def moved(x: np.ndarray) -> np.ndarray:
        logp = log_mu + x - np.log1p(np.exp(log_mu) * np.expm1(x))
        return np.minimum(logp, -1e-9).astype(np.float32)

    columns = (
        moved(np.zeros(count)),
        moved(noise + stale + fallen),
        moved(noise),
        np.arange(0, count + 1, LENGTH),
    )
    entropy_T = 0.1 - 0.6 * log_mu * rng.uniform(0.4, 1.6, count)
    policies = Policies(*columns, entropy_T=entropy_T)
    return Tokens(policies, advantage.astype(np.float32), entropy_T, step_T)


def estimate(value: float, tokens: float) -> Estimate:
    """An estimate with the interval of a share, twice as wide as for independent tokens."""
    if not tokens or not np.isfinite(value):
        return NOTHING
    width = 2 * 1.96 * np.sqrt(max(value * (1 - min(value, 1)), 1e-9) / tokens)
    return Estimate(float(value), float(max(value - width, 0)), float(value + width))


def share(flags_T: np.ndarray) -> Estimate:
    return estimate(float(flags_T.mean()) if len(flags_T) else np.nan, len(flags_T))


def mean(values_T: np.ndarray) -> Estimate:
    if not len(values_T):
        return NOTHING
    value, width = float(values_T.mean()), float(2 * values_T.std() / np.sqrt(len(values_T)))
    return Estimate(value, value - width, value + width)


def by_sign(blocked_T: np.ndarray, advantage_T: np.ndarray) -> BySign:
    return BySign(
        share(blocked_T[advantage_T != 0]),
        share(blocked_T[advantage_T > 0]),
        share(blocked_T[advantage_T < 0]),
    )


def algorithm_row(algorithm: Algorithm, blocked_T: np.ndarray, tokens: Tokens) -> AlgorithmRow:
    advantage_T, mu_T = tokens.advantage_T, tokens.mu_T
    by_step = []
    for step in map(int, np.unique(tokens.step_T)):
        here = tokens.step_T == step
        gone_T, passed_T = here & blocked_T, here & ~blocked_T
        means = [mean(mu_T[gone_T]), mean(mu_T[passed_T])]
        means += [mean(tokens.entropy_T[gone_T]), mean(tokens.entropy_T[passed_T])]
        blocked = by_sign(blocked_T[here], advantage_T[here])
        by_step.append(BlockedInSteps(step, step, int(here.sum()), blocked, NOTHING, *means))
    by_mu = []
    for low, high in itertools.pairwise(MU_EDGES):
        here = (mu_T >= low) & (mu_T < high)
        blocked = by_sign(blocked_T[here], advantage_T[here])
        by_mu.append(BlockedInBin(low, high, int(here.sum()), blocked))
    return AlgorithmRow(
        name=algorithm.name,
        anchor=algorithm.anchor,
        blocked_when=algorithm.formulas[0],
        weight=algorithm.formulas[1],
        source=algorithm.source,
        weighs_by_ratio=algorithm.weighs_by_ratio,
        blocked=by_sign(blocked_T, advantage_T),
        lost=LostUpdate(*[NOTHING] * 5),
        blocked_rare=NOTHING,
        responses_touched=NOTHING,
        mu_blocked=NOTHING,
        mu_kept=NOTHING,
        entropy_blocked=NOTHING,
        entropy_kept=NOTHING,
        by_mu=by_mu,
        by_position=(),
        by_step=by_step,
        blocked_tokens=TokensBySign((), ()),
    )


def overlap(names: Sequence[str], blocked_TA: np.ndarray) -> OverlapCounts:
    both = blocked_TA.T.astype(np.int64) @ blocked_TA
    either = both.diagonal()[:, None] + both.diagonal() - both
    jaccard = []
    for both_A, either_A in zip(both, either, strict=True):
        with np.errstate(invalid="ignore"):
            jaccard.append(list(map(estimate, both_A / either_A, either_A)))
    only_row = both.diagonal()[:, None] - both
    return OverlapCounts(list(names), jaccard, both.tolist(), only_row.tolist(), ())


def same_mask(names: Sequence[str], blocked_TA: np.ndarray) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    _, group_A = np.unique(blocked_TA, axis=1, return_inverse=True)
    for name, group in zip(names, group_A.tolist(), strict=True):
        groups.setdefault(group, []).append(name)
    return [groups[group] for group in sorted(groups) if len(groups[group]) > 1]


def bad_updates(tokens: Tokens) -> BadUpdatesSummary:
    drop_T, advantage_T = tokens.mu_T - tokens.pi_T, tokens.advantage_T
    negative_T, judged_T = advantage_T < 0, advantage_T != 0

    def shares(bad_T: np.ndarray, here_T: np.ndarray) -> tuple[int, Estimate, Estimate]:
        """Bad updates among these tokens, and their shares of those with A ≠ 0 and with A < 0."""
        bad = int((bad_T & here_T).sum())
        return bad, share(bad_T[here_T & judged_T]), share(bad_T[here_T & negative_T])

    bad_T, everywhere = negative_T & (drop_T >= 0.5), np.ones(len(drop_T), dtype=bool)
    rng = np.random.default_rng(1)
    steps = np.unique(tokens.step_T)
    by_step = []
    for step in map(int, steps):
        here_T = tokens.step_T == step
        reward = estimate(0.35 + 0.3 * step / len(steps) + rng.normal(0, 0.015), 5000)
        counts = int(here_T.sum()), int((here_T & negative_T).sum())
        of_step = shares(bad_T, here_T)
        by_step.append(BadUpdatesOfStep(step, step, *counts, *of_step, reward, None))
    deltas = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    sweep = [BadUpdatesAtDelta(d, *shares(negative_T & (drop_T >= d), everywhere)) for d in deltas]
    _, over_tokens, over_negative = shares(bad_T, everywhere)
    return BadUpdatesSummary(0.5, over_tokens, over_negative, sweep, by_step, ())


def sweeps(tokens: Tokens) -> SweepTables:
    compared = tokens.policies.compare(TABLE["pg-is"].weight[0].ratio)
    ratio_T, sign_T = compared.ratio_T.astype(np.float64), np.sign(tokens.advantage_T)
    amount_T = ratio_T * np.abs(tokens.advantage_T)

    def rows(
        distance_T: np.ndarray, thresholds: np.ndarray, factor: float = 1.0
    ) -> list[ThresholdRow]:
        lines = []
        for threshold in map(float, thresholds):
            blocked_T = distance_T * sign_T > threshold / factor
            lost = estimate(amount_T[blocked_T].sum() / amount_T.sum(), len(sign_T))
            lines.append(ThresholdRow(threshold, share(blocked_T), lost))
        return lines

    def at_cap(cap: float) -> CapRow:
        lost = np.maximum(amount_T - cap * amount_T / ratio_T, 0).sum() / amount_T.sum()
        return CapRow(cap, share(ratio_T > cap), estimate(lost, len(ratio_T)))

    kl_T = np.copysign(compared.binary_kl_T, compared.difference_T)
    tv_T, probabilities = compared.difference_T, np.geomspace(0.005, 0.8, 20)
    families = {
        "ratio_clip": rows(ratio_T - 1, np.geomspace(0.01, 10, 22)),
        "binary_tv": rows(tv_T, probabilities),
        "binary_kl": rows(kl_T, np.geomspace(1e-4, 2, 20)),
        "top_k_tv": rows(tv_T, probabilities, 1.4),
        "top_k_kl": rows(kl_T, np.geomspace(1e-4, 2, 20), 1.7),
    }
    caps = list(map(at_cap, map(float, np.geomspace(1.1, 100, 16))))
    return SweepTables(families=families, cap=caps)


def make_data(
    tokens: Tokens,
    algorithms: Sequence[Algorithm],
    compared: Sequence[Algorithm] = (),
    *,
    advantages: bool = True,
) -> ClippingPlotData:
    compared = tuple(compared) or tuple(algorithms[:2])
    blocked, rows = [], []
    for algorithm in algorithms:
        blocked_T = ~keep_T(algorithm, tokens.policies, tokens.advantage_T)
        blocked.append(blocked_T)
        rows.append(algorithm_row(algorithm, blocked_T, tokens))
    blocked_TA = np.stack(blocked, axis=1)
    names = [algorithm.name for algorithm in algorithms]
    judged = int((tokens.advantage_T != 0).sum())
    result = ClippingResult(
        traces=(),
        arguments=(),
        compared=[algorithm.name for algorithm in compared],
        about=About(),
        has=AvailableColumns(
            advantages=advantages,
            rewards=advantages,
            entropy=True,
            full=False,
            top_k=0,
            recomputed="measured",
            lacks_recomputed="",
            topk_recomputed=False,
            average=False,
            batches=True,
        ),
        skipped=(),
        counts=JudgedCounts(judged, 0, 0, 0, 0, 0, 0, 1, 1, True, 1, {}),
        algorithms=rows,
        same_mask=same_mask(names, blocked_TA),
        overlap=overlap(names, blocked_TA),
        bad_updates=bad_updates(tokens),
        sweeps=sweeps(tokens),
        equivalents=(),
        approximation=Approximations(None, 0, (), ()),
        theory=None,
        same_strictness=(),
    )
    signs_T = [tokens.advantage_T]
    if not advantages:
        signs_T = [np.full_like(tokens.advantage_T, sign) for sign in (1, -1)]
    samples = [sample(tokens, algorithms, advantage_T) for advantage_T in signs_T]
    return ClippingPlotData(result, SUBJECT, compared, np.concatenate(samples))


def sample(tokens: Tokens, algorithms: Sequence[Algorithm], advantage_T: np.ndarray) -> np.ndarray:
    """The judged tokens, as `JudgedSample` holds them."""
    rows = np.zeros(len(advantage_T), dtype=JUDGED_ROW)
    for policy in ("rollout", "trainer", "recomputed"):
        rows[f"logp_{policy}"] = getattr(tokens.policies, policy)
    rows["advantage"] = advantage_T
    for bit, algorithm in enumerate(algorithms):
        blocked_T = ~keep_T(algorithm, tokens.policies, advantage_T)
        rows["blocked_by"] |= blocked_T.astype(np.uint64) << np.uint64(bit)
    return rows[rows["advantage"] != 0]


PAIR = [TABLE["grpo-clip-higher"], TABLE["dppo-binary-tv"]]
MANY = [algorithm for algorithm in TABLE.values() if not algorithm.needs_top_k]


@pytest.fixture(scope="session")
def tokens() -> Tokens:
    return make_tokens()


@pytest.fixture(scope="session")
def data_of() -> Callable[..., ClippingPlotData]:
    return make_data


@pytest.fixture(scope="session")
def many(tokens: Tokens) -> ClippingPlotData:
    return make_data(tokens, MANY, PAIR)
