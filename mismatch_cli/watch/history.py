"""What a screen draws over the steps of a watched run; all other numbers of a step stay in
metrics.jsonl.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from math import nan
from typing import Any

_OF_GAP = ("abs_dp_mean", "k3", "ratio_outside", "ratio_p01", "ratio_p99")
_OF_STEP = ("blocked", "reward", "responses")


class History:
    """A few numbers of each step, 72 bytes a step: a run of a hundred thousand steps is watched
    in the same memory.
    """

    def __init__(self, lines: Iterable[tuple[int, Mapping[str, Any]]] = ()) -> None:
        """`lines`: steps with their lines of metrics.jsonl, from earlier sessions."""
        self._steps = array("q")
        self._values = {name: array("d") for name in (*_OF_GAP, *_OF_STEP)}
        self.at_equal_weights = False  # whether a step has that gap
        for step, record in lines:
            self.add(step, record)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, record: Mapping[str, Any]) -> None:
        """Take in a step, or what a known one has become."""
        self.at_equal_weights |= bool(record.get("mismatch"))
        numbers = {
            **{name: record.get(name) for name in _OF_STEP},
            **{name: gap(record).get(name) for name in _OF_GAP},
        }
        at = bisect_left(self._steps, step)
        is_again = at < len(self._steps) and self._steps[at] == step
        # A slice of one entry replaces the step, an empty slice inserts it.
        entry = slice(at, at + 1 if is_again else at)
        self._steps[entry] = array("q", [step])
        for name, number in numbers.items():
            self._values[name][entry] = array("d", [nan if number is None else number])

    def of(self, name: str) -> list[float | None]:
        """A number over the steps; None where it was not measured."""
        return [None if value != value else value for value in self._values[name]]


def gap(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The gap at equal weights if it was measured, else the gap with staleness."""
    measured: Mapping[str, Any] = record.get("mismatch") or record.get("current") or {}
    return measured
