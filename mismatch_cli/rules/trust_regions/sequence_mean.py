"""Masked importance sampling (MIS) by a response's geometric mean ratio.

OpenRLHF and SkyRL do the same as NeMo-RL. verl's `rollout_rs=seq_mean_k1` bounds the mean of −log
ρ: its band [low, high] is [1/high, 1/low] here.

Source: NeMo-RL `seq-mask-tis`, OpenRLHF, SkyRL; verl `rollout_rs=seq_mean_k1`.
"""

from mismatch_cli.base.arrays import Array
from mismatch_cli.rules.decisions import band_around_1
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = "(Π{r})^(1/|y|) over the response outside [{band_low}, {band_high}]"
NOT_ONE_SIDED = (
    "It drops whole responses that leave a band, whatever a token's advantage and direction."
)


def trust_region(
    compared: Compared, advantage_T: Array, *, band_low: float = 0.999, band_high: float = 1.002
) -> Decision:
    """Block every token of a response whose exp(Σd / |y|) is outside the band.

    The statistic is exp(Σd / |y|) − 1.
    """
    band_around_1(band_low=band_low, band_high=band_high)
    statistic_T = compared.level_ratio_less_1_T("mean")
    return Decision((statistic_T >= band_low - 1) & (statistic_T <= band_high - 1), statistic_T)
