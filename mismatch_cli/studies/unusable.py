"""Columns of log-probabilities that hold something else in every row: probabilities, values without
their minus sign, entropies.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.diagnosis.counts import ROUNDING, SIDES
from mismatch_cli.trace.columns import length_column
from mismatch_cli.trace.foreign_values import unpacked_flags
from mismatch_cli.trace.reader import Trace

_ENOUGH = 2**16  # values to look at
_FEW = 0.05  # of the values: fewer do not make a whole column wrong
_CLOSE = 0.1  # nats, the median difference from the other column: more than most precisions make


def refuse_unusable(traces: Sequence[Trace], measured: int, not_measured: int) -> None:
    """Raise a `MismatchError` if a column holds something else, which tokens that are not measured
    may show.
    """
    if not_measured < max(1, _FEW * measured):
        return
    fault = unusable_columns(traces[0])
    if fault:
        raise MismatchError(f"{traces[0].folder} cannot be measured. {fault}")


def refuse_unmeasured(
    traces: Sequence[Trace], measured: int, not_measured: int, *, all_masked: bool = False
) -> None:
    """Raise a `MismatchError` if a column holds something else, as `refuse_unusable` does, or if no
    token has log-probabilities of both sides and counts.
    """
    refuse_unusable(traces, measured, max(not_measured, int(not measured)))
    if all_masked:
        raise MismatchError(
            f"{traces[0].folder} has no token to measure: its loss mask leaves out all of them. "
            "Check the loss_mask where it is recorded."
        )
    if not measured:
        raise MismatchError(
            f"{traces[0].folder} has no tokens with log-probabilities of both sides. "
            f"{traces[0].how_to_score}"
        )


def unusable_columns(trace: Trace) -> str:
    """What is wrong with the columns of log-probabilities that have no usable value, and what to
    do; empty if all have some.
    """
    columns = [_Column(side, values_T) for side, values_T in _recorded_values(trace).items()]
    usable = [column for column in columns if column.is_usable]
    yardstick = usable[0] if usable else None
    return " ".join(column.sentence(yardstick) for column in columns if not column.is_usable)


@dataclass(frozen=True)
class _Column:
    """The values of trained tokens in one column, as recorded; NaN = missing."""

    side: str
    values_T: np.ndarray

    @property
    def measured_T(self) -> np.ndarray:
        return self.values_T[~np.isnan(self.values_T)]

    @property
    def is_usable(self) -> bool:
        """Whether it was not recorded at all, or has values below 0; zeros alone say nothing."""
        wrong = int((self.values_T > ROUNDING).sum() + np.isneginf(self.values_T).sum())
        right = int(((self.values_T < 0) & np.isfinite(self.values_T)).sum())
        return not wrong or right > _FEW * wrong

    def sentence(self, other: "_Column | None") -> str:
        """What these values are, by their size and their distance from a usable column."""
        measured_T = self.measured_T
        infinite = int(np.isinf(measured_T).sum())
        above = int((measured_T > ROUNDING).sum())
        if 2 * infinite > len(measured_T):
            return (
                f"{self.side} is −inf or inf for {_count_of(infinite, len(measured_T))} trained "
                "tokens that were looked at: look for an overflow where it is computed."
            )
        finite_T = measured_T[np.isfinite(measured_T)]
        low, high = float(finite_T.min()), float(finite_T.max())
        holds = (
            f"{self.side} is above 0 for {_count_of(above, len(measured_T))} trained tokens, "
            f"{low:.3g} to {high:.3g}: "
        )
        from_negated = self._distance(other, np.negative)
        from_probability = self._distance(other, np.exp)
        if high <= 1 + ROUNDING and from_probability <= min(from_negated, _CLOSE):
            return f"{holds}these are probabilities. Record their logarithm."
        if from_negated < _CLOSE:
            return f"{holds}the minus sign is lost. Record log p, not −log p."
        return (
            f"{holds}these are not log-probabilities of the sampled tokens, perhaps entropies. "
            "Name the right column."
        )

    def _distance(
        self, other: "_Column | None", function: Callable[[np.ndarray], np.ndarray]
    ) -> float:
        """The median distance from a function of the other side's log-probabilities; 0 without
        that side.
        """
        if other is None or len(other.values_T) != len(self.values_T):
            return 0.0
        distance_T = np.abs(self.values_T - function(other.values_T))
        return float(np.median(distance_T[np.isfinite(distance_T)]))


def _count_of(some: int, every: int) -> str:
    """`all 1,234`, or `1,200 of 1,234`."""
    return f"all {every:,}" if some == every else f"{some:,} of {every:,}"


def _recorded_values(trace: Trace) -> dict[str, np.ndarray]:
    """The recorded values of trained tokens by column, of the first row groups.

    They are read as recorded: a batch has NaN for every value above 0, which is what is looked for.
    """
    by_group: dict[str, list[np.ndarray]] = {}
    tokens = 0
    for table in trace.tables(["response_ids", "loss_mask", *SIDES]):
        lengths = table.column(length_column(table.column_names)).combine_chunks()
        length_S = pc.list_value_length(lengths).to_numpy(zero_copy_only=False)
        mask_T = _trained_tokens(table, length_S)
        for side in SIDES:
            if side in table.column_names:
                column = table.column(side).combine_chunks()
                measured_T = np.repeat(unpacked_flags(column.is_valid()), length_S)
                values_T = np.full(len(mask_T), np.nan)
                values_T[measured_T] = column.flatten().to_numpy(zero_copy_only=False)
                by_group.setdefault(side, []).append(values_T[mask_T])
        tokens += int(mask_T.sum())
        if tokens >= _ENOUGH:
            break
    return {side: np.concatenate(values) for side, values in by_group.items()}


def _trained_tokens(table: pa.Table, length_S: np.ndarray) -> np.ndarray:
    """Which tokens are trained; without a mask, all of a response."""
    mask_T = np.ones(length_S.sum(), dtype=bool)
    if "loss_mask" in table.column_names:
        mask = table.column("loss_mask").combine_chunks()
        has_mask_T = np.repeat(unpacked_flags(mask.is_valid()), length_S)
        mask_T[has_mask_T] = unpacked_flags(mask.flatten())
    return mask_T
