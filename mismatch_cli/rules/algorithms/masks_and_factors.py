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
        """The module that defines it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in trust_regions/ or weights/, or the path of a user's file."""

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, Any]:
        """Every parameter by name, with the value in use."""

    @property
    def scope(self) -> Scope | None:
        """What it must see completely before it decides: a batch, or all answers to a prompt in
        a step.
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
        return np.array(
            self.module.settle(rows_UM.astype(np.float64), **self.parameters), dtype=np.float64
        )

    def _settled(self, policies: Policies, advantage_T: Array) -> tuple[Array, ...]:
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
                "`Gathering` makes one over many parts, and `as_one_batch` over tokens that are "
                f"a whole {self.scope}."
            )
        key_S = batches.key_S(self.scope)
        values_TF = batches.batch_values[self].of(key_S[as_numpy(policies.responses.response_T)])
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
        values = {
            name: f"{value:g}" if isinstance(value, float) else value
            for name, value in self.parameters.items()
        }
        shown = values | trust_regions.symbols(self.module)
        words = getattr(self.module, "FORMULA", f"as {self.region} decides").format(
            **self.ratio.symbols, **shown
        )
        return f"{words} ({self.settings})" if self.settings else words

    @property
    def settings(self) -> str:
        """The thresholds with a letter, both sides together: `ε = 0.2 / 0.28`."""
        sides: dict[str, list[str]] = {}
        for name, symbol in trust_regions.symbols(self.module).items():
            sides.setdefault(symbol.partition("_")[0], []).append(f"{self.parameters[name]:g}")
        return ", ".join(
            f"{letter} = {' / '.join(dict.fromkeys(values))}" for letter, values in sides.items()
        )

    @silent
    def decide(self, policies: Policies, advantage_T: Array) -> Decision:
        """The trust region's decision for each token; a token without an advantage has no
        update, and is kept.
        """
        if self._is_foreign:
            decision = self._ask_own_file(policies, advantage_T)
        else:
            settled = self._settled(policies, advantage_T)
            decision = self.module.trust_region(
                policies.compare(self.ratio), advantage_T, *settled, **self.parameters
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
        copies, columns = (
            self._copies(policies),
            (copied(advantage_T), *self._settled(policies, advantage_T)),
        )
        with trust_regions.report_errors_of(self.region, error_class=MismatchError):
            answer: Decision = self.module.trust_region(
                copies.compare(self.ratio), *columns, **self.parameters
            )
            why = trust_regions.describe_flaw(answer, advantage_T)
        if why:
            raise MismatchError(
                f"{self.region} must return Decision(keep_T, statistic_T): one bool and one "
                f"number for each token. {why} Fix it."
            )
        return answer


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
        return self.bounds != (0.0, inf)

    def with_parameters(self, **chosen: Any) -> Factor:
        """The factor with other parameters, cast to the types of their defaults; defaults are
        not stored.
        """
        values, defaults = self.parameters | chosen, weights.parameters(self.module)
        changed = {
            name: type(defaults[name])(value)
            for name, value in values.items()
            if value != defaults[name]
        }
        return replace(self, chosen=tuple(changed.items()))

    @silent
    def weight_T(self, policies: Policies, advantage_T: Array) -> Array:
        """The factor of each token."""
        compared, settled = policies.compare(self.ratio), self._settled(policies, advantage_T)
        found: Array = self.module.weight(
            compared, self.ratio.level, advantage_T, *settled, **self.parameters
        )
        return found

    def __str__(self) -> str:
        values = {name: f"{value:g}" for name, value in self.parameters.items()}
        text = (
            self.module.formula(self.parameters)
            if hasattr(self.module, "formula")
            else self.module.FORMULA
        )
        return str(text.format(**self.ratio.symbols | {"r": str(self.ratio)}, **values))


def capped(ratio: Ratio, floor: float = 0.0, cap: float = inf) -> Factor:
    """The ratio, bounded on both sides."""
    return Factor(ratio).with_parameters(floor=floor, cap=cap)


def mask(region: str, ratio: Ratio = TRAINER_ROLLOUT, **chosen: Threshold) -> Mask:
    """A trust region with these thresholds."""
    return Mask(region, ratio, tuple(chosen.items()))


def factor(function: str, ratio: Ratio = TRAINER_ROLLOUT, **chosen: Any) -> Factor:
    """A function of weights/ with these parameters."""
    return Factor(ratio, function).with_parameters(**chosen)
