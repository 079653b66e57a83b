"""Counts over every token of a trace: impossible values, placeholders, contradictions and
repeated responses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.base.hashing import hash_keys, mix
from mismatch_cli.diagnosis.sample import NO_LIMIT
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.trace.foreign_values import UNCERTAIN, unpacked_flags

SIDES = ("logp_rollout", "logp_trainer", "logp_recomputed")
ROUNDING = 1e-6  # nats: a float32 log-softmax can end this far above 0


_RUN = 3  # placeholders next to each other
_NEARLY = -0.05  # nats
_Z = 3.0  # standard deviations of a count
_TIMES_REST = 3.0  # text that a model did not write is more improbable than that


@dataclass
class SideCounts(Accumulator):
    """For one column: tokens in the loss mask, and those with an impossible value."""

    LARGEST = ("largest",)

    tokens: int = 0
    not_a_number: int = 0
    above_zero: int = 0
    impossible: int = 0  # −inf for the token that was sampled
    largest: float = -np.inf


@dataclass
class ZeroCounts(Accumulator):
    """Tokens with an exact 0.0 on one side while the other side is uncertain, and where they
    are; beside them all exact zeros, the nearly certain tokens, and the rest.
    """

    tokens: int = 0
    last: int = 0  # at the end of a response that was not truncated
    in_runs: int = 0  # with at least three in a row
    gap: float = 0.0  # Σ|d| over them, nats
    zeros: int = 0  # of which most may be certain on both sides
    zeros_surprise: float = 0.0  # Σ −log p of the other side over these, nats
    nearly: int = 0  # tokens below 0 by at most 0.05 nats
    nearly_uncertain: int = 0  # of these, where the other side is uncertain
    rest: int = 0  # tokens that are not exactly 0
    rest_surprise: float = 0.0

    def update(self, own_N: np.ndarray, other_N: np.ndarray) -> None:
        """Count the log-probabilities of one side, and those of the other at its exact zeros."""
        zero_N = own_N == 0
        uncertain_N = other_N < UNCERTAIN
        nearly_N = (own_N > _NEARLY) & ~zero_N
        self.tokens += int((zero_N & uncertain_N).sum())
        self.gap -= float(other_N[zero_N & uncertain_N].sum(dtype=np.float64))
        self.zeros += int(zero_N.sum())
        self.zeros_surprise -= float(other_N[zero_N].sum(dtype=np.float64))
        self.nearly += int(nearly_N.sum())
        self.nearly_uncertain += int((nearly_N & uncertain_N).sum())
        self.rest += int((~zero_N).sum())
        self.rest_surprise -= float(other_N[~zero_N].sum(dtype=np.float64))

    @property
    def are_legitimate(self) -> bool:
        """Whether the other side doubts certain tokens no more than nearly certain ones, as other
        weights make it.
        """
        usual = self.zeros * self.nearly_uncertain / max(1, self.nearly)
        return self.tokens <= usual + _Z * usual**0.5

    @property
    def are_sampled(self) -> bool:
        """Whether the other side finds them no more improbable than other tokens of the trace."""
        rest = self.rest_surprise / max(1, self.rest)
        return self.zeros_surprise <= _TIMES_REST * rest * self.zeros


@dataclass
class Counts(Accumulator):
    """Exact counts over a whole trace."""

    sides: dict[str, SideCounts] = field(default_factory=dict)
    zeros: dict[str, ZeroCounts] = field(default_factory=dict)
    responses: int = 0
    out_of_support: int = 0

    def update(self, table: pa.Table, batch: TokenBatch, pair: Pair) -> None:
        """Add one table: its columns as recorded, and the two policies as the reader returns
        them.
        """
        for side in SIDES:
            if side in table.column_names:
                self._update_side(side, table.column(side).combine_chunks(), batch)
        self.responses += batch.num_responses
        mask_T = batch.loss_mask_T
        logq_T, logp_T = getattr(batch, pair.reference), getattr(batch, pair.current)
        self.out_of_support += int((mask_T & np.isfinite(logq_T) & (logp_T == -np.inf)).sum())
        counts_T = mask_T & np.isfinite(logq_T) & np.isfinite(logp_T)
        self._update_zeros("logp_rollout", logq_T, logp_T, counts_T, batch)
        self._update_zeros("logp_trainer", logp_T, logq_T, counts_T, batch)

    def _update_side(self, side: str, column: pa.ListArray, batch: TokenBatch) -> None:
        """Count the impossible values of a column as recorded."""
        # A response that was not measured is null, and has no values
        measured_T = np.repeat(unpacked_flags(column.is_valid()), np.diff(batch.offset_S1))
        value_N = np.from_dlpack(column.flatten())[batch.loss_mask_T[measured_T]]
        finite_N = np.isfinite(value_N)
        counts = self.sides.setdefault(side, SideCounts())
        counts.tokens += len(value_N)
        counts.not_a_number += int(np.isnan(value_N).sum() + np.isposinf(value_N).sum())
        counts.above_zero += int(((value_N > ROUNDING) & finite_N).sum())
        counts.impossible += int(np.isneginf(value_N).sum())
        counts.largest = max(counts.largest, float(value_N.max(initial=-np.inf, where=finite_N)))

    def _update_zeros(
        self,
        side: str,
        own_T: np.ndarray,
        other_T: np.ndarray,
        counts_T: np.ndarray,
        batch: TokenBatch,
    ) -> None:
        """Count the exact zeros of one side, and where they are."""
        zeros = self.zeros.setdefault(side, ZeroCounts())
        zeros.update(own_T[counts_T], other_T[counts_T])
        zero_T = counts_T & (own_T == 0)
        placeholder_T = zero_T & (other_T < UNCERTAIN)
        # Most tables have none, and finding runs takes time
        if not placeholder_T.any():
            return
        offset_S1 = batch.offset_S1
        ended_S = ~batch.truncated_S & (np.diff(offset_S1) > 0)
        zeros.last += int(placeholder_T[offset_S1[1:][ended_S] - 1].sum())
        zeros.in_runs += int((placeholder_T & in_runs(zero_T, offset_S1)).sum())


def in_runs(flag_T: np.ndarray, offset_S1: np.ndarray, shortest: int = _RUN) -> np.ndarray:
    """The flags in runs of at least `shortest` within one response."""
    if not len(flag_T):
        return flag_T
    begins_T = flag_T.copy()
    begins_T[1:] &= ~flag_T[:-1]
    # A response begins another run; an empty one at the end begins beyond the last token
    starts = offset_S1[1:-1]
    starts = starts[starts < len(flag_T)]
    begins_T[starts] = flag_T[starts]
    run_T = np.cumsum(begins_T)
    length_R = np.bincount(run_T[flag_T], minlength=int(run_T[-1]) + 1)
    return flag_T & (length_R[run_T] >= shortest)


_COLUMNS = {
    "rollout": ("logp_rollout_T", "topk_logp_rollout_TK"),
    "trainer": ("logp_trainer_T", "topk_logp_trainer_TK"),
    "recomputed": ("logp_recomputed_T", "topk_logp_recomputed_TK"),
}
# Nats: more than storing one of the columns in bfloat16 explains
_ABSOLUTE, _RELATIVE = 1e-3, 2.0**-7


@dataclass
class SideAgreement(Accumulator):
    """For one side: sampled tokens in its top-K, those that contradict it, and by how much."""

    compared: int = 0
    at_odds: int = 0
    difference: float = 0.0  # Σ|sampled − top-K| over them, nats


@dataclass
class OwnColumns(Accumulator):
    """Exact counts over every token of a trace; empty without top-K columns."""

    sides: dict[str, SideAgreement] = field(default_factory=dict)

    def update(self, batch: TokenBatch) -> None:
        """Add one table."""
        if batch.topk_ids_TK is None or batch.response_ids_T is None:
            return
        sampled_TK = batch.topk_ids_TK == batch.response_ids_T[:, None]
        for side, (sampled, topk) in _COLUMNS.items():
            logp_T, logp_TK = getattr(batch, sampled), getattr(batch, topk)
            if logp_T is not None and logp_TK is not None:
                self._update_side(side, logp_T, logp_TK, sampled_TK)

    def _update_side(
        self, side: str, logp_T: np.ndarray, logp_TK: np.ndarray, sampled_TK: np.ndarray
    ) -> None:
        usable_TK = sampled_TK & np.isfinite(logp_TK)
        in_topk_T = usable_TK.any(axis=1) & np.isfinite(logp_T)
        by_topk_T = np.where(usable_TK, logp_TK, 0).sum(axis=1)
        with np.errstate(invalid="ignore"):
            difference_T = np.where(in_topk_T, np.abs(by_topk_T - logp_T), 0)
            odd_T = difference_T > _ABSOLUTE + _RELATIVE * np.abs(logp_T)
        agreement = self.sides.setdefault(side, SideAgreement())
        agreement.compared += int(in_topk_T.sum())
        agreement.at_odds += int(odd_T.sum())
        agreement.difference += float(difference_T[odd_T].sum(dtype=np.float64))


MOST_RESPONSES = 2**20  # to remember; of a longer trace, those with the smallest hashes
UNREPEATABLE = 16.0  # nats: so improbable a response is sampled twice in one of ten million pairs


class ImprobableCopies(Accumulator):
    """Two hashes, of tokens and key, for every response that is too improbable to be sampled twice.

    A long trace forgets responses by the hash of their tokens, so that a response and its copy are
    both kept or both forgotten, and shares are unbiased. Hashes of `limit` or above are not
    remembered; a `limit` may be passed in if everything below it is complete.
    """

    def __init__(self, most_responses: int = MOST_RESPONSES, limit: int = NO_LIMIT) -> None:
        self._most = most_responses
        self.limit = limit
        self._hashes = [np.zeros((2, 0), dtype=np.uint64)]  # of the tokens, of the key
        self._responses = 0

    def update(self, batch: TokenBatch) -> None:
        """Add the responses of one table, if it has token ids; all tokens count, whether in the
        loss or not.
        """
        if batch.response_ids_T is None:
            return
        logp_T = batch.logp_rollout_T.astype(np.float64)
        surprise_T = np.where(np.isfinite(logp_T), -logp_T, 0.0)
        improbable_S = _sums_by_response(surprise_T, batch.offset_S1) >= UNREPEATABLE
        content_S = content_hashes(batch.response_ids_T, batch.offset_S1)
        key_S = hash_keys(batch.step_S, batch.prompt_id_S, batch.sample_index_S, seed=3)
        new_S = improbable_S & self._below_limit(content_S)
        self._hashes.append(np.stack([content_S, key_S])[:, new_S])
        self._responses += int(new_S.sum())
        if self._responses > 2 * self._most:
            self._forget()

    def _below_limit(self, content_S: np.ndarray) -> np.ndarray:
        return content_S < np.uint64(min(self.limit, NO_LIMIT - 1))

    def merge(self, other: ImprobableCopies) -> None:
        """Add what another remembers: responses below both limits."""
        self.limit = min(self.limit, other.limit)
        hashes = np.concatenate(self._hashes + other._hashes, axis=1)
        self._remember(hashes[:, self._below_limit(hashes[0])])
        if self._responses > 2 * self._most:
            self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle each response once."""
        self._forget()
        return super().__getstate__()

    def _forget(self) -> None:
        """Keep each response once, and if there are too many, those with the smallest hashes."""
        hashes = np.unique(np.concatenate(self._hashes, axis=1), axis=1)
        if hashes.shape[1] > self._most:
            self.limit = int(hashes[0, self._most])
            hashes = hashes[:, self._below_limit(hashes[0])]
        self._remember(hashes)

    def _remember(self, hashes: np.ndarray) -> None:
        self._hashes = [hashes]
        self._responses = hashes.shape[1]

    def count(self) -> tuple[int, int]:
        """How many remembered responses also occur under another key, and how many are
        remembered.
        """
        self._forget()
        content_R = self._hashes[0][0]
        return len(content_R) - len(np.unique(content_R)), len(content_R)


def content_hashes(ids_T: np.ndarray, offset_S1: np.ndarray) -> np.ndarray:
    """One uint64 for the token ids of each response, in their order."""
    length_S = np.diff(offset_S1)
    position_T = np.arange(len(ids_T)) - np.repeat(offset_S1[:-1], length_S)
    token_T = mix(ids_T.astype(np.int64).view(np.uint64) ^ mix(position_T.astype(np.uint64)))
    # Sums wrap around 2^64, and so do their differences
    with np.errstate(over="ignore"):
        return mix(_sums_by_response(token_T, offset_S1))


def _sums_by_response(value_T: np.ndarray, offset_S1: np.ndarray) -> np.ndarray:
    before_T1 = np.zeros(len(value_T) + 1, dtype=value_T.dtype)
    np.cumsum(value_T, out=before_T1[1:])
    return before_T1[offset_S1[1:]] - before_T1[offset_S1[:-1]]
