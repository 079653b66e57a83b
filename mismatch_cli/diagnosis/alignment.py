"""Where a response's two columns of log-probabilities fit each other: as they stand, shifted, or only up to a point."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.diagnosis.sample import Sample

LAGS = (-3, -2, -1, 1, 2, 3)
_MOST = 2.0  # nats: one token counts for at most this much, so that a single outlier decides nothing
_SHORTEST = 6  # tokens: below, some lag fits by chance
_HEAD = 3  # tokens that fit as they stand before one says "from here on"
_REAL = 0.15  # nats on an average token: a smaller gap is not what a shift looks like
_FITS = 0.35  # of the gap may be left where a shift is the cause
_FITS_BETTER = 0.8  # or this much, where other responses are surely shifted


@dataclass(frozen=True)
class Alignment:
    """Of each response: its mean gap as it stands, the lag that fits best, and where it begins to."""

    gap_S: np.ndarray  # nats, mean of min(|d|, 2)
    lag_S: np.ndarray  # π[t + lag] fits μ[t]; 0 = as it stands
    from_S: np.ndarray  # the first token that is shifted; 0 = all of them
    better_S: np.ndarray  # bool: with some lag much less of the gap is left, though perhaps not little

    @property
    def shifted_S(self) -> np.ndarray:
        """Shifted as a whole."""
        return (self.lag_S != 0) & (self.from_S == 0)

    @property
    def broken_S(self) -> np.ndarray:
        """In step up to a point, shifted from there on."""
        return (self.lag_S != 0) & (self.from_S > 0)


def align(sample: Sample) -> Alignment:
    """Find for each response the lag, and the point from which it holds, that leaves the least gap."""
    found = [_align(sample.logq_T[s], sample.logp_T[s], sample.counts_T[s]) for s in sample.spans()]
    gap, lag, start, better = np.array(found, dtype=np.float64).reshape(-1, 4).T
    return Alignment(gap, lag.astype(np.int64), start.astype(np.int64), better > 0)


def in_step_N(sample: Sample, alignment: Alignment, chosen_S: np.ndarray) -> np.ndarray:
    """log π − log μ of the tokens that count where the chosen responses are put in step; NaN where nothing fits."""
    left_T = sample.logp_T - sample.logq_T
    for s, span in enumerate(sample.spans()):
        if chosen_S[s]:
            lag, start = int(alignment.lag_S[s]), int(alignment.from_S[s])
            at = np.arange(start, span.stop - span.start) + lag
            inside = (at >= 0) & (at < span.stop - span.start)
            own = np.arange(span.start + start, span.stop)
            source = span.start + at[inside]
            left_T[own] = np.nan
            known_I = np.where(sample.counts_T[source], sample.logp_T[source], np.nan)
            left_T[own[inside]] = known_I - sample.logq_T[own[inside]]
    return left_T[sample.kept]


def lag_scan(sample: Sample, alignment: Alignment) -> dict[int, float]:
    """The mean of min(|π[t + lag] − μ[t]|, 2) in nats, by lag; over the responses out of step, if there are any."""
    sums = {lag: np.zeros(2) for lag in sorted((0, *LAGS))}
    out_of_step_S = alignment.lag_S != 0
    for s, span in enumerate(sample.spans()):
        if out_of_step_S.any() and not out_of_step_S[s]:
            continue
        for lag in sums:
            cost_T = _cost(sample.logq_T[span], sample.logp_T[span], sample.counts_T[span], lag)
            known = np.isfinite(cost_T)
            sums[lag] += (cost_T[known].sum(), known.sum())
    return {lag: float(total / count) if count else float("nan") for lag, (total, count) in sums.items()}


def _align(logq_T: np.ndarray, logp_T: np.ndarray, counts_T: np.ndarray) -> tuple[float, int, int, bool]:
    zero_T = _cost(logq_T, logp_T, counts_T, 0)
    gap = _mean(zero_T)
    if not gap >= _REAL or np.isfinite(zero_T).sum() < _SHORTEST:
        return gap, 0, 0, False
    best = (gap, 0, 0)
    head_T = np.concatenate([[0.0], np.nancumsum(zero_T)])
    for lag in LAGS:
        cost_T = _cost(logq_T, logp_T, counts_T, lag)
        left, start = _best_start(head_T, cost_T)
        if left < best[0]:
            best = (left, lag, start)
    left, lag, start = best
    better = left < _FITS_BETTER * gap
    return (gap, 0, 0, better) if lag == 0 or left > _FITS * gap else (gap, lag, start, better)


def _best_start(head_T: np.ndarray, cost_T: np.ndarray) -> tuple[float, int]:
    """Mean cost when the tokens before the start stand as they are and the others are shifted; the best start."""
    known_T = np.isfinite(cost_T)
    tail_T = np.concatenate([np.nancumsum(cost_T[::-1])[::-1], [0.0]])
    after_T = np.concatenate([np.cumsum(known_T[::-1])[::-1], [0]])
    length = len(cost_T)
    starts = np.arange(length + 1)
    possible = (after_T >= _SHORTEST) & ((starts == 0) | (starts >= _HEAD))
    if not possible.any():
        return np.inf, 0
    mean_T = np.where(possible, (head_T + tail_T) / np.maximum(starts + after_T, 1), np.inf)
    start = int(np.argmin(mean_T))
    whole = mean_T[0]
    if start and possible[0] and whole <= 1.1 * mean_T[start] + 0.01:  # the simpler story, if it tells as much
        return float(whole), 0
    return float(mean_T[start]), start


def _cost(logq_T: np.ndarray, logp_T: np.ndarray, counts_T: np.ndarray, lag: int) -> np.ndarray:
    """min(|π[t + lag] − μ[t]|, 2) of each token; NaN where one of the two is missing."""
    cost_T = np.full(len(logq_T), np.nan)
    length = len(logq_T) - abs(lag)
    if length <= 0:
        return cost_T
    q = slice(max(0, -lag), max(0, -lag) + length)
    p = slice(max(0, lag), max(0, lag) + length)
    counted = counts_T[q] & counts_T[p]
    with np.errstate(invalid="ignore"):
        cost_T[q] = np.where(counted, np.minimum(np.abs(logp_T[p] - logq_T[q]), _MOST), np.nan)
    return cost_T


def _mean(cost_T: np.ndarray) -> float:
    known = cost_T[np.isfinite(cost_T)]
    return float(known.mean()) if len(known) else 0.0
