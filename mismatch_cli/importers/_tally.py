"""What is left out of a trace and what is noted in it, counted by reason."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from mismatch_cli.text import visible


@dataclass
class Tally:
    """Reasons read after a count: "12 responses without log-probabilities of the rollout engine"."""

    left_out: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # where a reason was met first

    def leave_out(self, reason: str, count: int = 1, where: str = "") -> None:
        if count:
            reason = visible(reason)  # it may quote the file
            self.left_out[reason] += int(count)
            if where:
                self.first.setdefault(reason, visible(where))

    def note(self, what: str, count: int) -> None:
        if count:
            self.noted[what] += int(count)

    def sift(self, bad_S: dict[str, np.ndarray], where: str = "") -> np.ndarray:
        """Which rows stay; every other one counts once, under the first reason that holds for it."""
        keep_S = np.ones(len(next(iter(bad_S.values()))), dtype=bool)
        for reason, failed_S in bad_S.items():
            self.leave_out(reason, int((keep_S & failed_S).sum()), where)
            keep_S &= ~failed_S
        return keep_S

    def left_out_lines(self) -> list[str]:
        wheres = {reason: f" (first: {where})" for reason, where in self.first.items()}
        return [f"{count:,} {reason}{wheres.get(reason, '')}" for reason, count in self.left_out.most_common()]
