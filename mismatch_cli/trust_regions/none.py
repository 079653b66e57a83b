"""No mask: every token is kept."""

import torch
from torch import Tensor

from mismatch_cli.policies import Compared
from mismatch_cli.trust_regions import Decision

FORMULA = "never"
NOT_ONE_SIDED = ""


def trust_region(compared: Compared, advantage_T: Tensor) -> Decision:
    """Keep every token; the statistic is p/q − 1."""
    return Decision(torch.ones_like(advantage_T, dtype=torch.bool), compared.ratio_less_1_T)
