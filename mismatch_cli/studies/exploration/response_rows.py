"""Numbers about each response as a whole, whatever part of it is on a page."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.gaps import TokenGaps, token_gaps
from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.studies.exploration.explored import RESPONSE

_BINS = 48  # of a profile


def identified_rows(batch: TokenBatch, trace: int) -> np.ndarray:
    """A `RESPONSE` for each response, without its gap."""
    rows = np.zeros(batch.num_responses, dtype=RESPONSE)
    rows["trace_index"] = trace
    rows["length"] = np.diff(batch.offset_S1)
    for name in ("step", "prompt_id", "sample_index"):
        rows[name] = getattr(batch, f"{name}_S")
    rows["reward"] = np.nan if batch.reward_S is None else batch.reward_S
    rows["advantage"] = first_advantages(batch)
    return rows


def add_gap(rows: np.ndarray, gaps: TokenGaps) -> None:
    """Write the gap of the slice's responses into the rows of its batch."""
    of_slice = rows[gaps.first : gaps.last]  # a view
    of_slice["absolute"] = gaps.responses.sum(gaps.abs_d_N)
    _, of_slice["signed"] = gaps.length_and_d_sum
    of_slice["largest"] = gaps.responses.largest(gaps.abs_d_N)


def first_advantages(batch: TokenBatch) -> np.ndarray:
    """The advantage of each response's first token; NaN where there is none."""
    first_S = np.full(batch.num_responses, np.nan, dtype=np.float32)
    filled_S = np.diff(batch.offset_S1) > 0
    if batch.advantage_T is not None:
        first_S[filled_S] = batch.advantage_T[batch.offset_S1[:-1][filled_S]]
    return first_S


def has_one_advantage(batch: TokenBatch) -> bool:
    """Whether all tokens of each response have the same advantage, or none."""
    if batch.advantage_T is None:
        return True
    first_T = np.repeat(first_advantages(batch), np.diff(batch.offset_S1))
    return np.array_equal(batch.advantage_T, first_T, equal_nan=True)


def profiles(batch: TokenBatch, pair: Pair) -> np.ndarray:
    """The largest |d| in each of 48 equal parts of each response, [S, B]; NaN where no token
    counts in support.
    """
    profile_SB = np.full((batch.num_responses, _BINS), np.nan, dtype=np.float32)
    length_S = np.diff(batch.offset_S1)
    for gaps in token_gaps(batch, pair):
        response_N, position_N = gaps.places()
        response_N = response_N + gaps.first
        bin_N = position_N * _BINS // length_S[response_N]
        abs_d_N = gaps.abs_d_N
        if gaps.out_of_support_N is not None:
            abs_d_N = np.where(gaps.out_of_support_N, np.nan, abs_d_N)
        # Of a number and NaN, `fmax` returns the number.
        np.fmax.at(profile_SB, (response_N, bin_N), abs_d_N)
    return profile_SB
