"""Clip-Cov: drops a few random tokens among those whose log p covaries with A.

The authors' code, verl and SkyRL compute means and draw in each micro-batch, at least one token
from each; this does so in the batch, however it is split, and draws by the hash of the row's key.
Tokens that PPO clips are not candidates.

Source: Clip-Cov, arXiv 2505.22617; verl, SkyRL.
"""

from collections.abc import Sequence

import numpy as np

from mismatch_cli.base.arrays import Array, fill_where, namespace
from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.decisions import shares
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision, ratio_clip

FORMULA = (
    "as ratio-clip ({r} > 1 + {ratio_high}, {r} < 1 − {ratio_low}); or drawn at random, {share} "
    "of the batch, from tokens with (A − mean A)(log {p} − mean log {p}) between {cov_low} and "
    "{cov_high}"
)
SYMBOLS = {"ratio_low": "ε_low", "ratio_high": "ε_high"}
NOT_ONE_SIDED = "It drops tokens to prevent a collapse of the entropy, wherever they have moved."
SCOPE = "batch"
MEASURES_NO_DISTANCE = True


def collect(
    compared: Compared,
    advantage_T: Array,
    *,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    ratio_low: float = 0.2,
    ratio_high: float = 0.2,
) -> Array:
    """A, log p, the draw, and whether PPO keeps the token, float64."""
    shares(share=share)
    if cov_low > cov_high:
        raise UsageError(
            f"cov_low={cov_low:g}, cov_high={cov_high:g} leaves no token to draw: choose cov_low "
            "below cov_high."
        )
    xp = namespace(advantage_T)
    clipped = ratio_clip.trust_region(
        compared, advantage_T, ratio_low=ratio_low, ratio_high=ratio_high
    )
    columns = (advantage_T, compared.logp_current_T, compared.draw_T, clipped.keep_T)
    return xp.stack([xp.astype(column_T, xp.float64) for column_T in columns], axis=1)


def settle(
    rows_UM: np.ndarray,
    *,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    ratio_low: float = 0.2,
    ratio_high: float = 0.2,
) -> Sequence[float]:
    """Mean A, mean log p, and the draw up to which candidates are dropped, at most max(1, ⌊share ·
    tokens⌋) of them.

    Tokens that the trainer excludes do not count: they would make the mean infinite.
    """
    rows_UM = rows_UM[rows_UM[:, 1] > -np.inf]
    if not len(rows_UM):
        return [0.0, 0.0, -1.0]
    advantage_U, logp_U, draw_U, in_clip_U = rows_UM.T
    mean_advantage, mean_logp = advantage_U.mean(), logp_U.mean()
    covariance_U = (advantage_U - mean_advantage) * (logp_U - mean_logp)
    candidate_U = (covariance_U > cov_low) & (covariance_U < cov_high) & (in_clip_U > 0)
    sorted_draw_U = np.sort(draw_U[candidate_U])
    number = min(max(int(share * len(rows_UM)), 1), len(sorted_draw_U))
    # A draw is at least 0: up to −1 none is dropped
    last_draw = sorted_draw_U[number - 1] if number else -1.0
    return [mean_advantage, mean_logp, last_draw]


def trust_region(
    compared: Compared,
    advantage_T: Array,
    settled_TF: Array,
    *,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    ratio_low: float = 0.2,
    ratio_high: float = 0.2,
) -> Decision:
    """Block what PPO clips, and the drawn candidates. The statistic is the covariance, nats."""
    clipped = ratio_clip.trust_region(
        compared, advantage_T, ratio_low=ratio_low, ratio_high=ratio_high
    )
    covariance_T = (advantage_T - settled_TF[:, 0]) * (compared.logp_current_T - settled_TF[:, 1])
    # An excluded token has log p = −∞; its covariance, infinite or NaN, becomes 0
    covariance_T = fill_where(covariance_T, compared.logp_current_T == -np.inf, 0.0)
    candidate_T = (covariance_T > cov_low) & (covariance_T < cov_high) & clipped.keep_T
    drawn_T = candidate_T & (compared.draw_T <= settled_TF[:, 2])
    return Decision(clipped.keep_T & ~drawn_T, covariance_T)
