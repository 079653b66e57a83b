"""What is counted over every token of a trace: values that no log-probability can have, and placeholders."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

SIDES = ("logp_rollout", "logp_trainer", "logp_recomputed")
ROUNDING = 1e-6  # nats: a float32 log-softmax can end this far above 0
UNCERTAIN = -1.0  # nats: where the other side says less, an exact 0.0 was not computed, not even under top-p
_RUN = 3  # placeholders next to each other


@dataclass
class SideCounts:
    """Of one column: tokens in the loss mask, and those with an impossible value."""

    tokens: int = 0
    not_a_number: int = 0
    above_zero: int = 0
    impossible: int = 0  # −inf for the token that was sampled
    largest: float = -np.inf

    @property
    def wrong(self) -> int:
        return self.not_a_number + self.above_zero


@dataclass
class ZeroCounts:
    """Tokens with an exact 0.0 on one side and an uncertain other side: where they stand."""

    tokens: int = 0
    last: int = 0  # at the end of a response that stopped by itself
    in_runs: int = 0  # with at least three in a row
    gap: float = 0.0  # Σ|d| over them, nats


@dataclass
class Counts:
    """Counts of a whole trace, exact."""

    sides: dict[str, SideCounts] = field(default_factory=dict)
    zeros: dict[str, ZeroCounts] = field(default_factory=dict)
    responses: int = 0
    out_of_support: int = 0
    gap: float = 0.0  # Σ|d| over the tokens that count, nats

    def update(self, table: pa.Table, logq_T: np.ndarray, logp_T: np.ndarray, mask_T: np.ndarray) -> None:
        """Take in one table: its columns as they are recorded, and the two policies as the reader serves them."""
        offset_S1 = _offsets(table)
        self.responses += table.num_rows
        for side in SIDES:
            if side in table.column_names:
                self._update_side(side, table, offset_S1, mask_T)
        with np.errstate(invalid="ignore"):
            d_T = np.abs(logp_T - logq_T)
        counts_T = mask_T & np.isfinite(logq_T) & np.isfinite(logp_T)
        self.gap += float(d_T[counts_T].sum(dtype=np.float64))
        self.out_of_support += int((mask_T & np.isfinite(logq_T) & (logp_T == -np.inf)).sum())
        stopped_S = np.array([reason != "length" for reason in table.column("finish_reason").to_pylist()], dtype=bool)
        stopped_S &= np.diff(offset_S1) > 0
        for side, own_T, other_T in (("logp_rollout", logq_T, logp_T), ("logp_trainer", logp_T, logq_T)):
            zero_T = counts_T & (own_T == 0) & (other_T < UNCERTAIN)
            if zero_T.any():
                runs_T = in_runs(counts_T & (own_T == 0), offset_S1)
                self._update_zeros(side, zero_T, runs_T, d_T, offset_S1[1:][stopped_S] - 1)

    def _update_side(self, side: str, table: pa.Table, offset_S1: np.ndarray, mask_T: np.ndarray) -> None:
        column = table.column(side).combine_chunks()
        known_S = ~np.asarray(column.is_null())
        values_N = column.flatten().to_numpy(zero_copy_only=False)
        own_N = mask_T[np.repeat(known_S, np.diff(offset_S1))]
        values_N = values_N[own_N]
        counts = self.sides.setdefault(side, SideCounts())
        counts.tokens += len(values_N)
        counts.not_a_number += int(np.isnan(values_N).sum() + np.isposinf(values_N).sum())
        counts.above_zero += int(((values_N > ROUNDING) & np.isfinite(values_N)).sum())
        counts.impossible += int(np.isneginf(values_N).sum())
        finite_N = values_N[np.isfinite(values_N)]
        counts.largest = max(counts.largest, float(finite_N.max())) if len(finite_N) else counts.largest

    def _update_zeros(
        self, side: str, zero_T: np.ndarray, runs_T: np.ndarray, d_T: np.ndarray, ends: np.ndarray
    ) -> None:
        zeros = self.zeros.setdefault(side, ZeroCounts())
        zeros.tokens += int(zero_T.sum())
        zeros.last += int(zero_T[ends].sum())
        zeros.in_runs += int((zero_T & runs_T).sum())
        zeros.gap += float(d_T[zero_T].sum(dtype=np.float64))


def in_runs(flag_T: np.ndarray, offset_S1: np.ndarray, shortest: int = _RUN) -> np.ndarray:
    """The flags that stand with at least `shortest` in a row within one response."""
    begins_T = flag_T.copy()
    begins_T[1:] &= ~flag_T[:-1]
    inner = offset_S1[1:-1]
    inner = inner[inner < len(flag_T)]
    begins_T[inner] = flag_T[inner]
    run_T = np.cumsum(begins_T)
    length_R = np.bincount(run_T[flag_T], minlength=int(run_T[-1]) + 1 if len(run_T) else 1)
    return flag_T & (length_R[run_T] >= shortest)


def _offsets(table: pa.Table) -> np.ndarray:
    lengths = table.column("response_ids").combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
