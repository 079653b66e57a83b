"""The shape that most masks share: a token is blocked when its update moves p further away, beyond a threshold."""

from __future__ import annotations

import torch
from torch import Tensor

from mismatch_cli.trust_regions import Decision


def signed(divergence_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """A divergence with the sign of p − q; 0 where the sampled token's probability is the same in both.

    The sign is that of log p − log q, which holds where both probabilities underflow.
    """
    return divergence_T.copysign(log_ratio_T).masked_fill(log_ratio_T == 0, 0.0)


def one_sided(statistic_T: Tensor, advantage_T: Tensor, *, low: float, high: float) -> Decision:
    """Block A > 0 where the statistic is above `high`, and A < 0 where it is below −`low`; equality is kept.

    The statistic has the sign of p − q. Thresholds are rounded to its dtype.
    """
    away_T = statistic_T * advantage_T.sign().to(statistic_T.dtype)
    limit: float | Tensor = high
    if low != high:
        limit = torch.where(advantage_T > 0, statistic_T.new_tensor(high), statistic_T.new_tensor(low))
    return Decision(~(away_T > limit), statistic_T)
