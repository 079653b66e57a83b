"""The parts of an algorithm: masks and factors of its weight, each a function in its own file, with
parameters.

Some rules look at all samples of a prompt, or at the whole batch. Such a rule first collects what
it needs from each token, settles a few numbers from all of it, and then decides with these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from types import ModuleType
from typing import Any

import numpy as np

from mismatch_cli.base.arrays import Array, as_numpy, convert_like, copied, silent
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.rules import trust_regions, weights
from mismatch_cli.rules.joint_batches import FirstPassError, Scope
from mismatch_cli.rules.policies import TRAINER_ROLLOUT, Policies, Ratio
from mismatch_cli.rules.trust_regions import Decision, Threshold


class Rule(ABC):
    """A function of two policies and the advantage, which may need to see a whole batch first."""

    ratio: Ratio

    @property
    @abstractmethod
    def module(self) -> ModuleType:
        """The module that defines the rule."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The rule's name in trust_regions/ or weights/, or the path of a user's file."""

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, Any]:
        """Every parameter by name, with the value in use."""

    @property
    def scope(self) -> Scope | None:
        """What the rule must see completely before it decides: a batch, or all answers to a
        prompt in a step; None if it decides at once.
        """
        return getattr(self.module, "SCOPE", None)

    @silent
    def collect(self, policies: Policies, advantage_T: Array) -> np.ndarray:
        """The values that it needs from each token, [T, M]."""
        rows_TM = self.module.collect(policies.compare(self.ratio), advantage_T, **self.parameters)
        return as_numpy(rows_TM)

    @silent
    def settle(self, rows_UM: np.ndarray) -> np.ndarray:
        """The numbers that follow from the tokens of one batch, in any order, [F]."""
        numbers = self.module.settle(rows_UM.astype(np.float64), **self.parameters)
        return np.array(numbers, dtype=np.float64)

    def _settled_columns(self, policies: Policies, advantage_T: Array) -> tuple[Array, ...]:
        """The numbers settled for each token's batch, [T, F]; empty if the rule does not look at
        batches.

        Raises a `FirstPassError` if no first pass of this rule has seen the batch.
        """
        if self.scope is None:
            return ()
        batches = policies.batches
        if batches is None or self not in batches.batch_values:
            raise FirstPassError(
                f"{self.name} looks at a whole {self.scope} before it decides, but no first pass "
                "has collected these tokens. In mismatch_cli.rules.algorithms.first_pass, "
                "`FirstPass` makes one over many parts, and `as_one_batch` over tokens that are "
                f"a whole {self.scope}."
            )
        key_S = batches.key_S(self.scope)
        key_T = key_S[as_numpy(policies.responses.response_T)]
        values_TF = batches.batch_values[self].of(key_T)
        return (convert_like(advantage_T, values_TF),)


@dataclass(frozen=True)
class Mask(Rule):
    """A trust region, the two policies it compares, and the thresholds that differ from its own
    defaults.
    """

    region: str  # a name in trust_regions/, or the path of a user's file
    ratio: Ratio = TRAINER_ROLLOUT
    chosen: tuple[tuple[str, Threshold], ...] = ()

    @property
    def module(self) -> ModuleType:
        return trust_regions.find(self.region)

    @property
    def name(self) -> str:
        return self.region

    @cached_property
    def parameters(self) -> dict[str, Threshold]:
        """Every threshold by name, with the value in use."""
        return trust_regions.thresholds(self.module) | dict(self.chosen)

    @property
    def formula(self) -> str:
        """When a token is blocked, followed by the values of the letters: `… > δ (δ = 0.15)`."""
        # A threshold appears as its letter, or by its value if it has none
        thresholds = dict(self.parameters)
        for name, value in thresholds.items():
            if isinstance(value, float):
                thresholds[name] = f"{value:g}"
        thresholds |= trust_regions.symbols(self.module)
        template = getattr(self.module, "FORMULA", f"as {self.region} decides")
        formula = template.format(**self.ratio.symbols, **thresholds)
        return f"{formula} ({self.settings})" if self.settings else formula

    @property
    def settings(self) -> str:
        """The thresholds with a letter, both sides together: `ε = 0.2 / 0.28`."""
        sides: dict[str, list[str]] = {}
        for name, symbol in trust_regions.symbols(self.module).items():
            letter = symbol.partition("_")[0]
            sides.setdefault(letter, []).append(f"{self.parameters[name]:g}")
        settings = []
        for letter, values in sides.items():
            distinct = " / ".join(dict.fromkeys(values))
            settings.append(f"{letter} = {distinct}")
        return ", ".join(settings)

    @silent
    def decide(self, policies: Policies, advantage_T: Array) -> Decision:
        """The trust region's decision for each token; a token without an advantage has no
        update, and is kept.
        """
        if self._is_foreign:
            decision = self._ask_own_file(policies, advantage_T)
        else:
            decision = self._ask(
                policies, advantage_T, self._settled_columns(policies, advantage_T)
            )
        # A token with A = 0, as outside the loss mask, has no update, whatever its statistic.
        # Blocking it would change no gradient, but raise every share of blocked tokens.
        return Decision(decision.keep_T | (advantage_T == 0), decision.statistic_T)

    def collect(self, policies: Policies, advantage_T: Array) -> np.ndarray:
        """The values that it needs from each token, [T, M]."""
        if not self._is_foreign:
            return super().collect(policies, advantage_T)
        with trust_regions.report_errors_of(self.region, error_class=MismatchError):
            rows_TM = super().collect(self._copies(policies), copied(advantage_T))
        if rows_TM.ndim != 2 or len(rows_TM) != len(advantage_T):
            raise MismatchError(
                f"{self.region}: collect must return one row per token, [T, M]. It returned the "
                f"shape {rows_TM.shape} for {len(advantage_T):,} tokens. Fix it."
            )
        return rows_TM

    def settle(self, rows_UM: np.ndarray) -> np.ndarray:
        """The numbers that follow from the tokens of one batch, in any order, [F]."""
        if not self._is_foreign:
            return super().settle(rows_UM)
        with trust_regions.report_errors_of(self.region, error_class=MismatchError):
            values_F = super().settle(rows_UM)
        if values_F.ndim != 1:
            raise MismatchError(
                f"{self.region}: settle must return a list of numbers, always equally many. Fix it."
            )
        return values_F

    @property
    def _is_foreign(self) -> bool:
        return trust_regions.is_foreign(self.region)

    def _copies(self, policies: Policies) -> Policies:
        """Copies for foreign code, whose in-place changes must not reach other algorithms or the
        trace in memory.
        """
        return policies.copied(topk=getattr(self.module, "READS_TOP_K", False))

    def _ask_own_file(self, policies: Policies, advantage_T: Array) -> Decision:
        settled = self._settled_columns(policies, advantage_T)
        copies, own_advantage_T = self._copies(policies), copied(advantage_T)
        with trust_regions.report_errors_of(self.region, error_class=MismatchError):
            answer = self._ask(copies, own_advantage_T, settled)
            flaw = trust_regions.describe_flaw(answer, advantage_T)
        if flaw:
            raise MismatchError(
                f"{self.region} must return Decision(keep_T, statistic_T): one bool and one "
                f"number for each token. {flaw} Fix it."
            )
        return answer

    def _ask(self, policies: Policies, advantage_T: Array, settled: tuple[Array, ...]) -> Decision:
        decision: Decision = self.module.trust_region(
            policies.compare(self.ratio), advantage_T, *settled, **self.parameters
        )
        return decision


@dataclass(frozen=True)
class Factor(Rule):
    """A function of two policies in the weight of an update, and the parameters that differ from
    its defaults.
    """

    ratio: Ratio
    function: str = "capped-ratio"  # a name in weights/
    chosen: tuple[tuple[str, float], ...] = ()

    @property
    def module(self) -> ModuleType:
        return weights.find(self.function)

    @property
    def name(self) -> str:
        return self.function

    @cached_property
    def parameters(self) -> dict[str, float]:
        """Every parameter by name, with the value in use."""
        return weights.parameters(self.module) | dict(self.chosen)

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and upper bound of a ratio; 0 and ∞ without bounds."""
        return self.parameters.get("floor", 0.0), self.parameters.get("cap", inf)

    @property
    def bounded(self) -> bool:
        """Whether the factor is a ratio with a bound."""
        return self.bounds != (0.0, inf)

    def with_parameters(self, **chosen: Any) -> Factor:
        """The factor with other parameters, cast to the types of their defaults; defaults are
        not stored.
        """
        defaults = weights.parameters(self.module)
        changed = {}
        for name, value in (self.parameters | chosen).items():
            default = defaults[name]
            if value != default:
                changed[name] = type(default)(value)
        return replace(self, chosen=tuple(changed.items()))

    @silent
    def weight_T(self, policies: Policies, advantage_T: Array) -> Array:
        """The factor of each token."""
        compared = policies.compare(self.ratio)
        settled = self._settled_columns(policies, advantage_T)
        weight_T: Array = self.module.weight(
            compared, self.ratio.level, advantage_T, *settled, **self.parameters
        )
        return weight_T

    def __str__(self) -> str:
        template = (
            self.module.formula(self.parameters)
            if hasattr(self.module, "formula")
            else self.module.FORMULA
        )
        values = {name: f"{value:g}" for name, value in self.parameters.items()}
        # In a weight, unlike a mask, r has the level of the ratio: Πr or (Πr)^(1/|y|)
        symbols = self.ratio.symbols | {"r": str(self.ratio)}
        return str(template.format(**symbols, **values))


def capped(ratio: Ratio, floor: float = 0.0, cap: float = inf) -> Factor:
    """The ratio, bounded on both sides."""
    return Factor(ratio).with_parameters(floor=floor, cap=cap)


def mask(region: str, ratio: Ratio = TRAINER_ROLLOUT, **chosen: Threshold) -> Mask:
    """A trust region with these thresholds."""
    return Mask(region, ratio, tuple(chosen.items()))


def factor(function: str, ratio: Ratio = TRAINER_ROLLOUT, **chosen: Any) -> Factor:
    """A function of weights/ with these parameters."""
    return Factor(ratio, function).with_parameters(**chosen)
