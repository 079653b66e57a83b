"""TV and KL over the whole vocabulary, added up tile by tile while the trainer's logits pass by."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch.nn.functional import pad

from mismatch_cli.divergences import full_kl, full_tv

_ROWS = 64  # tokens of a tile at a time: the divergences need a dozen copies in float64


class RolloutRows:
    """log μ over the whole vocabulary for some of T tokens: rows that lie on disk, of which only tiles are read."""

    def __init__(self, rows: dict[int, np.ndarray] | None = None) -> None:
        self._rows = rows or {}  # token → log μ, float32 [V]

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def tokens(self) -> list[int]:
        return list(self._rows)

    def at(self, tokens: Iterable[int]) -> RolloutRows:
        """The rows of these tokens, which are counted anew from 0."""
        return RolloutRows({new: self._rows[old] for new, old in enumerate(tokens) if old in self._rows})

    def tile(self, tokens: list[int], start: int, width: int) -> torch.Tensor:
        """log μ `[U, width]` of the columns from `start`; −inf beyond the engine's vocabulary."""
        tile_UN = torch.from_numpy(np.stack([self._rows[token][start : start + width] for token in tokens]))
        return pad(tile_UN, (0, width - tile_UN.shape[1]), value=-torch.inf)


class FullDivergence:
    """Running TV and KL(μ‖π), in nats, of T tokens; NaN where the whole μ is not known."""

    def __init__(self, rollout: RolloutRows, log_sum_exp_T: torch.Tensor) -> None:
        self._rollout, self._log_sum_exp_T = rollout, log_sum_exp_T
        self.tv_T = torch.full_like(log_sum_exp_T, torch.nan)
        self.kl_T = self.tv_T.clone()
        for sums_T in (self.tv_T, self.kl_T):
            sums_T[rollout.tokens] = 0

    def update(self, z_TN: torch.Tensor, start: int) -> None:
        """Take in the columns `start … start + N` of the sampler's logits: log π is z − log Σ exp z."""
        tokens = self._rollout.tokens
        for some in (tokens[i : i + _ROWS] for i in range(0, len(tokens), _ROWS)):
            logp_UN = z_TN[some].to(self.tv_T.dtype) - self._log_sum_exp_T[some, None]
            mu_UN = self._rollout.tile(some, start, z_TN.shape[1]).to(logp_UN)
            self.tv_T[some] += full_tv(mu_UN, logp_UN)
            self.kl_T[some] += full_kl(mu_UN, logp_UN)
