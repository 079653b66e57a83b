"""The limits that others publish: one table, whose rows are in each framework's `limits.toml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from mismatch_cli.limits.judge import BOUNDS, BROKEN, HEALTHY, Number, Range, Standing, judge
from mismatch_cli.limits.manifest_sides import Family
from mismatch_cli.limits.published_sets import published_tables

Direction = Literal["max", "min", "size", "between"]
Bound = float | Sequence[float]
_BOUND_NAMES = {"max": "max", "min": "min", "size": "max_size"}  # by direction
_FAMILIES = {"dense": "dense models", "moe": "mixtures of experts"}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published limit: values on the right side of `healthy` are healthy, those beyond `broken`
    are broken.

    `direction` says which side: `max`, `min`, `size` of a signed number, or `between` two values.
    """

    publisher: str  # a short name; `who` and `source` say in full who publishes it, and where
    who: str
    source: str
    date: str = ""  # of the newest version that was read
    name: str  # of the metric, as the source has it
    metric: str  # ours with the same definition, or FRAMEWORK:NAME where there is none
    pair: str
    direction: Direction = "max"
    healthy: Bound | None = None
    broken: Bound | None = None
    family: Family = ""
    precision: str = ""
    says: str  # what the source concludes beyond it
    note: str = ""
    gate: str = ""  # the set of `gate --limits` that it is part of; empty if it may not gate

    def bound(self, level: str) -> Bound:
        """The bound of a level; if only one level was published, it is both."""
        levels = [self.healthy, self.broken]
        if level == BROKEN:
            levels.reverse()
        for bound in levels:
            if bound is not None:
                return bound
        raise AssertionError(f"{self.who} publishes no bound")

    def bounds(self, level: str) -> Mapping[str, float]:
        """The bounds of a level by the names that files of limits give them."""
        bound = self.bound(level)
        if isinstance(bound, int | float):
            return {_BOUND_NAMES[self.direction]: bound}
        low, high = bound
        return {"min": low, "max": high}

    def range(self, level: str) -> Range:
        """What a level allows."""
        return Range.of(self.bounds(level))

    def text(self, level: str) -> str:
        """What a level allows in words: `≤ 0.01`, `within ±0.1`."""
        bounds = self.bounds(level)
        if len(bounds) > 1:
            return f"{_short(bounds['min'])} to {_short(bounds['max'])}"
        ((name, bound),) = bounds.items()
        return BOUNDS[name].format(_short(bound))

    @property
    def has_two_levels(self) -> bool:
        return self.healthy is not None and self.broken is not None

    def standing(self, number: Number) -> Standing:
        """What the judge says of a number of this metric and pair."""
        return judge(number, self.range(HEALTHY), self.range(BROKEN))


def _short(bound: float) -> str:
    """`0.015`, but `5e-4`: with an exponent where that is clearly shorter."""
    decimal = f"{bound:g}"
    exponential = f"{bound:.2e}".replace(".00e", "e").replace("e-0", "e-").replace("e+0", "e")
    return exponential if len(exponential) + 1 < len(decimal) else decimal


@cache
def published() -> tuple[Published, ...]:
    """Every published limit, a framework after the other."""
    limits = []
    for content in published_tables():
        for row in content["limit"]:
            limits.append(Published(publisher=content["publisher"], **row))
    return tuple(limits)


def for_other_models(intended: str, family: str) -> str:
    """Why a limit for models of one family says nothing of a model; empty if it may, as where the
    model's family is not known.
    """
    if not intended or family in ("", intended):
        return ""
    return f"the limit is for {_FAMILIES[intended]}, and this model is not one of them"
