"""What every section of the `clipstats` report asks of the result: which rows there are, and which of them lead."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mismatch_cli.report.pages.clipping_cells import Row, value_of


@dataclass(frozen=True)
class Subject:
    """The JSON of docs/clipstats.md."""

    result: Row

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
        """The two that are compared, in pictures and in the headline."""
        by_name = {row["name"]: row for row in self.result["algorithms"]}
        return [by_name[name] for name in self.result["compared"]]

    def leads(self, row: Row) -> bool:
        return any(row["name"] == leading["name"] for leading in self.leading)


def _on_rollout(row: Row) -> str:
    """When the row's mask blocks, as if its anchor were the rollout's policy: p′ → q and r′ → r."""
    blocked: str = row["blocked_when"]
    return blocked.replace("p′", "q").replace("r′", "r")
