"""IcePop: drops tokens whose ratio leaves a band, whatever their advantage.

NVIDIA's configurations have [0.5, 5] or [0.2, 5]. In verl it is `rollout_is=token` with two
thresholds; `rollout_rs=token_k1` bounds −log ρ: its band [low, high] is [1/high, 1/low] here.

Source: IcePop of the Ling team; NeMo-RL, slime, verl `rollout_is=token`.
"""

from mismatch_cli.base.arrays import Array
from mismatch_cli.rules.decisions import band_around_1
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = "{r} outside [{band_low}, {band_high}]"
NOT_ONE_SIDED = (
    "The band is meant for the gap between engine and trainer, which no single update closes: it "
    "has two sides."
)


def trust_region(
    compared: Compared, advantage_T: Array, *, band_low: float = 0.5, band_high: float = 5.0
) -> Decision:
    """Block p/q outside [band_low, band_high]. The statistic is p/q − 1."""
    band_around_1(band_low=band_low, band_high=band_high)
    outside_T = (compared.ratio_less_1_T < band_low - 1) | (compared.ratio_less_1_T > band_high - 1)
    return Decision(~outside_T, compared.ratio_less_1_T)
