"""A trace as a framework's batch: a row per response, padded to the longest, with a mask of
trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.trace.reader import Trace

PAIRS = {
    "recomputed / rollout": ("logp_recomputed_T", "logp_rollout_T"),
    "trainer / rollout": ("logp_trainer_T", "logp_rollout_T"),
    "trainer / recomputed": ("logp_trainer_T", "logp_recomputed_T"),
}


@dataclass
class Padded:
    """Log π and log μ, both 0 where nothing is trained, as are those of the trainer at the weights
    that sampled; [response, position] except for the rewards.
    """

    p: Tensor
    q: Tensor
    mask: Tensor  # bool
    advantage: Tensor | None
    entropy: Tensor | None
    reward: Tensor | None  # [response]
    recomputed: Tensor | None

    @property
    def d(self) -> Tensor:
        return self.p - self.q

    @property
    def r(self) -> Tensor:
        return self.d.exp()

    @property
    def dp(self) -> Tensor:
        return self.p.exp() - self.q.exp()

    def rows(self, keep: Tensor) -> Padded:
        """A subset of the responses."""
        return Padded(*(None if column is None else column[keep] for column in vars(self).values()))

    def in_support(self) -> Padded:
        """The batch without tokens that π excludes."""
        inside = torch.isfinite(self.p)
        return replace(
            self,
            mask=self.mask & inside,
            p=torch.where(inside, self.p, 0),
            q=torch.where(inside, self.q, 0),
        )


def padded(trace: Trace, dtype: torch.dtype = torch.float64) -> dict[str, Padded]:
    """The pairs of policies in a trace, as batches."""
    columns = {}
    for pair, (current, reference) in PAIRS.items():
        rows = [row for batch in trace.batches() for row in _rows(batch, current, reference)]
        if rows and any(row[2].any() for row in rows):
            columns[pair] = Padded(
                *(_stacked(list(column), dtype) for column in zip(*rows, strict=True))
            )
    return columns


def _rows(
    batch: TokenBatch, current: str, reference: str
) -> Iterator[tuple[np.ndarray | None, ...]]:
    p_T, q_T = getattr(batch, current), getattr(batch, reference)
    if p_T is None or q_T is None:
        return
    counts_T = batch.loss_mask_T & ~np.isnan(p_T) & np.isfinite(q_T)
    for s in range(batch.num_responses):
        tokens = slice(*batch.offset_S1[s : s + 2])
        if batch.loss_mask_T[tokens].any() and not counts_T[tokens].any():
            continue  # not scored
        taken = [np.where(counts_T[tokens], column[tokens], 0) for column in (p_T, q_T)]
        others = [
            None if c is None else np.nan_to_num(c[tokens])
            for c in (batch.advantage_T, batch.entropy_trainer_T)
        ]
        third_T = batch.logp_recomputed_T
        yield (
            *taken,
            counts_T[tokens],
            *others,
            None if batch.reward_S is None else batch.reward_S[s],
            None if third_T is None else np.where(counts_T[tokens], third_T[tokens], 0),
        )


def _stacked(column: list[np.ndarray | None], dtype: torch.dtype) -> Tensor | None:
    if any(row is None for row in column):
        return None
    rows = [torch.as_tensor(row) for row in column]
    rows = [row if row.dtype == torch.bool else row.to(dtype) for row in rows]
    return (
        torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        if rows[0].ndim
        else torch.stack(rows)
    )
