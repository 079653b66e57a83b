"""Defines an algorithm, masks × weight, and computes the coefficient of an update, only here.

    coefficient = keep · weight · A + term; the gradient of every algorithm's loss is −Σ scale · coefficient · ∇log π

The scale belongs to the aggregation (`train/learner.py`) alone: a coefficient never divides by a
length.

r = trainer/rollout, r′ = trainer/recomputed, ρ = recomputed/rollout (the engine gap); A is the
token's advantage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property, reduce
from operator import and_, mul, or_
from typing import Any

import numpy as np

from mismatch_cli.base.arrays import Array, fill_where, namespace, silent, without_gradient
from mismatch_cli.rules.algorithms.masks_and_factors import Factor, Mask, Rule
from mismatch_cli.rules.policies import TRAINER_ROLLOUT, Policies
from mismatch_cli.rules.response_layout import ResponseLayout


@dataclass(frozen=True)
class Algorithm:
    """A row of the table: a token counts if every mask keeps it, with the product of the factors as
    its weight.

    `term` is added whatever the masks and the advantage: it pulls the trainer to the other policy,
    even at A = 0.
    """

    name: str
    masks: tuple[Mask, ...]
    weight: tuple[Factor, ...]
    source: str
    term: Factor | None = None

    @property
    def factors(self) -> tuple[Factor, ...]:
        """The factors of the weight, then the term if it has one."""
        return self.weight if self.term is None else (*self.weight, self.term)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Every mask and factor of the algorithm, and its term."""
        return (*self.masks, *self.factors)

    def with_rules(self, masks: tuple[Mask, ...], factors: tuple[Factor, ...]) -> Algorithm:
        """The algorithm with other masks, and as many other `factors` as it has."""
        term = None if self.term is None else factors[-1]
        return replace(self, masks=masks, weight=factors[: len(self.weight)], term=term)

    @cached_property
    def batch_rules(self) -> tuple[Rule, ...]:
        """The rules that look at whole batches, or at all samples of a prompt, before they
        decide.
        """
        return tuple(rule for rule in self.rules if rule.scope is not None)

    @cached_property
    def batch_masks(self) -> tuple[Mask, ...]:
        """The masks among the batch rules, which decide what tokens are blocked."""
        return tuple(mask for mask in self.masks if mask.scope is not None)

    @property
    def looks_at_groups(self) -> bool:
        """Whether it must see all samples of a prompt at once."""
        return any(rule.scope == "group" for rule in self.batch_rules)

    @property
    def needs_recomputed(self) -> bool:
        return any("recomputed" in rule.ratio.policies for rule in self.rules)

    @property
    def needs_average(self) -> bool:
        return any("average" in rule.ratio.policies for rule in self.rules)

    @property
    def needs_entropy(self) -> bool:
        return any(getattr(rule.module, "READS_ENTROPY", False) for rule in self.rules)

    @property
    def needs_top_k(self) -> int:
        """The number of top-K columns that a mask reads; 0 for none."""
        most = 0
        for mask in self.masks:
            if getattr(mask.module, "READS_TOP_K", False):
                most = max(most, int(mask.parameters["k"]))
        return most

    @property
    def anchor(self) -> str:
        """The policy whose distance from the trainer is limited: rollout, recomputed, average,
        both, or none.

        Masks, weights that fall off and terms limit it; a cap does not limit how far a token moves.
        """
        limits: list[Rule] = list(self.masks)
        limits += [factor for factor in self.weight if factor.function != "capped-ratio"]
        if self.term is not None:
            limits.append(self.term)
        anchors = set()
        for rule in limits:
            # A limit on ρ, the gap between recomputed and rollout, is one on the rollout's distance
            anchors.add(rule.ratio.anchor if rule.ratio.current == "trainer" else "rollout")
        if len(anchors) > 1:
            return "both"
        return anchors.pop() if anchors else "none"

    @property
    def limiting(self) -> Algorithm:
        """The algorithm without masks on the engine gap, which do not limit the trainer."""
        masks = tuple(mask for mask in self.masks if mask.ratio.current == "trainer")
        return replace(self, masks=masks)

    @property
    def is_of_means(self) -> bool:
        """Whether its objective is published as a mean over responses, whose gradient contains a
        1/|y|: that of `sequence-mean`.
        """
        return any(
            factor.ratio.level == "mean" or getattr(factor.module, "OF_MEANS", False)
            for factor in self.weight
        )

    @property
    def weighs_by_ratio(self) -> bool:
        """Whether the weight is r, perhaps with bounds: only then can a cap be told from a mask."""
        if len(self.weight) != 1:
            return False
        unbounded = replace(self.weight[0], chosen=())
        return unbounded == Factor(TRAINER_ROLLOUT)

    @property
    def formulas(self) -> tuple[str, str]:
        """When a token is blocked, and the weight of the others with the term that is always
        added.
        """
        blocked = "; or ".join(mask.formula for mask in self.masks) or "never"
        weight = " · ".join(map(str, self.weight)) or "1"
        if self.term:
            weight = f"{weight}, and {self.term} is added to weight · A"
        return blocked, weight


def keep_T(algorithm: Algorithm, policies: Policies, advantage_T: Array) -> Array:
    """Which tokens an algorithm's masks keep: bool, True without an advantage."""
    if not algorithm.masks:
        xp = namespace(advantage_T)
        return xp.ones_like(advantage_T, dtype=xp.bool)
    return reduce(and_, [mask.decide(policies, advantage_T).keep_T for mask in algorithm.masks])


@silent
def weight_T(algorithm: Algorithm, policies: Policies, advantage_T: Array) -> Array:
    """The product of the factors; 1 without factors, and 0 where one is 0 and another infinite.

    That is the limit of frameworks' clamps: ρ = 0 where the trainer excluded the token at the
    weights that sampled, and r′ is infinite where it no longer does.
    """
    if not algorithm.weight:
        return namespace(policies.trainer).ones_like(policies.trainer)
    factors = [factor.weight_T(policies, advantage_T) for factor in algorithm.weight]
    if len(factors) == 1:
        return factors[0]
    zero_T = reduce(or_, [factor_T == 0 for factor_T in factors])
    infinite_T = reduce(or_, [namespace(factor_T).isinf(factor_T) for factor_T in factors])
    return fill_where(reduce(mul, factors), zero_T & infinite_T, 0.0)


@silent
def coefficient_T(algorithm: Algorithm, policies: Policies, advantage_T: Array) -> Array:
    """keep · weight · A + term: the gradient of the algorithm's objective is Σ scale · coefficient
    · ∇log π_trainer.

    A weight that is a geometric mean over the response (GSPO) applies to each of its tokens. The
    1/|y| from ∇ of a mean is the scale of `sequence-mean`, for which GSPO is published; in other
    aggregations the sum over |y| tokens cancels it, as in TRL. Blocked tokens are exactly 0 (plus a
    term), even if the weight is infinite. Without gradient; in the dtype of the log-probs.
    """
    with without_gradient(advantage_T):
        coefficient = weight_T(algorithm, policies, advantage_T) * advantage_T
        # Replaced, not multiplied: ∞ · 0 of a blocked token with an infinite weight is NaN
        counts_T = keep_T(algorithm, policies, advantage_T) & (advantage_T != 0)
        coefficient = fill_where(coefficient, ~counts_T, 0.0)
        if algorithm.term is not None:
            term_T = algorithm.term.weight_T(policies, advantage_T)
            # With an excluded token in the response the term is infinite, and has no gradient
            infinite_T = namespace(term_T).isinf(term_T)
            coefficient = coefficient + fill_where(term_T, infinite_T, 0.0)
        return namespace(coefficient).astype(coefficient, policies.trainer.dtype)


@cache
def reads_single_tokens(algorithm: Algorithm) -> bool:
    """Whether a token's coefficient depends only on its own log-probs, not on its response or other
    tokens.

    This is tested on the algorithm itself: its rules must not look at responses, and a user's mask
    must give tokens the same coefficients as one response and as many.
    """
    if algorithm.needs_top_k or algorithm.needs_entropy or algorithm.batch_rules:
        return False
    generator = np.random.default_rng(0)
    # Gaps from 1e-5 to 1 nat are inside and outside every mask's band
    size_2T = 10 ** (-5 * generator.random((2, 512)))
    rollout_T = -6 * generator.random(512) ** 3
    advantage_T = generator.random(512) - 0.5
    logp_2T = rollout_T + np.cumsum(size_2T * generator.standard_normal((2, 512)), axis=0)
    recomputed_T, trainer_T = np.minimum(logp_2T, 0)
    coefficients = []
    for offset_S1 in (np.arange(513), np.array([0, 512])):
        policies = Policies(rollout_T, trainer_T, recomputed_T, offset_S1, average=logp_2T[0])
        responses = _WatchedResponses(offset_S1)
        # In place of the cached property, which would make plain ones at its first use
        policies.__dict__["responses"] = responses
        coefficients.append(coefficient_T(algorithm, policies, advantage_T))
        if responses.used:
            return False
    return np.array_equal(*coefficients)


class _WatchedResponses(ResponseLayout):
    """Responses that record whether they are used."""

    used = False

    def __getattribute__(self, name: str) -> Any:
        # Nothing can be learned of a response without these
        if name in ("length_S", "response_T", "position_T"):
            object.__setattr__(self, "used", True)
        return super().__getattribute__(name)
