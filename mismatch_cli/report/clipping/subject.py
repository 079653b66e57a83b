"""What every section of the `clipstats` report asks of the result: which rows there are, and which of them lead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mismatch_cli.report.clipping.cells import Row, value_of
from mismatch_cli.report.figures import FigureView

_LEADING = ("grpo-clip-higher", "dppo-binary-tv")
_SHOWN_LEADING = 2


@dataclass(frozen=True)
class Subject:
    """The JSON of docs/clipstats.md, and the figures by name."""

    result: Row
    figures: Mapping[str, FigureView]

    @property
    def advantages(self) -> bool:
        return bool(self.result["has"]["advantages"])

    @cached_property
    def rows(self) -> list[Row]:
        """The algorithms, the same mask on both anchors together: first on the rollout, then recomputed."""
        first: dict[str, int] = {}
        for place, row in enumerate(self.result["algorithms"]):
            first.setdefault(_on_rollout(row), place)
        return sorted(
            self.result["algorithms"], key=lambda row: (first[_on_rollout(row)], row["anchor"] == "recomputed")
        )

    @cached_property
    def blocking(self) -> list[Row]:
        """The algorithms that block at least one token."""
        return [row for row in self.rows if any(value_of(part) for part in row["blocked"].values())]

    @cached_property
    def leading(self) -> list[Row]:
        """The two that the headline compares: of --compare, else the paper's, else the first that block anything."""
        by_name = {row["name"]: row for row in self.result["algorithms"]}
        paper = [by_name[name] for name in (*self._compared(), *_LEADING) if name in by_name]
        in_order = {row["name"]: row for row in [*paper, *self.blocking, *self.result["algorithms"]]}
        return list(in_order.values())[:_SHOWN_LEADING]

    def _compared(self) -> list[str]:
        arguments = self.result["arguments"]
        start = arguments.index("--compare") + 1 if "--compare" in arguments else len(arguments)
        return list(arguments[start : start + _SHOWN_LEADING])

    def leads(self, row: Row) -> bool:
        return any(row["name"] == leading["name"] for leading in self.leading)

    def drawn(self, *names: str) -> tuple[FigureView, ...]:
        return tuple(self.figures[name] for name in names if name in self.figures)


def _on_rollout(row: Row) -> str:
    """When the row's mask blocks, as if its anchor were the rollout's policy: p′ → q and r′ → r."""
    blocked: str = row["blocked_when"]
    return blocked.replace("p′", "q").replace("r′", "r")
