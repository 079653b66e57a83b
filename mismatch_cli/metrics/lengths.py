"""The log-ratio of whole responses against their length."""

from __future__ import annotations

from typing import Any

import numpy as np

from mismatch_cli.metrics.hashing import GROUPS
from mismatch_cli.metrics.jackknife import POSITIVE, SIGNED, interval, left_out

_BINS = 32  # bin b holds lengths 2^(b−1) … 2^b − 1


class LengthProfile:
    """Mean and standard deviation of Σd of the sequences in each octave of length.

    Sums by prompt group, float64: [groups, bins, 3 (sequences, Σ Σd, Σ (Σd)²)].
    """

    def __init__(self) -> None:
        self.sums = np.zeros((GROUPS, _BINS, 3))

    def update(self, group_S: np.ndarray, length_S: np.ndarray, d_S: np.ndarray) -> None:
        """Length in tokens that have a d, and Σd over them; a response without any is no sequence."""
        bin_S = np.frexp(length_S.astype(np.float64))[1]
        np.add.at(self.sums, (group_S, bin_S), np.stack([length_S > 0, d_S, d_S * d_S], axis=1))

    def merge(self, other: LengthProfile) -> None:
        self.sums += other.sums

    def result(self, prompts: int) -> list[dict[str, Any]]:
        total_B3 = self.sums.sum(axis=0)
        (mean_B, sd_B), (mean_GB, sd_GB) = _mean_and_sd(total_B3), _mean_and_sd(total_B3 - self.sums)
        occupied_GB = self.sums[:, :, 0] > 0
        mean_GB, sd_GB = left_out(mean_GB, occupied_GB), left_out(sd_GB, occupied_GB)
        return [
            {
                "first": 2 ** int(b - 1),
                "last": 2 ** int(b) - 1,
                "sequences": int(total_B3[b, 0]),
                "d_sum_mean": interval(mean_B[b], mean_GB[:, b], prompts, SIGNED).to_dict(),
                "d_sum_sd": interval(sd_B[b], sd_GB[:, b], prompts, POSITIVE).to_dict(),
            }
            for b in np.flatnonzero(total_B3[:, 0])
        ]


def _mean_and_sd(sums_x3: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    count, first, second = np.moveaxis(sums_x3, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = first / count
        return mean, np.where(count > 1, np.sqrt(np.maximum(second / count - mean**2, 0)), np.nan)
