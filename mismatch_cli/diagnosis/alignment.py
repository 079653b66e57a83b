"""Where two columns of log-probabilities match: in place, shifted, up to some token, or in another
response.

Letters: `_R` responses whose first tokens are kept, `_H` these tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
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
# Times, and nats: a whole shift is simpler than one from a token on
_AS_GOOD, _AS_SMALL = 1.1, 0.01
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
    real = real_gap(sample)
    columns = [
        (sample.logq_T[span], sample.logp_T[span], sample.counts_T[span]) for span in sample.spans()
    ]
    alignments = [aligned(*own, real) for own in columns]
    gap_S, lag_S, start_S, better_S = np.array(alignments, dtype=np.float64).reshape(-1, 4).T
    misfit: list[int] = np.flatnonzero((lag_S == 0) & (gap_S >= real)).tolist()
    # Far lags take time: of very many misfits, evenly spread ones show whether there is one
    for s in misfit[:: max(1, len(misfit) // _MOST_TRIED)]:
        lag_S[s] = far_lag(*columns[s], float(gap_S[s]))
        better_S[s] = better_S[s] or lag_S[s] != 0
    return Alignment(gap_S, lag_S.astype(np.int64), start_S.astype(np.int64), better_S > 0)


def real_gap(sample: Sample) -> float:
    """The least gap of a response that may be shifted, mean nats per token: a shift makes a gap as
    large as the steps of log μ from token to token.
    """
    step_T = np.abs(np.diff(sample.logq_T))
    inside_T = sample.counts_T[1:] & sample.counts_T[:-1] & (np.diff(sample.response_T) == 0)
    if not inside_T.any():
        return _REAL
    steps = np.minimum(step_T[inside_T], _MOST)
    return min(_REAL, _OF_STEPS * float(steps.mean()))


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
            shifted = np.arange(span.start + int(alignment.from_S[s]), span.stop)
            partner = shifted + int(alignment.lag_S[s])
            has_partner = (partner >= span.start) & (partner < span.stop)
            left_T[shifted] = np.nan
            shifted, partner = shifted[has_partner], partner[has_partner]
            logp_I = np.where(sample.counts_T[partner], sample.logp_T[partner], np.nan)
            left_T[shifted] = logp_I - sample.logq_T[shifted]
    return left_T[sample.index_N]


def lag_scan(sample: Sample, alignment: Alignment) -> dict[int, float]:
    """The mean of min(|π[t + lag] − μ[t]|, 2) in nats, by lag; over the shifted responses, if
    there are any.
    """
    shown_S = alignment.lag_S != 0
    if not shown_S.any():
        shown_S = np.ones(sample.num_responses, dtype=bool)
    scan = {}
    for lag in sorted((0, *LAGS)):
        total, count = 0.0, 0
        for s, span in enumerate(sample.spans()):
            if shown_S[s]:
                own = sample.logq_T[span], sample.logp_T[span], sample.counts_T[span]
                cost_T = _cost(*own, lag)
                measured_T = np.isfinite(cost_T)
                total += float(cost_T[measured_T].sum())
                count += int(measured_T.sum())
        scan[lag] = total / count if count else float("nan")
    return scan


def aligned(
    logq_T: np.ndarray, logp_T: np.ndarray, counts_T: np.ndarray, real: float
) -> tuple[float, int, int, bool]:
    """The gap, lag, first shifted token and `better` of one response, as `Alignment` has them.

    `real`: the least gap for which a lag is looked for, mean nats per token.
    """
    unshifted_T = _cost(logq_T, logp_T, counts_T, 0)
    gap = _mean(unshifted_T)
    if not gap >= real or np.isfinite(unshifted_T).sum() < SHORTEST:
        return gap, 0, 0, False
    # A peaked policy has few uncertain tokens, too few for a first shifted one
    if gap < _REAL:
        lag = _whole_lag(logq_T, logp_T, counts_T, unshifted_T, gap)
        return gap, lag, 0, lag != 0
    before = _running(unshifted_T)
    fits = {lag: _best_start(before, _cost(logq_T, logp_T, counts_T, lag)) for lag in LAGS}
    best = min(fits, key=lambda lag: fits[lag][0])
    left, start = fits[best]
    better = left < _FITS_BETTER * gap
    if left > _FITS * gap:
        return gap, 0, 0, better
    return gap, best, start, better


def _whole_lag(
    logq_T: np.ndarray,
    logp_T: np.ndarray,
    counts_T: np.ndarray,
    unshifted_T: np.ndarray,
    gap: float,
) -> int:
    """The lag that fits a whole response of a peaked policy; 0 if none does.

    A token that a lag leaves without a partner keeps its gap: it may be the only uncertain one.
    """
    left = {}
    for lag in LAGS:
        cost_T = _cost(logq_T, logp_T, counts_T, lag)
        left[lag] = _mean(np.where(np.isfinite(cost_T), cost_T, unshifted_T))
    best = min(left, key=lambda lag: left[lag])
    return best if left[best] <= _FITS * gap else 0


def _running(cost_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum and the number of the costs before each token; tokens without one, such as those of
    tools, are in neither.
    """
    sum_T1 = np.concatenate([[0.0], np.nancumsum(cost_T)])
    return sum_T1, np.concatenate([[0], np.cumsum(np.isfinite(cost_T))])


def _best_start(before: tuple[np.ndarray, np.ndarray], shifted_T: np.ndarray) -> tuple[float, int]:
    """The mean cost of a response that is shifted from some token on, and that token, where the
    mean is smallest. `before`: `_running` of the unshifted costs.
    """
    before_T1, count_before_T1 = before
    after_T1, count_after_T1 = (sums_T1[::-1] for sums_T1 in _running(shifted_T[::-1]))
    is_first_T1 = np.arange(len(shifted_T) + 1) == 0
    possible_T1 = (count_after_T1 >= SHORTEST) & (is_first_T1 | (count_before_T1 >= _HEAD))
    if not possible_T1.any():
        return np.inf, 0
    mean_T1 = (before_T1 + after_T1) / np.maximum(count_before_T1 + count_after_T1, 1)
    mean_T1 = np.where(possible_T1, mean_T1, np.inf)
    start = int(np.argmin(mean_T1))
    # A whole shift is the simpler explanation, if about as good
    if mean_T1[0] <= _AS_GOOD * mean_T1[start] + _AS_SMALL:
        start = 0
    return float(mean_T1[start]), start


def _cost(logq_T: np.ndarray, logp_T: np.ndarray, counts_T: np.ndarray, lag: int) -> np.ndarray:
    """min(|π[t + lag] − μ[t]|, 2) of each token; NaN where either is missing."""
    cost_T = np.full(len(logq_T), np.nan)
    length = len(logq_T) - abs(lag)
    if length <= 0:
        return cost_T
    q = slice(max(0, -lag), max(0, -lag) + length)
    p = slice(max(0, lag), max(0, lag) + length)
    with np.errstate(invalid="ignore"):
        gap_I = np.minimum(np.abs(logp_T[p] - logq_T[q]), _MOST)
    cost_T[q] = np.where(counts_T[q] & counts_T[p], gap_I, np.nan)
    return cost_T


def _mean(cost_T: np.ndarray) -> float:
    """The mean over the tokens that have a cost; 0 without any."""
    measured = cost_T[np.isfinite(cost_T)]
    return float(measured.mean()) if len(measured) else 0.0


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
    ids_RH: np.ndarray  # float32, which holds ids exactly below 2^24; NaN there, too

    @cached_property
    def group_R(self) -> np.ndarray:
        """The group number of each response: the same for the same prompt in the same step."""
        keys = np.stack([self.step_R, self.prompt_id_R])
        _, group_R = np.unique(keys, axis=1, return_inverse=True)
        return group_R.ravel()

    @cached_property
    def index_of(self) -> dict[tuple[int, int, int], int]:
        """The index of each response, by step, prompt and sample."""
        keys = np.stack([self.step_R, self.prompt_id_R, self.sample_index_R], axis=1)
        return {tuple(key): r for r, key in enumerate(keys.tolist())}


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
        self._pair = pair
        self._most = most_responses
        self.limit = limit
        # The heads of both sides and of the ids, by hash, step, prompt and sample
        self._rows: dict[tuple[int, int, int, int], np.ndarray] = {}

    def update(self, batch: TokenBatch) -> None:
        """Add one table; of a response used several times, the first use."""
        step_S, prompt_id_S, index_S = batch.step_S, batch.prompt_id_S, batch.sample_index_S
        hash_S = hash_keys(step_S, prompt_id_S, seed=4)
        sides = (self._pair.reference, self._pair.current)
        columns = [*(getattr(batch, side) for side in sides), batch.response_ids_T]
        below_S = hash_S <= np.uint64(min(self.limit, NO_LIMIT - 1))
        for s in np.flatnonzero(below_S).tolist():
            key = (int(hash_S[s]), int(step_S[s]), int(prompt_id_S[s]), int(index_S[s]))
            # The limit may have fallen in this loop
            if key[0] >= self.limit or key in self._rows:
                continue
            start, stop = batch.offset_S1[s : s + 2].tolist()
            head = slice(start, min(stop, start + HEAD_TOKENS))
            self._rows[key] = _heads(columns, head, batch.loss_mask_T[head])
            if len(self._rows) > 2 * self._most:
                self._shrink()

    def merge(self, other: HeadCollector) -> None:
        """Add another collector's responses: those below both limits, and the first of two uses."""
        self.limit = min(self.limit, other.limit)
        self._rows = other._rows | self._rows
        self._shrink()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only what may be kept."""
        self._shrink()
        return super().__getstate__()

    def _shrink(self) -> None:
        """Drop whole groups, largest hashes first; the last group is kept whatever its size."""
        keys = sorted(key for key in self._rows if key[0] < self.limit)
        if len(keys) > self._most:
            self.limit = max(keys[self._most][0], keys[0][0] + 1)
        self._rows = {key: self._rows[key] for key in keys if key[0] < self.limit}

    def result(self) -> Heads:
        """The heads, in the order of steps, prompts and samples."""
        self._shrink()
        order = sorted(self._rows, key=lambda key: key[1:])
        keys_R3 = np.array([key[1:] for key in order], dtype=np.int64).reshape(-1, 3)
        heads_R3H = np.array([self._rows[key] for key in order]).reshape(-1, 3, HEAD_TOKENS)
        return Heads(*keys_R3.T, *heads_R3H.transpose(1, 0, 2))


def _heads(columns: Sequence[np.ndarray | None], tokens: slice, mask_H: np.ndarray) -> np.ndarray:
    """Some tokens of the columns, a row for each; NaN where they do not count, or are unknown."""
    heads = np.full((len(columns), HEAD_TOKENS), np.nan, dtype=np.float32)
    for head, column in zip(heads, columns, strict=True):
        if column is not None:
            values = column[tokens]
            usable_H = mask_H & np.isfinite(values)
            head[: len(values)][usable_H] = values[usable_H]
    return heads


def find_exchanges(heads: Heads) -> Exchanges:
    """Find, for each response that does not fit its own values, another that does: in its group,
    else anywhere.
    """
    own_cost_R = _costs(heads.logq_RH, heads.logp_RH, SHORTEST)
    misfit_R = np.isfinite(own_cost_R) & (own_cost_R >= MISFIT)
    partner_R = np.full(len(own_cost_R), -1)
    for r in np.flatnonzero(misfit_R).tolist():
        group = np.flatnonzero(heads.group_R == heads.group_R[r])
        partner_R[r] = _partner(heads, r, group, own_cost_R[r], SHORTEST)
    everywhere = np.arange(len(own_cost_R))

    def partner_anywhere(r: int) -> int:
        return _partner(heads, r, everywhere, own_cost_R[r], SHORTEST_ELSEWHERE)

    alone = np.flatnonzero(misfit_R & (partner_R < 0)).tolist()
    # Comparing each with all others takes time: only if a part of them shows that it helps
    tried = alone[:: max(1, len(alone) // _TRIED)]
    helped = [r for r in tried if partner_anywhere(r) >= 0]
    if 2 * len(helped) > len(tried):
        partner_R[alone] = list(map(partner_anywhere, alone))
    return Exchanges(heads, misfit_R, partner_R)


def _partner(heads: Heads, r: int, among: np.ndarray, own: float, shortest: int) -> int:
    """The response whose log π fits this one's log μ far better than its own and than most do;
    −1 = none.
    """
    logq_1H = heads.logq_RH[r][None]
    cost = _costs(logq_1H, heads.logp_RH[among], shortest)
    # An exchange between nearly equal texts could not be seen
    is_alike = _are_alike(heads.ids_RH[r], heads.ids_RH[among])
    cost[~np.isfinite(cost) | (among == r) | is_alike] = np.inf
    best = int(np.argmin(cost))
    if not cost[best] <= _FITS_ELSEWHERE * own:
        return -1
    # A response of certain tokens fits many others
    any_R = np.unique(np.linspace(0, len(heads.step_R) - 1, _ANY).astype(int))
    usual = np.nanmedian(_costs(logq_1H, heads.logp_RH[any_R], 1))
    return int(among[best]) if cost[best] <= _FITS_ELSEWHERE * usual else -1


def _are_alike(ids_H: np.ndarray, ids_RH: np.ndarray) -> np.ndarray:
    """Which texts have the same token at most places that both have; none without ids."""
    shared_R = (np.isfinite(ids_H) & np.isfinite(ids_RH)).sum(axis=1)
    same_R = (ids_H == ids_RH).sum(axis=1)
    return (shared_R > 0) & (same_R >= (1 - _FITS_ELSEWHERE) * shared_R)


def _costs(logq_RH: np.ndarray, logp_RH: np.ndarray, shortest: int) -> np.ndarray:
    """The mean of min(|log π − log μ|, 2) over shared tokens, nats; NaN for fewer than
    `shortest`.
    """
    cost_RH = np.minimum(np.abs(logp_RH - logq_RH), _MOST)
    shared_R = np.isfinite(cost_RH).sum(axis=1)
    mean_R = np.nansum(cost_RH, axis=1) / np.maximum(shared_R, 1)
    return np.where(shared_R >= shortest, mean_R, np.nan)
