"""The result of `clipstats` as its page and screen use it: the order of algorithms, and words
for both signs.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mismatch_cli.base.json_form import from_json
from mismatch_cli.metrics.update_table import CLIPPING
from mismatch_cli.report.tables import Col, Row, keyed, percent, value_of
from mismatch_cli.studies.clipping import ClippingPlotData, OneMask
from mismatch_cli.trace.origin import About

SIGNS = ("all", "positive", "negative")
BAD_UPDATE = (
    "a token with A < 0 that already lost {delta:g} or more in probability is pushed down further"
)


class Subject(ClippingPlotData):
    """The result in the order of its page: a mask on the rollout, then the same mask on the
    recomputed policy.
    """

    @property
    def rows(self) -> list[Row]:
        first: dict[str, int] = {}
        for place, row in enumerate(super().rows):
            first.setdefault(_on_rollout(row), place)
        return sorted(
            super().rows, key=lambda row: (first[_on_rollout(row)], row["anchor"] == "recomputed")
        )

    @property
    def signs(self) -> tuple[str, ...]:
        """Signs of A under which blocked tokens are counted; without advantages there is no
        total.
        """
        return SIGNS if self.has_advantages else SIGNS[1:]

    @property
    def nothing_to_block(self) -> bool:
        """Whether no token has an advantage other than 0."""
        return self.has_advantages and not self.result["counts"]["tokens"]

    def strictness(self, row: Row) -> float:
        """The share of tokens that an algorithm blocks; without advantages, summed over both
        signs.
        """
        return sum(
            value_of(row["blocked"][sign]) or 0.0
            for sign in self.signs[: 1 if self.has_advantages else 2]
        )

    def is_twin(self, row: Row) -> bool:
        """Whether the row is another row's mask with π′ instead of μ."""
        on_rollout = (_on_rollout(other) for other in self.rows if other["anchor"] == "rollout")
        return row["anchor"] == "recomputed" and _on_rollout(row) in on_rollout

    @property
    def leading(self) -> list[Row]:
        """The compared pair, which figures and headline show."""
        by_name = {row["name"]: row for row in self.rows}
        return [by_name[name] for name in self.result["compared"]]

    @property
    def named(self) -> bool:
        """Whether the algorithms were named, rather than all that the trace supports."""
        return "--algorithm" in self.result["arguments"]

    @property
    def detailed(self) -> list[OneMask]:
        """What is shown bin by bin and token by token: the masks of named algorithms, or of the
        compared pair.
        """
        masks = self.masks(self.blocking)
        return masks if self.named else [mask for mask in masks if mask.row in self.leading]


def unsupported(result: Row) -> list[str]:
    """The algorithms that a trace cannot support, in a sentence for each reason."""
    by_reason: dict[str, list[str]] = {}
    for row in result["skipped"]:
        by_reason.setdefault(row["reason"], []).append(row["algorithm"])
    return [f"{', '.join(names)}: {reason}." for reason, names in by_reason.items()]


def way_to(column: str, about: Mapping[str, Any]) -> str:
    """How to get a trace with advantages or rewards: what to type, by where the trace comes
    from.
    """
    source = from_json(About, about).source
    if source is None:
        return "MISMATCH_ANSWER_FIELD=FIELD mismatch-cli probe"
    if source.is_recorded:
        return f"pass {column}= to the recorder"
    if source.format == "plain":
        return f"import DUMP --columns {column}=COLUMN"
    return f"import a dump with {column}s"


def _on_rollout(row: Row) -> str:
    """The row's blocking rule with the rollout as its anchor: p′ → q and r′ → r."""
    blocked: str = row["blocked_when"]
    return blocked.replace("p′", "q").replace("r′", "r")


def when(sign: str, advantages: bool) -> str:
    """The name of a sign of A: hypothetical without advantages."""
    return ("" if advantages else "if ") + {"positive": "A > 0", "negative": "A < 0"}[sign]


def counted(
    title: str, key: str, show: Callable[[Any], str] = percent, *, optional: bool = False
) -> Col[Row]:
    """A column whose JSON key is also its metric's key."""
    return keyed(title, key, show, CLIPPING[key], optional=optional)
