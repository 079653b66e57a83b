"""A bounded sample of judged tokens for the picture of the masks, each with the set of algorithms that block it."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.clipping.judged import Judged
from mismatch_cli.metrics.keep import SmallestRows

SAMPLE_TOKENS = 10_000
_ROW = np.dtype(
    [
        ("key", np.float64),
        ("logp_rollout", np.float32),
        ("logp_trainer", np.float32),
        ("logp_recomputed", np.float32),
        ("advantage", np.float32),
        ("blocked_by", np.uint64),
    ]
)


class JudgedSample:
    """The judged tokens with the smallest hashes of response and position: the same ones in any order and sharding."""

    def __init__(self) -> None:
        self.tokens = SmallestRows(_ROW, SAMPLE_TOKENS)

    def update(self, judged: Judged) -> None:
        hash_N = judged.gaps.token_hash_N
        if judged.judged_N.all():
            self.tokens.offer_hashed(hash_N, lambda chosen: _rows(judged, chosen))
            return
        index_U = np.flatnonzero(judged.judged_N)
        self.tokens.offer_hashed(hash_N[index_U], lambda chosen: _rows(judged, index_U[chosen]))

    def merge(self, other: JudgedSample) -> None:
        self.tokens.merge(other.tokens)

    def result(self) -> np.ndarray:
        """A structured array; `blocked_by` has bit i set where algorithm i blocks the token; NaN: not recomputed."""
        return self.tokens.rows()


def _rows(judged: Judged, index_U: np.ndarray) -> np.ndarray:
    rows = np.zeros(len(index_U), dtype=_ROW)
    gaps, recomputed = judged.gaps, judged.policies.recomputed
    rows["logp_rollout"], rows["logp_trainer"] = gaps.logq_N[index_U], gaps.logp_N[index_U]
    rows["logp_recomputed"] = np.nan if recomputed is None else recomputed.numpy()[index_U]
    rows["advantage"] = judged.advantage_N[index_U]
    rows["blocked_by"] = judged.blocked_by_N[index_U]
    return rows
