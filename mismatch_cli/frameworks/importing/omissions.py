"""Counts, by reason, what an import leaves out and what it notes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mismatch_cli.base.numbers import counted
from mismatch_cli.base.text import visible


@dataclass
class Tally:
    """Reasons follow a count: "12 responses without log-probabilities of the rollout engine"."""

    left_out: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # where each reason first occurred

    def leave_out(self, reason: str, count: int, where: str = "") -> None:
        """Count what is left out; the first `where` of each reason is remembered."""
        if count:
            reason = visible(reason)  # it may quote the file
            self.left_out[reason] += int(count)
            if where:
                self.first.setdefault(reason, visible(where))

    def note(self, reason: str, count: int) -> None:
        """Count what is imported, but deserves a note."""
        if count:
            self.noted[reason] += int(count)

    def sift(
        self,
        bad_S: dict[str, np.ndarray],
        where: str = "",
        detail: Callable[[str, int], str] | None = None,
    ) -> np.ndarray:
        """Which rows stay; each of the others counts once, under its first reason.

        `detail` describes what is wrong with a row, for the first one under each reason.
        """
        rows = len(next(iter(bad_S.values())))
        keep_S = np.ones(rows, dtype=bool)
        for reason, failed_S in bad_S.items():
            dropped_S = keep_S & failed_S
            place = where
            if where and detail is not None and dropped_S.any():
                place += detail(reason, int(dropped_S.argmax()))
            self.leave_out(reason, int(dropped_S.sum()), place)
            # Later reasons count only the rows that are left: the counts add up to the rows.
            keep_S &= ~failed_S
        return keep_S

    def left_out_lines(self) -> list[str]:
        """A line per reason, the most frequent first: the count, and where it first occurred."""
        lines: list[str] = []
        for reason, count in self.left_out.most_common():
            line = counted(count, reason)
            if reason in self.first:
                line += f" (first: {self.first[reason]})"
            lines.append(line)
        return lines
