"""What is kept of a row of logits while its vocabulary tiles pass by: log-sum-exp, entropy, rank, chosen logits."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

_NEVER = -1e30  # stands for a logit of -inf: probability 0, and their product is 0 as well


class RunningRows:
    """Online statistics of T rows; column 0 of `ids_TQ` is the target, the others are the query ids.

    The sums run over every token but the target and relative to the largest logit so far: what is left out of the
    target's probability is then known to float32's *relative* precision, and log π near 0 does not vanish in 1 + ε.
    """

    def __init__(self, ids_TQ: torch.Tensor, expected_target_T: torch.Tensor) -> None:
        self._ids_TQ = ids_TQ
        self._expected_T1 = expected_target_T[:, None]  # ranks are counted against this
        self._z_TQ = torch.full(ids_TQ.shape, torch.nan, device=ids_TQ.device)
        self._max_T1 = torch.full_like(self._expected_T1, _NEVER)
        # Apple GPUs have no float64.
        sums = torch.float32 if ids_TQ.device.type == "mps" else torch.float64
        self._sum_T = torch.zeros(len(ids_TQ), dtype=sums, device=ids_TQ.device)  # Σ exp(z − max)
        self._weighted_T = torch.zeros_like(self._sum_T)  # Σ (z − max) exp(z − max)
        self._greater_T = torch.zeros_like(self._sum_T)

    @property
    def target_T(self) -> torch.Tensor:
        """The target's logit as it stood in its tile."""
        return self._z_TQ[:, 0]

    @property
    def log_sum_exp_T(self) -> torch.Tensor:
        """log Σ exp z over all columns so far, the target's too."""
        z_T, max_T = self.target_T.to(self._sum_T.dtype), self._max_T1[:, 0].to(self._sum_T.dtype)
        return torch.logaddexp(z_T, max_T + self._sum_T.log())

    def update(self, z_TN: torch.Tensor, scratch_TN: torch.Tensor, start: int) -> None:
        """Take in the columns `start … start + N` of the sampler's logits; both tensors are overwritten."""
        self._greater_T += torch.gt(z_TN, self._expected_T1, out=scratch_TN).sum(dim=1)  # a float count: exact to 2^24
        self._take_ids(z_TN, start)
        self._rescale(z_TN.amax(dim=1, keepdim=True))
        z_TN.sub_(self._max_T1).clamp_(min=_NEVER)
        self._sum_T += torch.exp(z_TN, out=scratch_TN).sum(dim=1)
        self._weighted_T += scratch_TN.mul_(z_TN).sum(dim=1)

    def _take_ids(self, z_TN: torch.Tensor, start: int) -> None:
        """Keep the logits of the ids in this tile, and take the target's own out of it."""
        width = z_TN.shape[1]
        local_TQ = self._ids_TQ - start
        inside_TQ = (local_TQ >= 0) & (local_TQ < width)
        local_TQ = local_TQ.clamp(0, width - 1)
        found_TQ = z_TN.gather(1, local_TQ)
        self._z_TQ = torch.where(inside_TQ, found_TQ, self._z_TQ)
        z_TN.scatter_(1, local_TQ[:, :1], torch.where(inside_TQ[:, :1], _NEVER, found_TQ[:, :1]))

    def _rescale(self, tile_max_T1: torch.Tensor) -> None:
        max_T1 = torch.maximum(self._max_T1, tile_max_T1)
        shift_T = (self._max_T1 - max_T1)[:, 0].to(self._sum_T.dtype)
        factor_T = shift_T.exp()
        self._weighted_T = factor_T * (self._weighted_T + shift_T * self._sum_T)
        self._sum_T = factor_T * self._sum_T
        self._max_T1 = max_T1

    def finish(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """log π of the targets, entropy, rank, and log π at the query ids."""
        z_TQ, max_T = self._z_TQ.to(self._sum_T.dtype), self._max_T1[:, 0].to(self._sum_T.dtype)
        logp_T = logsigmoid(z_TQ[:, 0] - max_T - self._sum_T.log())
        top_T = torch.maximum(max_T, z_TQ[:, 0])
        others_T, own_T = (max_T - top_T).exp(), (z_TQ[:, 0] - top_T).exp()
        sum_T = others_T * self._sum_T + own_T
        weighted_T = others_T * (self._weighted_T + (max_T - top_T) * self._sum_T)
        weighted_T += own_T * (z_TQ[:, 0] - top_T).clamp(min=_NEVER)
        logp_TQ = z_TQ - top_T[:, None] - sum_T.log()[:, None]
        logp_TQ = torch.where(self._ids_TQ == self._ids_TQ[:, :1], logp_T[:, None], logp_TQ)
        entropy_T = sum_T.log() - weighted_T / sum_T
        return logp_T.float(), entropy_T.float(), (self._greater_T + 1).int(), logp_TQ[:, 1:].float()
