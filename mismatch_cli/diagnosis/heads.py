"""The first tokens of whole groups, to see whether a response's log-probabilities stand with another response.

Letters: `_R` the responses that are kept, `_H` their first tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mismatch_cli.batch import TokenBatch
from mismatch_cli.metrics.hashing import hash_keys
from mismatch_cli.metrics.pairs import Pair

TOKENS = 128  # of a response
MOST_RESPONSES = 2**12
_MOST = 2.0  # nats: one token counts for at most this much
MISFIT = 0.1  # nats on an average token: below, a response fits as it stands
_FITS = 0.3  # of the gap may be left where the other response is the right one
_SHORTEST, _SHORTEST_ELSEWHERE = 6, 16  # tokens in common: many responses of other prompts would fit by chance


@dataclass(frozen=True)
class Heads:
    """The first tokens of some groups of responses, and which of them is which."""

    step_R: np.ndarray
    prompt_id_R: np.ndarray
    sample_index_R: np.ndarray
    logq_RH: np.ndarray  # float32, nats; NaN where a token does not count, or there is none
    logp_RH: np.ndarray

    @cached_property
    def group_R(self) -> np.ndarray:
        """Which responses answer the same prompt in the same step: one number for each group."""
        return np.unique(np.stack([self.step_R, self.prompt_id_R]), axis=1, return_inverse=True)[1].ravel()

    @cached_property
    def rows(self) -> dict[tuple[int, int, int], int]:
        """The index of each response, by step, prompt and sample."""
        keys = zip(self.step_R.tolist(), self.prompt_id_R.tolist(), self.sample_index_R.tolist(), strict=True)
        return {key: row for row, key in enumerate(keys)}


@dataclass(frozen=True)
class Exchanges:
    """Which responses do not fit as they stand, and whose log-probabilities they hold instead."""

    heads: Heads
    misfit_R: np.ndarray  # bool
    partner_R: np.ndarray  # index of the response whose log π fits this one's log μ; −1 = none

    @property
    def exchanged_R(self) -> np.ndarray:
        return self.partner_R >= 0


class HeadCollector:
    """Keeps the groups with the smallest hashes, up to a number of responses: the same ones in any sharding."""

    def __init__(self, pair: Pair, most_responses: int = MOST_RESPONSES) -> None:
        self._pair, self._most = pair, most_responses
        self._rows: dict[tuple[int, int, int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._limit = 2**64

    def update(self, batch: TokenBatch) -> None:
        """Take in one table; of a response that is used several times the first use."""
        keys = [k.numpy() for k in (batch.step_S, batch.prompt_id_S, batch.sample_index_S)]
        hash_S = hash_keys(*keys[:2], seed=4)
        logq_T, logp_T = (getattr(batch, name).numpy() for name in (self._pair.reference, self._pair.current))
        mask_T, offset_S1 = batch.loss_mask_T.numpy(), batch.offset_S1.numpy()
        for s in np.flatnonzero(hash_S <= np.uint64(min(self._limit, 2**64 - 1))).tolist():
            step, prompt, index = (int(k[s]) for k in keys)
            key = (int(hash_S[s]), step, prompt, index)
            if key[0] >= self._limit or key in self._rows:
                continue
            own = slice(int(offset_S1[s]), min(int(offset_S1[s + 1]), int(offset_S1[s]) + TOKENS))
            self._rows[key] = (_head(logq_T[own], mask_T[own]), _head(logp_T[own], mask_T[own]))
            if len(self._rows) > 2 * self._most:
                self._shrink()

    def _shrink(self) -> None:
        """Drop whole groups, those with the largest hashes first; the last one stays, whatever its size."""
        order = sorted(self._rows)
        if len(order) > self._most:
            self._limit = max(order[self._most][0], order[0][0] + 1)
        self._rows = {key: self._rows[key] for key in order if key[0] < self._limit}

    def result(self) -> Heads:
        """The heads, in the order of steps, prompts and samples."""
        self._shrink()
        order = sorted(self._rows, key=lambda key: key[1:])
        keys = np.array([key[1:] for key in order], dtype=np.int64).reshape(-1, 3)
        logq, logp = (np.array([self._rows[k][side] for k in order]).reshape(-1, TOKENS) for side in (0, 1))
        return Heads(keys[:, 0], keys[:, 1], keys[:, 2], logq, logp)


def _head(logp_H: np.ndarray, mask_H: np.ndarray) -> np.ndarray:
    head = np.full(TOKENS, np.nan, dtype=np.float32)
    head[: len(logp_H)] = np.where(mask_H & np.isfinite(logp_H), logp_H, np.nan)
    return head


def find_exchanges(heads: Heads) -> Exchanges:
    """Look for each response that does not fit as it stands whether it fits with another one of its group, or any."""
    own_R = _costs(heads.logq_RH, heads.logp_RH, _SHORTEST)
    misfit_R = np.isfinite(own_R) & (own_R >= MISFIT)
    partner_R = np.full(len(own_R), -1)
    for r in np.flatnonzero(misfit_R).tolist():
        partner_R[r] = _partner(heads, r, np.flatnonzero(heads.group_R == heads.group_R[r]), own_R[r], _SHORTEST)
    alone = np.flatnonzero(misfit_R & (partner_R < 0))
    everywhere = np.arange(len(own_R))
    tried = alone[:: max(1, len(alone) // _TRIED)]
    found = [_partner(heads, r, everywhere, own_R[r], _SHORTEST_ELSEWHERE) for r in tried.tolist()]
    if 2 * sum(partner >= 0 for partner in found) > len(found):
        for r in alone.tolist():
            partner_R[r] = _partner(heads, r, everywhere, own_R[r], _SHORTEST_ELSEWHERE)
    return Exchanges(heads, misfit_R, partner_R)


_TRIED = 128  # responses that are held against all others before all of them are
_ANY = 64  # responses that say how well any log π fits


def _partner(heads: Heads, r: int, among: np.ndarray, own: float, shortest: int) -> int:
    """The response whose log π fits the log μ of this one far better than its own and than most do; −1 = none."""
    cost = _costs(heads.logq_RH[r][None], heads.logp_RH[among], shortest)
    cost[~np.isfinite(cost) | (among == r)] = np.inf
    best = int(np.argmin(cost))
    if not cost[best] <= _FITS * own:
        return -1
    any_R = np.linspace(0, len(heads.step_R) - 1, _ANY).astype(int)
    usual = np.nanmedian(_costs(heads.logq_RH[r][None], heads.logp_RH[any_R], 1))
    return int(among[best]) if cost[best] <= _FITS * usual else -1


def _costs(logq_RH: np.ndarray, logp_RH: np.ndarray, shortest: int) -> np.ndarray:
    """The mean of min(|log π − log μ|, 2) over the tokens that both have, nats; NaN for fewer than `shortest`."""
    cost_RH = np.minimum(np.abs(logp_RH - logq_RH), _MOST)
    known_R = np.isfinite(cost_RH).sum(axis=1)
    return np.where(known_R >= shortest, np.nansum(cost_RH, axis=1) / np.maximum(known_R, 1), np.nan)
