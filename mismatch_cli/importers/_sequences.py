"""Formats that describe prompt and response in one sequence: cut where the loss mask begins, checked for padding."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.importers import _lists
from mismatch_cli.importers._rows import NO_IDS, NOTE
from mismatch_cli.importers._sources import Tally

NO_MASK = "responses without a trained token (nothing says where they begin)"
BEYOND = "sequences whose loss mask reaches beyond their length (padding on the left?)"
TOO_LONG = "sequences that are shorter than the length they state"
UNEQUAL = "sequences whose {name} has another length than their token ids"
SHIFTED = "responses begin with a log-probability one position too early (all shifted by one?)"


def split(
    ids: pa.Array,
    mask: pa.Array,
    columns: Mapping[str, pa.Array],
    tally: Tally,
    where: str,
    length_S: np.ndarray | None = None,
) -> tuple[dict[str, pa.Array], np.ndarray]:
    """Cut sequences into prompt and response: the columns of the response, and which rows are still there.

    `ids`, `mask` (booleans) and `columns` hold a value per position of the sequence; positions from `length_S` on are
    padding. The response begins with the first position of the mask, and keeps the holes that the mask has later.
    """
    total_S = _lists.lengths_of(ids)
    stop_S = total_S if length_S is None else length_S
    bad_S = {NO_IDS: _lists.holds_null(ids), TOO_LONG: stop_S > total_S}
    for name, column in {"loss mask": mask, **columns}.items():
        bad_S[UNEQUAL.format(name=name)] = (_lists.lengths_of(column) != total_S) & ~_lists.is_null(column)
    bad_S[NO_MASK] = _lists.holds_null(mask)
    keep_S = tally.sift(bad_S, where)
    ids, mask, stop_S = ids.filter(pa.array(keep_S)), mask.filter(pa.array(keep_S)), stop_S[keep_S]
    columns = {name: column.filter(pa.array(keep_S)) for name, column in columns.items()}

    total_S = _lists.lengths_of(ids)
    first_S, last_S = _ends_of_mask(_lists.flat(mask), total_S)
    fits_S = tally.sift({NO_MASK: first_S < 0, BEYOND: last_S >= stop_S}, where)
    keep_S[np.flatnonzero(keep_S)[~fits_S]] = False
    cutter = _Cutter(total_S, np.where(fits_S, first_S, 0), np.where(fits_S, stop_S, 0), fits_S)
    found = {"prompt_ids": cutter.prompt(ids), "response_ids": cutter.response(ids), "loss_mask": cutter.response(mask)}
    found |= {name: cutter.response(column) for name, column in columns.items()}
    if "logp_rollout" in columns:
        found[NOTE + SHIFTED] = pa.array(cutter.shifted(columns["logp_rollout"]).astype(np.int64))
    return found, keep_S


def _ends_of_mask(mask_T: np.ndarray, total_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last position of the mask in each row; -1 where there is none."""
    offset_S1 = _lists.offsets_of(total_S)
    inside = np.flatnonzero(mask_T)
    low, high = np.searchsorted(inside, offset_S1[:-1]), np.searchsorted(inside, offset_S1[1:])
    any_S = high > low
    padded = np.append(inside, 0)
    first_S = np.where(any_S, padded[low] - offset_S1[:-1], -1)
    last_S = np.where(any_S, padded[high - 1] - offset_S1[:-1], -1)
    return first_S, last_S


class _Cutter:
    """Which positions of sequences laid flat are prompt, and which response."""

    def __init__(self, total_S: np.ndarray, first_S: np.ndarray, stop_S: np.ndarray, keep_S: np.ndarray) -> None:
        start_S = _lists.offsets_of(total_S)[:-1]
        self._total_S, self._keep_S = total_S, keep_S
        self._first_S, self._start_S, self._stop_S = first_S, start_S, stop_S
        self._prompt_T = _ranges(start_S, start_S + first_S)
        self._response_T = _ranges(start_S + first_S, start_S + stop_S)

    def prompt(self, column: pa.Array) -> pa.Array:
        return _lists.from_flat(_lists.flat(column)[self._prompt_T], self._first_S[self._keep_S])

    def response(self, column: pa.Array) -> pa.Array:
        null_S = _lists.is_null(column)
        lengths_S = (self._stop_S - self._first_S)[self._keep_S]
        if null_S.all():
            return pa.nulls(int(self._keep_S.sum()), column.type)
        values_T = _lists.flat(column)
        if null_S.any():  # rows without this column: their places are there, but hold nothing
            filled = np.full(int(self._total_S.sum()), np.nan, values_T.dtype)
            filled[np.repeat(~null_S, self._total_S)] = values_T
            values_T = filled
        found = _lists.from_flat(values_T[self._response_T], lengths_S)
        if not null_S.any():
            return found
        return pc.if_else(pa.array(~null_S[self._keep_S]), found, pa.nulls(len(found), found.type))

    def shifted(self, logp: pa.Array) -> np.ndarray:
        """Kept rows whose last prompt position has a log-probability while the last of the response has none."""
        found_S = np.zeros(len(logp), dtype=bool)
        sure_S = self._keep_S & (self._first_S > 0)
        if not _lists.is_null(logp).any():
            values_T = _lists.flat(logp)
            before = values_T[(self._start_S + self._first_S - 1)[sure_S]]
            last = values_T[(self._start_S + self._stop_S - 1)[sure_S]]
            found_S[sure_S] = (before != 0) & (last == 0)
        return found_S[self._keep_S]


def _ranges(begin_S: np.ndarray, end_S: np.ndarray) -> np.ndarray:
    """The positions begin … end − 1 of all rows, one after the other."""
    lengths_S = end_S - begin_S
    offset_S1 = _lists.offsets_of(lengths_S)
    return np.arange(offset_S1[-1]) + np.repeat(begin_S - offset_S1[:-1], lengths_S)
