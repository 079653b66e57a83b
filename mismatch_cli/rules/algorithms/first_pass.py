"""The first pass of rules on whole batches: collects rows, token by token, until each batch has
been seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Self

import numpy as np

from mismatch_cli.base.arrays import Array, as_numpy
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.masks_and_factors import Rule
from mismatch_cli.rules.joint_batches import NO_VALUES, Batches, BatchValues
from mismatch_cli.rules.policies import Policies


def batch_masks_of(algorithms: Iterable[Algorithm]) -> tuple[Rule, ...]:
    """The algorithms' masks that look at whole batches, each once: an analysis needs no weights."""
    masks = chain.from_iterable(algorithm.batch_masks for algorithm in algorithms)
    return tuple(dict.fromkeys(masks))


def as_one_batch(policies: Policies, advantage_T: Array, rules: Iterable[Rule]) -> Policies:
    """The policies after a first pass of these rules over exactly their tokens, as one batch and
    one group.
    """
    key_S = np.zeros(len(policies.offset_S1) - 1, dtype=np.int64)
    batches = Batches(key_S, key_S, policies.hash_T)
    first_pass = FirstPass([rule for rule in rules if rule.scope is not None])
    first_pass.update(replace(policies, batches=batches), advantage_T)
    return replace(policies, batches=batches.with_values(first_pass.settle()))


class FirstPass:
    """The collected rows of every rule and batch, 4 to 32 bytes per token, in any order."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self._rows: list[dict[int, list[np.ndarray]]] = [{} for _ in rules]

    def update(self, policies: Policies, advantage_T: Array) -> None:
        """Add tokens; `policies` must know their batches."""
        batches = policies.batches
        assert batches is not None
        offset_S1 = as_numpy(policies.offset_S1)
        for rule, rows in zip(self.rules, self._rows, strict=True):
            assert rule.scope is not None
            key_S = batches.key_S(rule.scope)
            collected_TM = rule.collect(policies, advantage_T)
            # Responses of a batch usually follow each other: a run of them is one piece of rows.
            # The key before the first one is its complement, so that a run begins there.
            first_R = np.flatnonzero(np.diff(key_S, prepend=~key_S[:1]))
            for first, end in pairwise([*first_R.tolist(), len(key_S)]):
                rows_UM = collected_TM[offset_S1[first] : offset_S1[end]]
                if len(rows_UM):
                    # A view would keep the rows of all batches in memory
                    rows.setdefault(int(key_S[first]), []).append(rows_UM.copy())

    def merge(self, other: Self) -> None:
        """Add the rows that another one has collected."""
        for rows, other_rows in zip(self._rows, other._rows, strict=True):
            for key, pieces in other_rows.items():
                rows.setdefault(key, []).extend(pieces)

    def settle(self) -> dict[Rule, BatchValues]:
        """The numbers that each rule settles for each batch."""
        rows_of_rules = zip(self.rules, self._rows, strict=True)
        return {rule: _settle(rule, rows) for rule, rows in rows_of_rules}


def _settle(rule: Rule, rows: dict[int, list[np.ndarray]]) -> BatchValues:
    if not rows:
        return BatchValues(np.zeros(0, dtype=np.int64), NO_VALUES)
    keys = sorted(rows)
    values = [rule.settle(np.concatenate(rows[key])) for key in keys]
    if len(set(map(len, values))) > 1:
        raise MismatchError(
            f"{rule.module.__name__}: settle must return equally many numbers for each batch. "
            "Fix it."
        )
    return BatchValues(np.array(keys, dtype=np.int64), np.stack(values))
