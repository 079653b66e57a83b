"""Masked importance sampling (MIS) by the product of a response's ratios.

verl's `rollout_rs=seq_sum_k1` bounds the sum of −log ρ: its band [low, high] is [1/high, 1/low]
here. Its `rollout_is=sequence` with two thresholds bounds Πρ, as here.

Source: TRL `sequence_mask`, SkyRL; verl `rollout_is=sequence`.
"""

from mismatch_cli.base.arrays import Array
from mismatch_cli.rules.decisions import band_around_1
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = "Π{r} over the response outside [{band_low}, {band_high}]"
NOT_ONE_SIDED = (
    "It drops whole responses that leave a band, whatever a token's advantage and direction."
)


def trust_region(
    compared: Compared, advantage_T: Array, *, band_low: float = 0.0, band_high: float = 3.0
) -> Decision:
    """Block every token of a response whose exp(Σd) is outside [band_low, band_high].

    The statistic is exp(Σd) − 1.
    """
    band_around_1(band_low=band_low, band_high=band_high)
    statistic_T = compared.level_ratio_less_1_T("product")
    return Decision((statistic_T >= band_low - 1) & (statistic_T <= band_high - 1), statistic_T)
