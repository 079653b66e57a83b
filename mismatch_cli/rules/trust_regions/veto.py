"""Veto: drops a response with a single catastrophic ratio.

SkyRL suggests both bounds; `rs_veto_threshold` of slime and miles is only the lower one.

Source: SkyRL's suggestion; slime and miles `rs_veto_threshold`, the lower bound alone.
"""

from math import inf, log

from mismatch_cli.base.arrays import Array, namespace
from mismatch_cli.rules.decisions import band_around_1
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = "any {r} of the response outside [{band_low}, {band_high}]"
NOT_ONE_SIDED = "It drops whole responses because of one token, whatever the advantage."


def trust_region(
    compared: Compared, advantage_T: Array, *, band_low: float = 1e-4, band_high: float = 100.0
) -> Decision:
    """Block every token of a response that has one with p/q < band_low or p/q > band_high.

    The statistic is log p − log q, nats, of its lowest token if that is below the band, else of its
    highest.
    """
    band_around_1(band_low=band_low, band_high=band_high)
    responses, d_T = compared.responses, compared.log_ratio_T
    lowest_T = responses.per_token(responses.smallest(d_T))
    highest_T = responses.per_token(responses.largest(d_T))
    below_T = lowest_T < (log(band_low) if band_low else -inf)
    keep_T = ~below_T & (highest_T <= log(band_high))
    return Decision(keep_T, namespace(d_T).where(below_T, lowest_T, highest_T))
