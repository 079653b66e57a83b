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
        columns = {name: x[keep] for name, x in vars(self).items() if x is not None}
        return replace(self, **columns)

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
    batches = {}
    for pair, (current, reference) in PAIRS.items():
        rows: list[tuple[np.ndarray | None, ...]] = []
        for batch in trace.batches():
            rows += _rows(batch, current, reference)
        columns = list(zip(*rows, strict=True))
        if rows and np.concatenate(columns[2]).any():
            batches[pair] = Padded(*(_stacked(column, dtype) for column in columns))
    return batches


def _rows(
    batch: TokenBatch, current: str, reference: str
) -> Iterator[tuple[np.ndarray | None, ...]]:
    p_T, q_T = getattr(batch, current), getattr(batch, reference)
    if p_T is None or q_T is None:
        return
    counts_T = batch.loss_mask_T & ~np.isnan(p_T) & np.isfinite(q_T)

    def counted(x_T: np.ndarray | None) -> np.ndarray | None:
        return None if x_T is None else np.where(counts_T, x_T, 0)

    def finite(x_T: np.ndarray | None) -> np.ndarray | None:
        return None if x_T is None else np.nan_to_num(x_T)

    columns = [counted(p_T), counted(q_T), counts_T]
    columns += [finite(batch.advantage_T), finite(batch.entropy_trainer_T)]
    recomputed_T = counted(batch.logp_recomputed_T)
    for s in range(batch.num_responses):
        tokens = slice(*batch.offset_S1[s : s + 2])
        # A response whose every trained token lacks a number was not scored
        is_scored = counts_T[tokens].any() or not batch.loss_mask_T[tokens].any()
        if is_scored:
            yield (
                *(None if x_T is None else x_T[tokens] for x_T in columns),
                None if batch.reward_S is None else batch.reward_S[s],
                None if recomputed_T is None else recomputed_T[tokens],
            )


def _stacked(column: tuple[np.ndarray | None, ...], dtype: torch.dtype) -> Tensor | None:
    if any(row is None for row in column):
        return None
    rows = []
    for row in map(torch.as_tensor, column):
        rows.append(row if row.dtype == torch.bool else row.to(dtype))
    if rows[0].ndim == 0:
        return torch.stack(rows)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
