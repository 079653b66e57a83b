"""How responses are sampled, and the support that this leaves; shared by engines, scoring and
the manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from mismatch_cli.base.errors import UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SamplingSettings:
    """What the sampler does to the logits, in vLLM's order: temperature, then min-p, top-k,
    top-p.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    max_tokens: int = 128

    def __post_init__(self) -> None:
        if not 0 < self.temperature < inf:
            raise UsageError(
                f"Temperature {self.temperature:g} cannot be measured: greedy decoding has no "
                "sampling distribution to compare. Use --temperature 1 (or any value above 0)."
            )
        if not 0 < self.top_p <= 1:
            raise UsageError(
                f"top_p = {self.top_p:g} is not in (0, 1]. Use top_p = 1 for no truncation."
            )
        if not 0 <= self.min_p < 1:
            raise UsageError(
                f"min_p = {self.min_p:g} is not in [0, 1). Use min_p = 0 for no truncation."
            )
        if self.top_k < 0:
            raise UsageError(f"top_k = {self.top_k} is negative. Use top_k = 0 for no truncation.")
        if self.max_tokens < 1:
            raise UsageError(
                f"--max-tokens {self.max_tokens} leaves nothing to sample. Use at least 1."
            )

    @property
    def truncates(self) -> bool:
        """Whether some tokens can have probability zero."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def process(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """The logits as sampled: float32, divided by the temperature, -inf outside the support.

        The order is the engine's: min-p, then top-k, then top-p on the rest (ascending cumulative
        probability: tokens are dropped while the sum is at most 1 − top_p, but never the most
        probable one).
        """
        logits_NV = logits_NV.float() / self.temperature
        if self.min_p > 0:
            logits_NV = _keep_min_p(logits_NV, self.min_p)
        if 0 < self.top_k < logits_NV.shape[-1]:
            # Logits equal to the k-th stay, so that more than k tokens may be left.
            kth_N1 = logits_NV.topk(self.top_k, dim=-1).values[:, -1:]
            logits_NV = logits_NV.masked_fill(logits_NV < kth_N1, float("-inf"))
        if self.top_p < 1:
            logits_NV = _keep_top_p(logits_NV, self.top_p)
        return logits_NV


def _keep_min_p(logits_NV: torch.Tensor, min_p: float) -> torch.Tensor:
    probs_NV = logits_NV.softmax(dim=-1)
    threshold_N1 = min_p * probs_NV.max(dim=-1, keepdim=True).values
    return logits_NV.masked_fill(probs_NV < threshold_N1, float("-inf"))


def _keep_top_p(logits_NV: torch.Tensor, top_p: float) -> torch.Tensor:
    sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=False)
    rarest_NV = sorted_NV.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    # The last one is the most probable token, which stays also if rounding puts it below 1 − top_p.
    rarest_NV[:, -1] = False
    dropped_NV = rarest_NV.scatter(-1, order_NV, rarest_NV)
    return logits_NV.masked_fill(dropped_NV, float("-inf"))
