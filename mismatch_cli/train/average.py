"""A moving average of the trainer's weights, the proximal policy of PPO-EWMA (arXiv 2110.00641)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from mismatch_cli.train.temporary_values import temporary_values


class WeightAverage:
    """θ̄ = Σ β^(t−k) θ(k) / Σ β^(t−k) over the optimiser steps so far, in float32: a copy of the
    weights.

    The initial weights count as one step, and the sum of the powers of β corrects the bias, as in
    the authors' code.
    """

    def __init__(self, weights: Sequence[Tensor], masters: Sequence[Tensor], decay: float) -> None:
        self._weights = weights
        self._masters = masters
        self._decay = decay
        self.tensors = [master.detach().clone() for master in masters]
        self.total = 1.0  # Σ β^(t−k)

    def update(self) -> None:
        """Add the weights after an optimiser step."""
        self.total = self._decay * self.total + 1
        # θ̄ + (θ − θ̄) / Σ β^(t−k) is the same weighted mean, without a second copy.
        with torch.no_grad():
            for average, master in zip(self.tensors, self._masters, strict=True):
                average.lerp_(master, 1 / self.total)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Let the model compute with the average inside the block; then restore its own weights,
        to the bit.
        """
        return temporary_values(self._weights, self.tensors)
