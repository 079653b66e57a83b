"""The first pass of rules on whole batches: what they collect, token by token, until each batch has been seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Self

import numpy as np

from mismatch_cli.algorithms.algorithm import Algorithm
from mismatch_cli.algorithms.parts import Rule
from mismatch_cli.arrays import Array, as_numpy
from mismatch_cli.batches import NOTHING_FOUND, Found
from mismatch_cli.errors import MismatchError
from mismatch_cli.policies import Policies


def masks_of(algorithms: Iterable[Algorithm]) -> tuple[Rule, ...]:
    """The masks of some algorithms that look at whole batches, each once: an analysis asks no weight."""
    return tuple(dict.fromkeys(mask for algorithm in algorithms for mask in algorithm.batch_masks))


class Gathering:
    """Of every rule and batch the rows that were collected, 4 to 32 bytes a token, in whatever order they came."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self._rows: list[dict[int, list[np.ndarray]]] = [{} for _ in rules]

    def update(self, policies: Policies, advantage_T: Array) -> None:
        """Add tokens; `policies` know their batches."""
        batches = policies.batches
        assert batches is not None
        offset_S1 = as_numpy(policies.offset_S1)
        for rule, rows in zip(self.rules, self._rows, strict=True):
            assert rule.scope is not None
            key_S, collected_TM = batches.key_S(rule.scope), rule.collect(policies, advantage_T)
            first_R = np.flatnonzero(np.diff(key_S, prepend=~key_S[:1]))  # of responses that lie together
            for first, last in pairwise([*first_R.tolist(), len(key_S)]):
                if offset_S1[first] < offset_S1[last]:
                    own_UM = collected_TM[offset_S1[first] : offset_S1[last]]
                    rows.setdefault(int(key_S[first]), []).append(own_UM.copy())  # or all that was read stays in memory

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
    if len({len(values_F) for values_F in values}) > 1:
        raise MismatchError(f"{rule.module.__name__}: settle must return as many numbers for each batch. Repair it.")
    return Found(np.array(keys, dtype=np.int64), np.stack(values) if values else NOTHING_FOUND)
