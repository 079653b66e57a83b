"""The first pass of rules on whole batches: what they collect, token by token, until each batch has been seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from mismatch_cli.algorithms.algorithm import Algorithm
from mismatch_cli.algorithms.parts import Rule
from mismatch_cli.arrays import Array, as_numpy
from mismatch_cli.batches import NOTHING_FOUND, Found
from mismatch_cli.policies import Policies


def rules_of(algorithms: Iterable[Algorithm]) -> tuple[Rule, ...]:
    """The rules of some algorithms that look at whole batches, each once."""
    return tuple(dict.fromkeys(rule for algorithm in algorithms for rule in algorithm.batch_rules))


class Gathering:
    """Of every rule and batch the rows that were collected, 4 to 32 bytes a token, in whatever order they came."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self._rows: list[dict[int, list[np.ndarray]]] = [{} for _ in rules]

    def update(self, policies: Policies, advantage_T: Array) -> None:
        """Add tokens; `policies` know their batches."""
        batches = policies.batches
        assert batches is not None
        length_S = as_numpy(policies.responses.length_S)
        for rule, rows in zip(self.rules, self._rows, strict=True):
            assert rule.scope is not None
            key_T = np.repeat(batches.key_S(rule.scope), length_S)
            collected_TM = rule.collect(policies, advantage_T)
            for key in np.unique(key_T).tolist():
                rows.setdefault(key, []).append(collected_TM[key_T == key])

    def merge(self, other: Self) -> None:
        """Add what another one has collected."""
        for rows, more in zip(self._rows, other._rows, strict=True):
            for key, parts in more.items():
                rows.setdefault(key, []).extend(parts)

    def found(self) -> dict[Rule, Found]:
        """What each rule settles for each batch."""
        return {rule: _settled(rule, rows) for rule, rows in zip(self.rules, self._rows, strict=True)}


def _settled(rule: Rule, rows: dict[int, list[np.ndarray]]) -> Found:
    keys = sorted(rows)
    values = [rule.settle(np.concatenate(rows[key])) for key in keys]
    return Found(np.array(keys, dtype=np.int64), np.stack(values) if values else NOTHING_FOUND)
