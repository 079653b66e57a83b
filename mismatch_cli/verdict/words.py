"""The verdict in sentences: the trainer's own noise first, then the bars, each by its name, then the tail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mismatch_cli.metrics.estimate import BELOW_RESOLUTION

HEALTHY, BETWEEN, ABOVE, UNDECIDED = "healthy", "between", "above", "undecided"
_LARGEST_FACTOR = 1000
_WORDS = {
    ABOVE: "Above",
    BETWEEN: "Between healthy and broken",
    UNDECIDED: "Undecided, because the interval reaches over the bar",
}


def sentences(verdict: Mapping[str, Any]) -> Iterator[str]:
    """What the numbers of a verdict say, sentence by sentence."""
    yield _of_floor(verdict["floor"])
    yield from _of_bars(verdict["bars"], verdict["pair"])
    if (tail := verdict["tail"]) is not None:
        yield _of_tail(tail["times"])


def _of_floor(floor: Mapping[str, Any] | None) -> str:
    if floor is None:
        return "The trainer's own noise was not measured, so how much of the gap is just that cannot be said."
    times, low, high = floor["times"], floor["low"], floor["high"]
    if times == BELOW_RESOLUTION:
        return "The trainer's own noise is below 1e-7 nats, too little to divide by."
    if low is None:
        return f"The mean |Δlog p| is {_times(times)} the trainer's own noise (without an interval)."
    if low <= 1 <= high:
        return f"The gap cannot be told from the trainer's own noise: {times:.1f} × it, from {low:.1f} to {high:.1f}."
    return f"The mean |Δlog p| is {_times(times)} the trainer's own noise (from {_short(low)} to {_short(high)})."


def _of_bars(bars: Sequence[Mapping[str, Any]], pair: str) -> Iterator[str]:
    if not bars:
        return
    by: dict[str, list[str]] = {}
    for row in bars:
        by.setdefault(row["standing"], []).append(row["who"])
    verb = "calls" if len(by.get(HEALTHY, [])) == 1 else "call"
    yield f"{len(by.get(HEALTHY, []))} of {len(bars)} published bars {verb} this healthy."
    for name, word in _WORDS.items():
        if name in by:
            yield f"{word}: {'; '.join(by[name])}."
    if pair == "total":
        yield "The trainer's weights were not those that sampled: staleness is in every one of these numbers."
    elif stale := [row["who"] for row in bars if row["pair"] == "total"]:
        yield f"Against the trainer as it is now, with staleness: {'; '.join(stale)}."
    if any(row["low"] is None for row in bars):
        yield "A number without an interval stands by its value alone."


def _of_tail(times: float | None) -> str:
    if times is None:
        return "Rare tokens make all of the KL: 95 % of the tokens agree exactly."
    return f"Rare tokens make the KL: k3 is {_times(times)} what the other 95 % of the tokens would give."


def _times(factor: float) -> str:
    return f"more than {_LARGEST_FACTOR} ×" if factor > _LARGEST_FACTOR else f"{_short(factor)} ×"


def _short(value: float) -> str:
    return f"{float(f'{value:.2g}'):g}"
