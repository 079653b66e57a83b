"""Whether a run looks at its start like the one that its preset repeats.

The numbers are a table of the preset: `source`, whose numbers they are, and for each name in
`values` the `key` in a line of metrics.jsonl (nested keys with dots), the `value`, and how far off
it may be: `within` a difference, or by a `factor`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.numbers import number
from mismatch_cli.train.train_config import EXPECTED, expected_of


@dataclass(frozen=True)
class Target:
    """A number that a run should begin with."""

    name: str
    key: str
    value: float
    within: float | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        """Raise a `TypeError` for a table from which nothing can be compared after the first step
        of a run.
        """
        limits = [limit for limit in (self.within, self.factor) if limit is not None]
        are_numbers = all(isinstance(each, int | float) for each in (self.value, *limits))
        if not (isinstance(self.key, str) and are_numbers) or self.factor == 0:
            raise TypeError(self.name)

    def measured(self, line: Mapping[str, Any]) -> float | None:
        """The run's own number; None if it has not been measured."""
        inner: Any = line
        for key in self.key.split("."):
            inner = inner.get(key) if isinstance(inner, Mapping) else None
        return float(inner) if isinstance(inner, int | float) else None

    def fits(self, measured: float) -> bool:
        """Whether it is as near as it may be off; a target without a limit fits every number."""
        if self.factor is not None:
            return self.value / self.factor <= measured <= self.value * self.factor
        return self.within is None or abs(measured - self.value) <= self.within


@dataclass(frozen=True)
class Resemblance:
    """The numbers of a preset, and whose they are."""

    source: str
    values: tuple[Target, ...]

    @classmethod
    def of(cls, preset: str) -> Resemblance:
        """The table of a preset; without one, no values. A `UsageError` if it is not such a
        table.
        """
        path, table = expected_of(preset)
        if table is None:
            return cls("", ())
        try:
            values = tuple(Target(name, **row) for name, row in table["values"].items())
            return cls(str(table["source"]), values)
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path}: [{EXPECTED}] must have a source, and in values a key and a value each, "
                "as in the preset paper."
            ) from error

    def in_words(self, line: Mapping[str, Any], changed: Iterable[str] = ()) -> str:
        """Each number that the run has measured beside the expected one; empty without any.

        `changed` are settings with which the run departs from the preset.
        """
        pairs = []
        off = []
        for target in self.values:
            own = target.measured(line)
            if own is None:
                continue
            pairs.append(f"{target.name} {number(own)} ({self.source} {number(target.value)})")
            if not target.fits(own):
                off.append(target.name)
        if not pairs:
            return ""
        verdict = f"like the {self.source}"
        if off:
            verdict = f"not {verdict} in {' and '.join(off)}"
        sentence = f"The start is {verdict}: {', '.join(pairs)}."
        differs = ", ".join(changed)
        if differs:
            sentence += f" Changed from the preset: {differs}."
        return sentence


def start_of(metrics: Path) -> dict[str, Any]:
    """The first step of metrics.jsonl with the evaluation before it, if there was one."""
    first, *second = map(json.loads, metrics.read_text(encoding="utf-8").splitlines()[:2])
    if first["step"] == 0 and second:
        return dict(second[0] | first)
    return dict(first)
