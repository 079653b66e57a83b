"""Masks compared with the published conditions: the papers' worked tables, and sequence values
by hand.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mismatch_cli.rules import trust_regions
from mismatch_cli.rules.algorithms.masks_and_factors import Mask
from mismatch_cli.rules.policies import TRAINER_ROLLOUT, Policies
from mismatch_cli.rules.trust_regions import Threshold, second_moment
from tests.looped import looped
from tests.rules.trust_regions.cases import F64, ask, kept, policies

# μ, π, then the kept signs (A > 0, A < 0) for GRPO 0.2/0.28, TV 0.15, KL 0.05, minimal 0.5. Then r,
# TV, binary KL.
Kept = tuple[int, int]
VECTORS: list[tuple[float, float, Kept, Kept, Kept, Kept, float, float, float]] = [
    (1e-4, 1e-2, (0, 1), (1, 1), (1, 1), (1, 1), 100, 0.0099, 0.00949),
    (0.99, 0.80, (1, 1), (1, 0), (1, 0), (1, 1), 0.8081, 0.19, 0.18100),
    (0.80, 0.99, (1, 1), (0, 1), (0, 1), (1, 1), 1.2375, 0.19, 0.42867),
    (0.99, 0.40, (1, 0), (1, 0), (1, 0), (1, 0), 0.4040, 0.59, 0.85623),
    (0.10, 0.129, (0, 1), (1, 1), (1, 1), (1, 1), 1.29, 0.029, 0.00401),
    (0.50, 0.34, (1, 0), (1, 0), (1, 0), (1, 1), 0.68, 0.16, 0.05402),
    (0.95, 0.999, (1, 1), (1, 1), (0, 1), (1, 1), 1.0516, 0.049, 0.14782),
    (0.02, 0.20, (0, 1), (0, 1), (0, 1), (1, 1), 10, 0.18, 0.15283),
]
COLUMNS = {"ratio-clip": 0, "binary-tv": 1, "binary-kl": 2, "minimal-negative": 3}
DEFAULTS: dict[str, dict[str, Threshold]] = {
    "ratio-clip": {"ratio_low": 0.2, "ratio_high": 0.28},  # DAPO
    # DPPO figure 7
    "relaxed-ratio-clip": {"ratio_low": 0.2, "ratio_high": 0.28, "alpha": 0.1, "relax": "both"},
    "binary-tv": {"tv_low": 0.15, "tv_high": 0.15},
    "binary-kl": {"kl_low": 0.05, "kl_high": 0.05},
    "top-k-tv": {"tv_low": 0.2, "tv_high": 0.2, "k": 20, "replace_last": False},  # DPPO App. F.3
    "top-k-kl": {"kl_low": 0.05, "kl_high": 0.05, "k": 20, "replace_last": False},
    "minimal-negative": {"max_drop": 0.5},  # DPPO figure 5
    "dual-clip": {"max_ratio": 3.0},  # verl
    "icepop": {"band_low": 0.5, "band_high": 5.0},  # NeMo-RL
    "sequence-product": {"band_low": 0.0, "band_high": 3.0},  # TRL
    "sequence-mean": {"band_low": 0.999, "band_high": 1.002},  # NeMo-RL
    "sequence-ratio": {"ratio_low": 3e-4, "ratio_high": 4e-4},  # GSPO
    "probability-band": {"max_tv": 0.1},  # prime-rl
    "opsm": {"max_kl": 1e-4},  # slime
    "log-ratio-clip": {"log_low": 0.4, "log_high": 0.4},  # GMPO's code, TRL
    # verl's presets seq_mean_k3
    "kl-estimate": {"max_kl": 0.01, "estimator": "k3", "over": "mean"},
    "veto": {"band_low": 1e-4, "band_high": 100.0},  # SkyRL's suggestion
    "binary-kl-band": {"max_kl": 0.1},  # prime-rl PR 3283
    "sequence-tv": {"max_tv": 0.2},  # VACO
    "cumulative-tv": {"max_tv": 0.15, "budget": 0.02, "least_weight": 0.8},  # CPPO, dense models
    "second-moment": {"max_moment": 0.04, "counted": "outward"},  # M2PO
    "entropy-quantile": {"share": 0.2},
    # verl
    "covariance-clip": {
        "share": 2e-4,
        "cov_low": 1.0,
        "cov_high": 5.0,
        "ratio_low": 0.2,
        "ratio_high": 0.2,
    },
    "none": {},
}
MU, PI = (torch.tensor([row[i] for row in VECTORS], dtype=F64).log() for i in (0, 1))

# Two responses, A = +1 and −1.
GOLDEN_MU = torch.tensor([-0.1, -2, -0.5, -6, -0.01, -1, -3], dtype=F64)
GOLDEN_PI = torch.tensor([-0.12, -1.7, -0.5, -4.5, -0.02, -1.3, -3.2], dtype=F64)
GOLDEN_ADVANTAGE = torch.tensor([1, 1, 1, 1, -1, -1, -1], dtype=F64)
GOLDEN_DROPS = [
    ("ratio-clip", {}, [0, 1, 0, 1, 0, 1, 0]),
    ("binary-tv", {}, [0] * 7),
    ("binary-kl", {}, [0] * 7),
    ("probability-band", {}, [0] * 7),
    ("minimal-negative", {}, [0] * 7),
    ("none", {}, [0] * 7),
    ("binary-tv", {"tv_low": 0.05, "tv_high": 0.05}, [0, 0, 0, 0, 0, 1, 0]),
    # p − q = 0.047 at the second
    ("binary-tv", {"tv_low": 1.0, "tv_high": 0.04}, [0, 1, 0, 0, 0, 0, 0]),
    # 0.008, 0.005 and 0.0216
    ("binary-kl", {"kl_low": 0.021, "kl_high": 1e-3}, [0, 1, 0, 1, 0, 1, 0]),
    ("binary-kl", {"kl_low": 0.022, "kl_high": 7e-3}, [0, 1, 0, 0, 0, 0, 0]),
    ("log-ratio-clip", {}, [0, 0, 0, 1, 0, 0, 0]),  # d = −.02, .3, 0, 1.5 | −.01, −.3, −.2
    ("log-ratio-clip", {"log_low": 0.25}, [0, 0, 0, 1, 0, 1, 0]),
    ("kl-estimate", {}, [1] * 7),  # mean k3 = 0.508 and 0.0199
    ("kl-estimate", {"max_kl": 0.1}, [1, 1, 1, 1, 0, 0, 0]),
    ("kl-estimate", {"max_kl": 0.3, "estimator": "k2"}, [0] * 7),  # mean k2 = 0.2926 and 0.0217
    ("kl-estimate", {"max_kl": 0.29, "estimator": "k2"}, [1, 1, 1, 1, 0, 0, 0]),
    # 1.125 and 0.045
    ("kl-estimate", {"max_kl": 0.05, "estimator": "k2", "over": "max"}, [1, 1, 1, 1, 0, 0, 0]),
    # 1.1702 and 0.06505
    ("kl-estimate", {"max_kl": 0.06, "estimator": "k2", "over": "sum"}, [1] * 7),
    ("kl-estimate", {"max_kl": 0.043, "estimator": "k2", "over": "token"}, [0, 1, 0, 1, 0, 1, 0]),
    ("veto", {}, [0] * 7),
    ("veto", {"band_high": 4.0}, [1, 1, 1, 1, 0, 0, 0]),  # r = 4.48 at the fourth
    ("veto", {"band_low": 0.75}, [0, 0, 0, 0, 1, 1, 1]),  # and 0.741 at the sixth
    # No lower bound: the highest alone decides
    ("veto", {"band_low": 0.0, "band_high": 4.0}, [1, 1, 1, 1, 0, 0, 0]),
    ("binary-kl-band", {}, [0] * 7),
    # 0.0216 one way, 0.0204 the other
    ("binary-kl-band", {"max_kl": 0.021}, [0, 0, 0, 0, 0, 1, 0]),
    # 0.0081 one way, 0.0088 the other
    ("binary-kl-band", {"max_kl": 8.5e-3}, [0, 1, 0, 0, 0, 1, 0]),
    ("sequence-tv", {}, [0, 1, 0, 1, 0, 0, 0]),  # mean |r − 1| = 0.963 and 0.150; A · d > 0
    ("sequence-tv", {"max_tv": 0.1}, [0, 1, 0, 1, 1, 1, 1]),
    # Of d² = .0001, .04, .09, .09 and 2.25 two remain: mean 0.020
    ("second-moment", {}, [0, 1, 0, 1, 0, 1, 0]),
    ("second-moment", {"max_moment": 0.06}, [0, 0, 0, 1, 0, 0, 0]),  # four: mean 0.055
    # Six, with 0 and .0004: 0.0368
    ("second-moment", {"max_moment": 0.04, "counted": "all"}, [0, 0, 0, 1, 0, 0, 0]),
    # Never below: the smallest remains
    ("second-moment", {"max_moment": 0.0}, [0, 1, 0, 1, 0, 1, 1]),
    (
        "entropy-quantile",
        {"share": 0.5},
        [0, 0, 0, 1, 1, 0, 1],
    ),  # .35 .48 .67 .06 | .10 .59 .17, and the median is kept
    ("entropy-quantile", {"share": 1.0}, [0] * 7),
    # 1.29 −.07 .96 −2.47 | −1.83 −.37 1.81, and PPO's
    ("covariance-clip", {"share": 1.0}, [1, 1, 0, 1, 0, 1, 1]),
    ("covariance-clip", {"share": 1.0, "cov_high": 1.5}, [1, 1, 0, 1, 0, 1, 0]),
    ("covariance-clip", {"cov_high": 1.0}, [0, 1, 0, 1, 0, 1, 0]),  # no candidates: PPO's clip
    ("cumulative-tv", {}, [0] * 7),
    # w·D = 0.044 and 0.086; 0.007 of 0.010 left after it
    ("cumulative-tv", {"max_tv": 0.03}, [0, 1, 0, 0, 0, 1, 0]),
    # And of −0.028 left
    ("cumulative-tv", {"max_tv": 0.03, "budget": 0.01}, [0, 1, 0, 0, 0, 1, 1]),
    ("icepop", {"band_low": 0.5, "band_high": 2.0}, [0, 0, 0, 1, 0, 0, 0]),
    ("icepop", {}, [0] * 7),  # up to 5, and r is 4.48
    ("dual-clip", {}, [0] * 7),  # the ratio of 4.48 has A > 0
    ("sequence-product", {}, [1, 1, 1, 1, 0, 0, 0]),  # Πr = 5.93 and 0.60
    ("sequence-mean", {}, [1] * 7),
    ("sequence-mean", {"band_low": 0.8, "band_high": 1.6}, [0] * 7),  # s = 1.56 and 0.84
    ("sequence-ratio", {}, [1] * 7),
    ("sequence-ratio", {"ratio_low": 0.2, "ratio_high": 0.5}, [1, 1, 1, 1, 0, 0, 0]),
    ("opsm", {}, [0, 0, 0, 0, 1, 1, 1]),  # mean(log q − log p) = −0.445 and 0.17
    ("opsm", {"max_kl": 0.18}, [0] * 7),
]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", COLUMNS)
def test_worked_table(name: str, dtype: torch.dtype) -> None:
    batch = policies(MU.to(dtype), PI.to(dtype))
    for side, sign in enumerate((1.0, -1.0)):
        expected = [bool(row[2:6][COLUMNS[name]][side]) for row in VECTORS]
        assert kept(name, batch, torch.full_like(batch.trainer, sign)) == expected


def test_defaults_are_the_published_ones() -> None:
    assert {
        name: trust_regions.thresholds(trust_regions.find(name)) for name in DEFAULTS
    } == DEFAULTS


def test_worked_ratios_and_divergences() -> None:
    compared = policies(MU, PI).compare(TRAINER_ROLLOUT)
    for i, (mu, pi, *_, ratio, tv, kl) in enumerate(VECTORS):
        assert compared.ratio_T[i].item() == pytest.approx(ratio, abs=5e-5)
        assert compared.ratio_less_1_T[i].item() == pytest.approx(ratio - 1, abs=5e-5)
        assert compared.difference_T[i].item() == pytest.approx(
            math.copysign(tv, pi - mu), abs=1e-12
        )
        assert compared.binary_kl_T[i].item() == pytest.approx(kl, abs=6e-6)


def golden() -> Policies:
    return policies(GOLDEN_MU, GOLDEN_PI, lengths=[4, 3])


@looped(("name", "chosen", "dropped"), GOLDEN_DROPS)
def test_golden_tokens(name: str, chosen: dict[str, float], dropped: list[int]) -> None:
    assert kept(name, golden(), GOLDEN_ADVANTAGE, **chosen) == [not d for d in dropped]


def test_the_other_sign_of_the_golden_tokens() -> None:
    """A = −1 and +1: one-sided masks see only moves back, and masks of negatives see the first
    response.
    """
    flipped = -GOLDEN_ADVANTAGE
    assert kept("ratio-clip", golden(), flipped) == [True] * 7
    assert kept("sequence-ratio", golden(), flipped) == [True] * 7
    assert kept("opsm", golden(), flipped) == [True] * 7  # the negative response gained probability
    assert kept("dual-clip", golden(), flipped) == [True, True, True, False, True, True, True]
    assert kept("sequence-product", golden(), flipped) == [False] * 4 + [True] * 3


def test_sequence_statistics_by_hand() -> None:
    def statistic(name: str) -> list[float]:
        return ask(name, golden(), GOLDEN_ADVANTAGE).statistic_T.tolist()

    def both(first: float, second: float) -> list[float]:
        return [first] * 4 + [second] * 3

    assert statistic("opsm") == pytest.approx(both(0.445, -0.17))  # 1.78/4 and −0.51/3
    assert statistic("sequence-ratio") == pytest.approx(both(0.5604902, -0.1563352), abs=1e-6)
    assert statistic("sequence-mean") == pytest.approx(statistic("sequence-ratio"))
    assert statistic("sequence-product") == pytest.approx(both(4.929856, -0.399504), abs=1e-6)
    assert statistic("kl-estimate") == pytest.approx(both(0.507937, 0.019866), abs=1e-6)
    # The highest, since no token is too low
    assert statistic("veto") == pytest.approx(both(1.5, -0.01))
    assert statistic("sequence-tv") == pytest.approx(both(0.962837, 0.150134), abs=1e-6)
    assert statistic("cumulative-tv")[4:] == pytest.approx([-0.14015, -0.06419, -0.12312], abs=1e-5)


def test_the_budget_of_a_response_is_the_90th_percentile_of_its_moves() -> None:
    """Eleven tokens whose second largest |p − q| is 0.03, between the budget of 0.02 and twice
    that.
    """
    moves = [0.5, 0.03, *[0.0] * 8, 0.01]
    rollout = torch.full((11,), 0.3, dtype=F64)
    batch = policies(rollout.log(), (rollout + torch.tensor(moves, dtype=F64)).log())
    statistic_T = ask("cumulative-tv", batch, torch.ones(11, dtype=F64)).statistic_T
    w = [1 - 0.2 * t / 10 for t in range(11)]
    left = 0.15 + 0.03 * sum(w[:10]) - (0.5 + w[1] * 0.03)
    assert left < 0 and statistic_T[10].item() == pytest.approx(0.8 * 0.01 - left, abs=1e-12)


def test_a_draw_drops_the_candidates_with_the_smallest_numbers() -> None:
    """At least one of them, and ⌊share · 7⌋ in general."""
    draw_T = golden().compare(TRAINER_ROLLOUT).draw_T
    first = [0, 6][int(draw_T[6] < draw_T[0])]
    for share in (0.0, 2e-4, 0.28):
        dropped = [
            not keep for keep in kept("covariance-clip", golden(), GOLDEN_ADVANTAGE, share=share)
        ]
        assert dropped == [t in (1, 3, 5, first) for t in range(7)]
    assert not kept("covariance-clip", golden(), GOLDEN_ADVANTAGE, share=0.3)[6 - first]


@pytest.mark.parametrize("region", ["second-moment", "entropy-quantile", "covariance-clip"])
def test_what_a_batch_settles_does_not_depend_on_token_order(region: str) -> None:
    mask = Mask(region)
    rows_UM = mask.collect(golden(), GOLDEN_ADVANTAGE)
    assert mask.settle(rows_UM[::-1]).tolist() == pytest.approx(
        mask.settle(rows_UM).tolist(), rel=1e-14
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_probability_on_the_threshold(sign: float) -> None:
    """p = 1 and q = 1/2, or the reverse: DPPO blocks D > δ and keeps D = δ, the minimal mask
    blocks q − p ≥ δ.
    """
    one, half = torch.zeros(1, dtype=F64), torch.full((1,), 0.5, dtype=F64).log()
    batch = policies(half, one) if sign > 0 else policies(one, half)
    advantage = torch.tensor([sign], dtype=F64)
    assert kept("binary-tv", batch, advantage, tv_low=0.5, tv_high=0.5) == [True]
    assert kept("binary-tv", batch, advantage, tv_low=0.4999, tv_high=0.4999) == [False]
    assert kept("probability-band", batch, advantage, max_tv=0.5) == [True]
    assert kept("minimal-negative", batch, advantage, max_drop=0.5) == [sign > 0]
    assert kept("minimal-negative", batch, advantage, max_drop=0.5001) == [True]


@pytest.mark.parametrize(("ratio", "sign"), [(2, 1.0), (2, -1.0), (0.5, 1.0), (0.5, -1.0)])
def test_a_ratio_on_the_threshold_is_kept(ratio: float, sign: float) -> None:
    """PPO's clip, the dual clip and every band include their bounds: r = 2 or 1/2 exactly."""
    one, half = torch.zeros(1, dtype=F64), torch.full((1,), 0.5, dtype=F64).log()
    batch = policies(half, one) if ratio == 2 else policies(one, half)
    # Otherwise the test is void
    assert batch.compare(TRAINER_ROLLOUT).ratio_less_1_T.item() == ratio - 1
    advantage = torch.tensor([sign], dtype=F64)
    for name in ("ratio-clip", "relaxed-ratio-clip", "sequence-ratio"):
        assert kept(name, batch, advantage, ratio_low=0.5, ratio_high=1.0) == [True]
        away = sign * (ratio - 1) > 0
        assert kept(name, batch, advantage, ratio_low=0.4999, ratio_high=0.9999) == [not away]
    for name in ("icepop", "sequence-mean", "sequence-product"):
        assert kept(name, batch, advantage, band_low=0.5, band_high=2.0) == [True]
        assert kept(name, batch, advantage, band_low=0.5001, band_high=1.9999) == [False]
    assert kept("dual-clip", batch, advantage, max_ratio=2.0) == [True]
    assert kept("dual-clip", batch, advantage, max_ratio=1.9999) == [not (ratio == 2 and sign < 0)]


def test_relaxation_is_strictly_below_alpha() -> None:
    """Clipping remains for μ ≥ α: four tokens with r = 2, and with r = 1/2, around α = 0.125."""
    rollout = torch.tensor([0.1, 0.125, 0.126, 0.4], dtype=F64).log()
    for sign, relaxed in ((1.0, ("high", "both")), (-1.0, ("low", "both"))):
        batch = policies(rollout, rollout + sign * math.log(2))
        for relax in ("high", "low", "both"):
            expected = [relax in relaxed, False, False, False]
            advantage = torch.full_like(rollout, sign)
            assert (
                kept("relaxed-ratio-clip", batch, advantage, alpha=0.125, relax=relax) == expected
            )


@pytest.mark.parametrize(("max_moment", "largest"), [(0.2501, 0.375), (0.25, 0.125)])
def test_m2po_drops_tokens_until_the_mean_is_below_its_threshold(
    max_moment: float, largest: float
) -> None:
    """The mean of 1/8 and 3/8 is 1/4 exactly."""
    rows_UM = np.array([[0.375], [np.nan], [0.125]])
    assert second_moment.settle(rows_UM, max_moment=max_moment) == [largest]


def test_the_statistic_of_m2po_is_0_where_the_advantage_is_0() -> None:
    """Elsewhere it is the squared log-ratio, whatever the sign or size of the advantage."""
    rollout = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=F64)
    trainer = torch.tensor([-1.5, -1.5, -0.75, -0.75], dtype=F64)
    advantage_T = torch.tensor([1.0, 0.0, 0.5, -1.0], dtype=F64)
    decision = ask("second-moment", policies(rollout, trainer), advantage_T)
    assert decision.statistic_T.tolist() == [0.25, 0.0, 0.0625, 0.0625]
