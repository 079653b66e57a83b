"""Where two columns of log-probabilities match: in place, shifted, up to some token, or in another
response.

Letters: `_R` responses whose first tokens are kept, `_H` these tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mismatch_cli.base.hashing import hash_keys
from mismatch_cli.diagnosis.sample import NO_LIMIT, Sample
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.rules.batch import TokenBatch

LAGS = (-3, -2, -1, 1, 2, 3)
# Further lags, for whole responses that no small one fits: that many lags need more tokens, and a
# better fit, not to fit by chance
_FURTHEST, _SHARED, _FITS_FAR = 64, 12, 0.2
_MOST_TRIED = 512  # responses
_MOST = 2.0  # nats: cap on one token, so that a single outlier does not decide
SHORTEST = 6  # tokens: in fewer, some lag fits by chance
_AS_GOOD, _AS_SMALL = (
    1.1,
    0.01,
)  # times, and nats: a whole shift is simpler than one from a token on
_HEAD = 3  # tokens that must fit unshifted before a shift may begin
_REAL = 0.15  # mean nats per token: a shift makes a larger gap
_OF_STEPS = 0.5  # of what log μ changes from token to token, where that is less: a peaked policy
_FITS = 0.35  # of the gap that may be left if a shift is the cause
_FITS_BETTER = 0.8  # or this much, if other responses are clearly shifted


@dataclass(frozen=True)
class Alignment:
    """For each response: its mean gap unshifted, the lag that fits best, and where the shift
    begins.
    """

    gap_S: np.ndarray  # nats, mean of min(|d|, 2)
    lag_S: np.ndarray  # π[t + lag] fits μ[t]; 0 = unshifted
    from_S: np.ndarray  # the first token that is shifted; 0 = all of them
    better_S: np.ndarray  # bool: some lag leaves much less of the gap, though perhaps still a lot

    @property
    def shifted_S(self) -> np.ndarray:
        """Shifted as a whole."""
        return (self.lag_S != 0) & (self.from_S == 0)

    @property
    def broken_S(self) -> np.ndarray:
        """In step up to some token, shifted from there on."""
        return (self.lag_S != 0) & (self.from_S > 0)


def align(sample: Sample) -> Alignment:
    """Find for each response the lag, and its first token, that leave the smallest gap."""
    spans = list(sample.spans())
    real = real_gap(sample)
    alignments = [
        aligned(sample.logq_T[s], sample.logp_T[s], sample.counts_T[s], real) for s in spans
    ]
    gap_S, lag_S, start_S, better_S = np.array(alignments, dtype=np.float64).reshape(-1, 4).T
    misfit = np.flatnonzero((lag_S == 0) & (gap_S >= real))
    for s in misfit[:: max(1, len(misfit) // _MOST_TRIED)].tolist():
        span = spans[s]
        lag_S[s] = far_lag(
            sample.logq_T[span], sample.logp_T[span], sample.counts_T[span], float(gap_S[s])
        )
        better_S[s] = better_S[s] or lag_S[s] != 0
    return Alignment(gap_S, lag_S.astype(np.int64), start_S.astype(np.int64), better_S > 0)


def real_gap(sample: Sample) -> float:
    """The least gap of a response that may be shifted, mean nats per token: a shift makes a gap as
    large as the steps of log μ from token to token.
    """
    step_T = np.abs(np.diff(sample.logq_T))
    inside_T = sample.counts_T[1:] & sample.counts_T[:-1] & (np.diff(sample.response_T) == 0)
    steps = np.minimum(step_T[inside_T], _MOST)
    return min(_REAL, _OF_STEPS * float(steps.mean())) if len(steps) else _REAL


def far_lag(logq_T: np.ndarray, logp_T: np.ndarray, counts_T: np.ndarray, gap: float) -> int:
    """The lag beyond `LAGS` that fits a whole response best; 0 if none fits well."""
    best, best_lag = _FITS_FAR * gap, 0
    furthest = min(_FURTHEST, len(logq_T) - _SHARED)
    for size in range(max(LAGS) + 1, furthest + 1):
        for lag in (-size, size):
            cost_T = _cost(logq_T, logp_T, counts_T, lag)
            left = _mean(cost_T)
            if left < best and np.isfinite(cost_T).sum() >= _SHARED:
                best, best_lag = left, lag
    return best_lag


def in_step_N(sample: Sample, alignment: Alignment, chosen_S: np.ndarray) -> np.ndarray:
    """log π − log μ of the tokens that count, with the chosen responses shifted back; NaN where
    nothing fits.
    """
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
    """The mean of min(|π[t + lag] − μ[t]|, 2) in nats, by lag; over the shifted responses, if
    there are any.
    """
    sums = {lag: np.zeros(2) for lag in sorted((0, *LAGS))}
    out_of_step_S = alignment.lag_S != 0
    for s, span in enumerate(sample.spans()):
        if out_of_step_S.any() and not out_of_step_S[s]:
            continue
        for lag in sums:
            cost_T = _cost(sample.logq_T[span], sample.logp_T[span], sample.counts_T[span], lag)
            known = np.isfinite(cost_T)
            sums[lag] += (cost_T[known].sum(), known.sum())
    return {
        lag: float(total / count) if count else float("nan") for lag, (total, count) in sums.items()
    }


def aligned(
    logq_T: np.ndarray, logp_T: np.ndarray, counts_T: np.ndarray, real: float
) -> tuple[float, int, int, bool]:
    zero_T = _cost(logq_T, logp_T, counts_T, 0)
    gap = _mean(zero_T)
    if not gap >= real or np.isfinite(zero_T).sum() < SHORTEST:
        return gap, 0, 0, False
    if gap < _REAL:
        lag = _whole_lag(logq_T, logp_T, counts_T, zero_T, gap)
        return gap, lag, 0, lag != 0
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


def _whole_lag(
    logq_T: np.ndarray, logp_T: np.ndarray, counts_T: np.ndarray, zero_T: np.ndarray, gap: float
) -> int:
    """The lag that fits a whole response of a peaked policy; 0 if none does.

    A token that a lag leaves without a partner keeps its gap: it may be the only uncertain one.
    """
    left = {}
    for lag in LAGS:
        cost_T = _cost(logq_T, logp_T, counts_T, lag)
        left[lag] = _mean(np.where(np.isfinite(cost_T), cost_T, zero_T))
    best = min(left, key=lambda lag: left[lag])
    return best if left[best] <= _FITS * gap else 0


def _best_start(head_T: np.ndarray, cost_T: np.ndarray) -> tuple[float, int]:
    """The best start of the shift, with the mean cost if tokens before it are unshifted."""
    known_T = np.isfinite(cost_T)
    tail_T = np.concatenate([np.nancumsum(cost_T[::-1])[::-1], [0.0]])
    after_T = np.concatenate([np.cumsum(known_T[::-1])[::-1], [0]])
    length = len(cost_T)
    starts = np.arange(length + 1)
    possible = (after_T >= SHORTEST) & ((starts == 0) | (starts >= _HEAD))
    if not possible.any():
        return np.inf, 0
    mean_T = np.where(possible, (head_T + tail_T) / np.maximum(starts + after_T, 1), np.inf)
    start = int(np.argmin(mean_T))
    whole = mean_T[0]
    # The simpler explanation, if about as good
    if start and possible[0] and whole <= _AS_GOOD * mean_T[start] + _AS_SMALL:
        return float(whole), 0
    return float(mean_T[start]), start


def _cost(logq_T: np.ndarray, logp_T: np.ndarray, counts_T: np.ndarray, lag: int) -> np.ndarray:
    """min(|π[t + lag] − μ[t]|, 2) of each token; NaN where either is missing."""
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


HEAD_TOKENS = 128  # of a response
MOST_RESPONSES = 2**12
MISFIT = 0.1  # mean nats per token: below this, a response fits its own values
_FITS_ELSEWHERE = 0.3  # of the gap that may be left if the other response is the right one
SHORTEST_ELSEWHERE = 16  # shared tokens: with fewer, responses to other prompts fit by chance
_TRIED = 128  # responses to compare with all others before comparing every response
_ANY = 64  # responses that show how well an arbitrary log π fits


@dataclass(frozen=True)
class Heads:
    """The first tokens of some groups of responses, with their keys."""

    step_R: np.ndarray
    prompt_id_R: np.ndarray
    sample_index_R: np.ndarray
    logq_RH: np.ndarray  # float32, nats; NaN where a token does not count or does not exist
    logp_RH: np.ndarray

    @cached_property
    def group_R(self) -> np.ndarray:
        """The group number of each response: the same for the same prompt in the same step."""
        return np.unique(np.stack([self.step_R, self.prompt_id_R]), axis=1, return_inverse=True)[
            1
        ].ravel()

    @cached_property
    def rows(self) -> dict[tuple[int, int, int], int]:
        """The index of each response, by step, prompt and sample."""
        keys = zip(
            self.step_R.tolist(),
            self.prompt_id_R.tolist(),
            self.sample_index_R.tolist(),
            strict=True,
        )
        return {key: row for row, key in enumerate(keys)}


@dataclass(frozen=True)
class Exchanges:
    """Which responses do not fit their own values, and whose log-probabilities they have
    instead.
    """

    heads: Heads
    misfit_R: np.ndarray  # bool
    partner_R: np.ndarray  # index of the response whose log π fits this one's log μ; −1 = none

    @property
    def exchanged_R(self) -> np.ndarray:
        return self.partner_R >= 0


class HeadCollector(Accumulator):
    """Keeps the groups with the smallest hashes, up to a number of responses: the same groups for
    any sharding.

    Hashes of `limit` or above can no longer be kept. A `limit` may be passed in if everything below
    it is complete.
    """

    def __init__(
        self, pair: Pair, most_responses: int = MOST_RESPONSES, limit: int = NO_LIMIT
    ) -> None:
        self._pair, self._most, self.limit = pair, most_responses, limit
        self._rows: dict[tuple[int, int, int, int], tuple[np.ndarray, np.ndarray]] = {}

    def update(self, batch: TokenBatch) -> None:
        """Add one table; of a response used several times, the first use."""
        keys = (batch.step_S, batch.prompt_id_S, batch.sample_index_S)
        hash_S = hash_keys(*keys[:2], seed=4)
        logq_T, logp_T = (
            getattr(batch, name) for name in (self._pair.reference, self._pair.current)
        )
        mask_T, offset_S1 = batch.loss_mask_T, batch.offset_S1
        for s in np.flatnonzero(hash_S <= np.uint64(min(self.limit, NO_LIMIT - 1))).tolist():
            step, prompt, index = (int(k[s]) for k in keys)
            key = (int(hash_S[s]), step, prompt, index)
            if key[0] >= self.limit or key in self._rows:
                continue
            own = slice(
                int(offset_S1[s]), min(int(offset_S1[s + 1]), int(offset_S1[s]) + HEAD_TOKENS)
            )
            self._rows[key] = (_head(logq_T[own], mask_T[own]), _head(logp_T[own], mask_T[own]))
            if len(self._rows) > 2 * self._most:
                self._shrink()

    def merge(self, other: HeadCollector) -> None:
        """Add another collector's responses: those below both limits, and the first of two uses."""
        self.limit = min(self.limit, other.limit)
        self._rows = {
            key: row for key, row in (other._rows | self._rows).items() if key[0] < self.limit
        }
        self._shrink()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only what may be kept."""
        self._shrink()
        return super().__getstate__()

    def _shrink(self) -> None:
        """Drop whole groups, largest hashes first; the last group is kept whatever its size."""
        order = sorted(self._rows)
        if len(order) > self._most:
            self.limit = max(order[self._most][0], order[0][0] + 1)
        self._rows = {key: self._rows[key] for key in order if key[0] < self.limit}

    def result(self) -> Heads:
        """The heads, in the order of steps, prompts and samples."""
        self._shrink()
        order = sorted(self._rows, key=lambda key: key[1:])
        keys = np.array([key[1:] for key in order], dtype=np.int64).reshape(-1, 3)
        logq, logp = (
            np.array([self._rows[k][side] for k in order]).reshape(-1, HEAD_TOKENS)
            for side in (0, 1)
        )
        return Heads(keys[:, 0], keys[:, 1], keys[:, 2], logq, logp)


def _head(logp_H: np.ndarray, mask_H: np.ndarray) -> np.ndarray:
    head = np.full(HEAD_TOKENS, np.nan, dtype=np.float32)
    head[: len(logp_H)] = np.where(mask_H & np.isfinite(logp_H), logp_H, np.nan)
    return head


def find_exchanges(heads: Heads) -> Exchanges:
    """Find, for each response that does not fit its own values, another that does: in its group,
    else anywhere.
    """
    own_R = _costs(heads.logq_RH, heads.logp_RH, SHORTEST)
    misfit_R = np.isfinite(own_R) & (own_R >= MISFIT)
    partner_R = np.full(len(own_R), -1)
    for r in np.flatnonzero(misfit_R).tolist():
        partner_R[r] = _partner(
            heads, r, np.flatnonzero(heads.group_R == heads.group_R[r]), own_R[r], SHORTEST
        )
    alone = np.flatnonzero(misfit_R & (partner_R < 0))
    everywhere = np.arange(len(own_R))
    tried = alone[:: max(1, len(alone) // _TRIED)]
    found = [_partner(heads, r, everywhere, own_R[r], SHORTEST_ELSEWHERE) for r in tried.tolist()]
    if 2 * sum(partner >= 0 for partner in found) > len(found):
        for r in alone.tolist():
            partner_R[r] = _partner(heads, r, everywhere, own_R[r], SHORTEST_ELSEWHERE)
    return Exchanges(heads, misfit_R, partner_R)


def _partner(heads: Heads, r: int, among: np.ndarray, own: float, shortest: int) -> int:
    """The response whose log π fits this one's log μ far better than its own and than most do;
    −1 = none.
    """
    cost = _costs(heads.logq_RH[r][None], heads.logp_RH[among], shortest)
    cost[~np.isfinite(cost) | (among == r)] = np.inf
    best = int(np.argmin(cost))
    if not cost[best] <= _FITS_ELSEWHERE * own:
        return -1
    any_R = np.linspace(0, len(heads.step_R) - 1, _ANY).astype(int)
    usual = np.nanmedian(_costs(heads.logq_RH[r][None], heads.logp_RH[any_R], 1))
    return int(among[best]) if cost[best] <= _FITS_ELSEWHERE * usual else -1


def _costs(logq_RH: np.ndarray, logp_RH: np.ndarray, shortest: int) -> np.ndarray:
    """The mean of min(|log π − log μ|, 2) over shared tokens, nats; NaN for fewer than
    `shortest`.
    """
    cost_RH = np.minimum(np.abs(logp_RH - logq_RH), _MOST)
    known_R = np.isfinite(cost_RH).sum(axis=1)
    return np.where(
        known_R >= shortest, np.nansum(cost_RH, axis=1) / np.maximum(known_R, 1), np.nan
    )
