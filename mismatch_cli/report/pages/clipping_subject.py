"""The result of `clipstats` as its page and its screen tell it: the order of algorithms, and words for both signs."""

from collections.abc import Callable
from typing import Any

from mismatch_cli.metrics.update_table import CLIPPING
from mismatch_cli.report.tables import Col, Row, keyed, percent, value_of
from mismatch_cli.studies.clipping import ClippingPlotData

SIGNS = ("all", "positive", "negative")
BAD_UPDATE = "a token with A < 0 whose probability has already fallen by {delta:g} or more is pushed down further"


class Subject(ClippingPlotData):
    """The result as its page tells it: the same mask on both anchors together, first on the rollout."""

    @property
    def rows(self) -> list[Row]:
        first: dict[str, int] = {}
        for place, row in enumerate(super().rows):
            first.setdefault(_on_rollout(row), place)
        return sorted(super().rows, key=lambda row: (first[_on_rollout(row)], row["anchor"] == "recomputed"))

    @property
    def signs(self) -> tuple[str, ...]:
        """Signs of A under which blocked tokens are counted; without advantages there is no sum of both."""
        return SIGNS if self.has_advantages else SIGNS[1:]

    @property
    def nothing_to_block(self) -> bool:
        """Whether no token has an advantage other than 0."""
        return self.has_advantages and not self.result["counts"]["tokens"]

    def strictness(self, row: Row) -> float:
        """The share of tokens that an algorithm blocks; without advantages, of both signs together."""
        return sum(value_of(row["blocked"][sign]) or 0.0 for sign in self.signs[: 1 if self.has_advantages else 2])

    def is_twin(self, row: Row) -> bool:
        """Whether the row is another one's mask with π′ in the place of μ."""
        on_rollout = (_on_rollout(other) for other in self.rows if other["anchor"] == "rollout")
        return row["anchor"] == "recomputed" and _on_rollout(row) in on_rollout

    @property
    def leading(self) -> list[Row]:
        """The two that are compared, in pictures and in the headline."""
        by_name = {row["name"]: row for row in self.rows}
        return [by_name[name] for name in self.result["compared"]]


def _on_rollout(row: Row) -> str:
    """When the row's mask blocks, as if its anchor were the rollout's policy: p′ → q and r′ → r."""
    blocked: str = row["blocked_when"]
    return blocked.replace("p′", "q").replace("r′", "r")


def when(sign: str, advantages: bool) -> str:
    """How the tokens of a sign are called: without advantages the question is hypothetical."""
    return ("" if advantages else "if ") + {"positive": "A > 0", "negative": "A < 0"}[sign]


def counted(title: str, key: str, show: Callable[[Any], str] = percent, *, optional: bool = False) -> Col[Row]:
    """A column whose key in the JSON is that of its metric."""
    return keyed(title, key, show, CLIPPING[key], optional=optional)
