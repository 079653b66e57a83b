"""A gap on one side: at full support E_μ[π/μ] is 1, however large the noise, and the kept mass where μ renormalised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.diagnosis.grouped import Mean, mean_over_prompts

ONE_SIDED, _Z = 0.4, 5.0  # of the mean gap; standard errors
_LARGEST_RATIO = 10.0
_HALF, _STEEP = float(np.log(0.5)), 0.2


@dataclass(frozen=True)
class OneSided:
    """Of some tokens: the mean ratio, and the share of the gap where π < μ / 2, more than a truncation takes."""

    ratio: Mean
    gap: float  # mean |d|, nats
    steep: float

    @classmethod
    def of(cls, d_N: np.ndarray, group_N: np.ndarray) -> OneSided:
        gap = float(np.abs(d_N).mean()) if len(d_N) else 0.0
        ratio_N = np.minimum(np.exp(np.minimum(d_N, 3.0)), _LARGEST_RATIO)
        steep = float(-d_N[d_N < _HALF].sum() / (gap * len(d_N))) if gap else 0.0
        return cls(mean_over_prompts(ratio_N, group_N), gap, steep)

    @property
    def renormalised(self) -> bool:
        """Whether the mean ratio misses 1 by a good part of the mean gap, significantly, and no token by much."""
        part = (1 - self.ratio.value) / self.gap if self.gap else 0.0
        return part > ONE_SIDED and -self.ratio.z_from(1.0) > _Z and self.steep < _STEEP
