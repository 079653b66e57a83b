"""Which responses a rule may look at together: those of one optimiser step, and those to one
prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.hashing import hash_keys, mix

Scope = Literal["batch", "group"]


class FirstPassError(MismatchError):
    """A rule on whole batches or groups that decides without, or beyond, its first pass over them:
    a mistake of the calling code.
    """


class RowKey(NamedTuple):
    """The unique key of a row in a trace (`trace.columns.ROW_KEY`), in integers."""

    step_S: np.ndarray
    epoch_S: np.ndarray
    minibatch_S: np.ndarray
    prompt_id_S: np.ndarray
    sample_index_S: np.ndarray


class BatchValues(NamedTuple):
    """What a rule has computed for each batch, or each group, in a first pass."""

    key_B: np.ndarray  # int64, ascending
    values_BF: np.ndarray  # float64

    def of(self, key_T: np.ndarray) -> np.ndarray:
        """The values of each token's batch, [T, F]; a `FirstPassError` for a batch that was not
        seen.
        """
        if not len(key_T):
            return NO_VALUES
        batch_T = np.searchsorted(self.key_B, key_T).clip(max=max(len(self.key_B) - 1, 0))
        if not len(self.key_B) or not np.array_equal(self.key_B[batch_T], key_T):
            raise FirstPassError(
                "These tokens include a batch that the first pass did not see. Collect all tokens "
                "of all batches before a rule decides on any of them."
            )
        return self.values_BF[batch_T]


# The values where there is no token, or no batch. How many numbers the rule settles is unknown
# then, and it reads them by column: 16 columns are enough for all rules.
NO_VALUES = np.zeros((0, 16))


@dataclass(frozen=True, eq=False)
class Batches:
    """The batch of each response (all rows of the same step, epoch and minibatch), and its group
    (those of a prompt).

    `batch_values` is what each rule on whole batches has computed before: a micro-batch or a shard
    holds only some rows of a batch.
    """

    batch_S: np.ndarray  # int64, a hash
    group_S: np.ndarray  # int64, a hash of step, epoch and prompt
    hash_T: Callable[[], np.ndarray]  # uint64, of each token; only random draws compute it
    batch_values: Mapping[Any, BatchValues] = field(default_factory=dict)

    @classmethod
    def of_rows(
        cls, key: RowKey, places: Callable[[], tuple[np.ndarray, np.ndarray]], trace: int = 0
    ) -> Batches:
        """Batches from the row keys of a trace; `places` gives the response of each token, and its
        position there.
        """

        def hash_T() -> np.ndarray:
            response_T, position_T = places()
            return token_hashes(hash_keys(*key)[response_T], position_T)

        # Even seeds for batches and odd ones for groups keep their keys apart, and those of traces
        batch_S = hash_keys(key.step_S, key.epoch_S, key.minibatch_S, seed=2 * trace)
        group_S = hash_keys(key.step_S, key.epoch_S, key.prompt_id_S, seed=2 * trace + 1)
        return cls(batch_S.view(np.int64), group_S.view(np.int64), hash_T)

    def with_values(self, batch_values: Mapping[Any, BatchValues]) -> Batches:
        """The same batches, with what rules have computed for them."""
        return replace(self, batch_values=batch_values)

    def key_S(self, scope: Scope) -> np.ndarray:
        """The batch of each response, or its group."""
        return self.batch_S if scope == "batch" else self.group_S


def token_hashes(response_hash_T: np.ndarray, position_T: np.ndarray) -> np.ndarray:
    """One uint64 per token: splitmix64 at counter `position`, one round of mixing each."""
    hashes_T: np.ndarray = mix(response_hash_T + position_T.astype(np.uint64))
    return hashes_T
