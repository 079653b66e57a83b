"""What an algorithm is, masks × weight, and the one place where an update's coefficient is formed.

    coefficient = keep · weight · A; the gradient of every algorithm's loss is −Σ scale · coefficient · ∇log π

The scale is the aggregation's (`rl/learner.py`) and nobody else's: a coefficient never divides by a length.

r = trainer/rollout, r′ = trainer/recomputed, ρ = recomputed/rollout (the engine gap); A is the token's advantage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property, reduce
from math import inf
from operator import and_, mul
from types import ModuleType

import numpy as np

from mismatch_cli import trust_regions, weights
from mismatch_cli.arrays import Array, copied, filled, namespace, silent, without_gradient
from mismatch_cli.errors import MismatchError
from mismatch_cli.policies import TRAINER_ROLLOUT, Policies, Ratio
from mismatch_cli.trust_regions import Decision, Threshold


@dataclass(frozen=True)
class Mask:
    """A trust region, the two policies it compares, and the thresholds that differ from its own defaults."""

    region: str  # a name in trust_regions/, or the path of a user's file
    ratio: Ratio = TRAINER_ROLLOUT
    chosen: tuple[tuple[str, Threshold], ...] = ()

    @property
    def module(self) -> ModuleType:
        return trust_regions.find(self.region)

    @cached_property
    def thresholds(self) -> dict[str, Threshold]:
        """Every threshold by name, as it will be used."""
        return trust_regions.thresholds(self.module) | dict(self.chosen)

    @property
    def formula(self) -> str:
        """When a token is blocked, with the values of its letters behind it: `… > δ (δ = 0.15)`."""
        values = {name: f"{value:g}" if isinstance(value, float) else value for name, value in self.thresholds.items()}
        shown = values | trust_regions.symbols(self.module)
        words = getattr(self.module, "FORMULA", f"as {self.region} decides").format(**self.ratio.symbols, **shown)
        return f"{words} ({self.settings})" if self.settings else words

    @property
    def settings(self) -> str:
        """The thresholds that have a letter, both sides of one together: `ε = 0.2 / 0.28`."""
        sides: dict[str, list[str]] = {}
        for name, symbol in trust_regions.symbols(self.module).items():
            sides.setdefault(symbol.partition("_")[0], []).append(f"{self.thresholds[name]:g}")
        return ", ".join(f"{letter} = {' / '.join(dict.fromkeys(values))}" for letter, values in sides.items())

    @silent
    def decide(self, policies: Policies, advantage_T: Array) -> Decision:
        """What the trust region says of each token; a token without advantage has no update to block, and is kept."""
        if self.region.endswith(".py"):
            decision = self._ask_own_file(policies, advantage_T)
        else:
            decision = self.module.trust_region(policies.compare(self.ratio), advantage_T, **self.thresholds)
        return Decision(decision.keep_T | (advantage_T == 0), decision.statistic_T)

    def _ask_own_file(self, policies: Policies, advantage_T: Array) -> Decision:
        """On copies: what it changes in place must not reach the other algorithms, nor the trace in memory."""
        copies = policies.copied(topk=getattr(self.module, "READS_TOP_K", False)).compare(self.ratio)
        with trust_regions.own_file(self.region, error_class=MismatchError):
            answer: Decision = self.module.trust_region(copies, copied(advantage_T), **self.thresholds)
            why = trust_regions.unusable(answer, advantage_T)
        if why:
            raise MismatchError(
                f"{self.region} must return Decision(keep_T, statistic_T), where keep_T is one bool for each token, "
                f"and statistic_T one number. {why} Repair it."
            )
        return answer


@dataclass(frozen=True)
class Factor:
    """A function of two policies in the weight of an update, and its parameters that differ from its own defaults."""

    ratio: Ratio
    function: str = "capped-ratio"  # a name in weights/
    chosen: tuple[tuple[str, float], ...] = ()

    @property
    def module(self) -> ModuleType:
        return weights.find(self.function)

    @property
    def parameters(self) -> dict[str, float]:
        """Every parameter by name, as it will be used."""
        return weights.parameters(self.module) | dict(self.chosen)

    @property
    def bounds(self) -> tuple[float, float]:
        """What holds a ratio from below and from above; 0 and ∞ where nothing does."""
        return self.parameters.get("floor", 0.0), self.parameters.get("cap", inf)

    @property
    def bounded(self) -> bool:
        return self.bounds != (0.0, inf)

    def with_parameters(self, **chosen: float) -> Factor:
        """The same with other parameters; those at their defaults are not named."""
        own, defaults = self.parameters | chosen, weights.parameters(self.module)
        return replace(self, chosen=tuple((name, value) for name, value in own.items() if value != defaults[name]))

    @silent
    def weight_T(self, policies: Policies, advantage_T: Array) -> Array:
        """What it says of each token."""
        compared = policies.compare(self.ratio)
        found: Array = self.module.weight(compared, self.ratio.level, advantage_T, **self.parameters)
        return found

    def __str__(self) -> str:
        values = {name: f"{value:g}" for name, value in self.parameters.items()}
        text = self.module.formula(self.parameters) if hasattr(self.module, "formula") else self.module.FORMULA
        return str(text.format(**self.ratio.symbols | {"r": str(self.ratio)}, **values))


def capped(ratio: Ratio, floor: float = 0.0, cap: float = inf) -> Factor:
    """The ratio between two bounds."""
    return Factor(ratio).with_parameters(floor=floor, cap=cap)


@dataclass(frozen=True)
class Algorithm:
    """A row of the table: a token counts when every mask keeps it, with the product of the factors as its weight."""

    name: str
    masks: tuple[Mask, ...]
    weight: tuple[Factor, ...]
    source: str

    @property
    def needs_recomputed(self) -> bool:
        ratios = [mask.ratio for mask in self.masks] + [factor.ratio for factor in self.weight]
        return any("recomputed" in (ratio.current, ratio.anchor) for ratio in ratios)

    @property
    def needs_top_k(self) -> int:
        """The number of top-K columns that a mask reads; 0 for none."""
        asked = [mask.thresholds["k"] for mask in self.masks if getattr(mask.module, "READS_TOP_K", False)]
        return max((int(k) for k in asked), default=0)

    @property
    def anchor(self) -> str:
        """The policy whose distance from the trainer is limited: rollout, recomputed, both, or none.

        By masks, and by weights that fall off; a cap lets a token go as far as it likes.
        """
        ratios = [mask.ratio for mask in self.masks]
        ratios += [factor.ratio for factor in self.weight if factor.function != "capped-ratio"]
        anchors = {ratio.anchor if ratio.current == "trainer" else "rollout" for ratio in ratios}
        return "none" if not anchors else anchors.pop() if len(anchors) == 1 else "both"

    @property
    def limiting(self) -> Algorithm:
        """The same without the masks on the engine gap, which say nothing about the trainer."""
        return replace(self, masks=tuple(mask for mask in self.masks if mask.ratio.current == "trainer"))

    @property
    def weighs_by_ratio(self) -> bool:
        """Whether the weight is r, perhaps held between bounds: then what a cap takes away can be told from a mask."""
        return len(self.weight) == 1 and replace(self.weight[0], chosen=()) == Factor(TRAINER_ROLLOUT)

    @property
    def formulas(self) -> tuple[str, str]:
        """When a token is blocked, and the weight of one that is not."""
        blocked = "; or ".join(mask.formula for mask in self.masks) or "never"
        return blocked, " · ".join(map(str, self.weight)) or "1"


def keep_T(algorithm: Algorithm, policies: Policies, advantage_T: Array) -> Array:
    """Which tokens the masks of an algorithm keep: bool, True where there is no advantage."""
    if not algorithm.masks:
        xp = namespace(advantage_T)
        return xp.ones_like(advantage_T, dtype=xp.bool)
    return reduce(and_, [mask.decide(policies, advantage_T).keep_T for mask in algorithm.masks])


@silent
def weight_T(algorithm: Algorithm, policies: Policies, advantage_T: Array) -> Array:
    """The product of the factors; 1 without factors."""
    if not algorithm.weight:
        return namespace(policies.trainer).ones_like(policies.trainer)
    return reduce(mul, [factor.weight_T(policies, advantage_T) for factor in algorithm.weight])


@silent
def coefficient_T(algorithm: Algorithm, policies: Policies, advantage_T: Array) -> Array:
    """keep · weight · A: the gradient of the algorithm's objective is Σ scale · coefficient · ∇log π_trainer.

    A weight that is a geometric mean over the response (GSPO) stands at each of its tokens. The 1/|y| that ∇ of a mean
    brings along is the scale of `sequence-mean`, for which GSPO is published; in the other aggregations the sum over
    |y| tokens takes it back, as in TRL. Blocked tokens are exactly 0, also where the weight is infinite. Without
    gradient; the dtype of the log-probs.
    """
    with without_gradient(advantage_T):
        coefficient = weight_T(algorithm, policies, advantage_T) * advantage_T
        kept_T = keep_T(algorithm, policies, advantage_T) & (advantage_T != 0)
        return filled(namespace(coefficient).astype(coefficient, policies.trainer.dtype), ~kept_T, 0.0)


@cache
def judges_single_tokens(algorithm: Algorithm) -> bool:
    """Whether a token's coefficient follows from its own log-probs: not from its response, nor from other tokens.

    Asked of the algorithm itself: the same tokens as one response and as many must get the same coefficients.
    """
    if algorithm.needs_top_k:
        return False
    generator = np.random.default_rng(0)
    size_2T = 10 ** (-5 * generator.random((2, 64)))  # nats, from 1e-5 to 1: inside and outside of bands
    rollout_T, advantage_T = -5 - generator.random(64), generator.random(64) - 0.5
    recomputed_T, trainer_T = rollout_T + np.cumsum(size_2T * generator.standard_normal((2, 64)), axis=0)
    coefficients = [
        coefficient_T(algorithm, Policies(rollout_T, trainer_T, recomputed_T, offset_S1), advantage_T)
        for offset_S1 in (np.arange(65), np.array([0, 64]))
    ]
    return np.array_equal(*coefficients)
