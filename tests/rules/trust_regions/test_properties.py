"""Properties for any policies: which moves a mask may block, and how masks and thresholds relate
to each other.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_cli.rules import trust_regions
from mismatch_cli.rules.policies import TRAINER_ROLLOUT, Policies, TopKLogProbs
from tests.looped import looped
from tests.rules.algorithms.samples import partition
from tests.rules.trust_regions.cases import (
    F64,
    ONE_SIDED,
    REGIONS,
    K,
    ask,
    cast,
    equal_policies,
    kept,
    policies,
    random_policies,
    signs,
)

seeds = st.integers(0, 10**6)
log_probs = st.one_of(st.floats(-25, -1e-9), st.floats(-0.3, -1e-9))
tokens = st.lists(
    st.tuples(log_probs, log_probs, st.sampled_from([1.0, -1.0, 0.3, -7.0, 0.0])),
    min_size=1,
    max_size=30,
)

# log q, log p and A of three tokens in one response: the first moves towards its anchor, and is
# blocked.
TOWARDS_ITS_ANCHOR = {
    "binary-kl-band": [(-0.1, -0.5, 1), (-1, -1, 1), (-1, -1, 1)],
    "covariance-clip": [(-0.1, -0.5, 1), (-6, -6, 0), (-6, -6, 0)],  # a covariance of 2.4
    "dual-clip": [(-3, -1, -1), (-1, -1, -1), (-1, -1, -1)],
    "icepop": [(-1, -2, 1), (-1, -1, 1), (-1, -1, 1)],
    "kl-estimate": [(-1, -2, 1), (-1, -1, 1), (-1, -1, 1)],
    "opsm": [(-2, -1, -1), (-1, -3, -1), (-1, -1, -1)],
    "probability-band": [(-0.1, -0.5, 1), (-1, -1, 1), (-1, -1, 1)],
    "second-moment": [(-1, -2, 1), (-1, -1, 1), (-1, -1, 1)],
    "sequence-mean": [(-1, -2, 1), (-3, -1, 1), (-3, -1, 1)],
    "sequence-product": [(-1, -2, 1), (-3, -1, 1), (-3, -1, 1)],
    "sequence-ratio": [(-1, -2, 1), (-3, -1, 1), (-3, -1, 1)],
    "entropy-quantile": [(-1, -12, 1), (-1, -1, 1), (-1, -1, 1)],
    "veto": [(-1, -12, 1), (-1, -1, 1), (-1, -1, 1)],
}
NOT_BY_DEFAULT = {"second-moment": {"counted": "all"}}  # by default it looks only at moves away
# Do not depend on p: they block on-policy too
OF_OTHER_THINGS = {"covariance-clip", "entropy-quantile"}
LOOSER: dict[str, tuple[float, float]] = {  # two values of each threshold; the second keeps more
    "max_kl": (0.01, 0.1),
    "kl_low": (0.01, 0.1),
    "kl_high": (0.01, 0.1),
    "log_low": (0.1, 0.5),
    "log_high": (0.1, 0.5),
    "max_tv": (0.05, 0.3),
    "tv_low": (0.05, 0.3),
    "tv_high": (0.05, 0.3),
    "max_moment": (0.01, 0.1),
    "budget": (1e-3, 0.1),
    "share": (0.1, 0.5),
    "max_drop": (0.2, 0.6),
    "max_ratio": (1.2, 4.0),
    "ratio_low": (0.05, 0.3),
    "ratio_high": (0.05, 0.4),
    "alpha": (0.05, 0.5),
    "band_low": (0.99, 0.5),
    "band_high": (1.01, 3.0),
    "k": (K, 1),  # a finer partition never shrinks a divergence
    "share of covariance-clip": (0.5, 1e-3),  # it drops that share
    "cov_low": (-1.0, 2.0),  # fewer candidates; all are dropped where the share is 1
    "cov_high": (5.0, 2.0),
}
# A later token in a response weighs less against δ, and saves less for those after it
NEITHER = {"least_weight"}


def scaled(name: str, factor: float) -> dict[str, float]:
    """A trust region's real-valued thresholds times a factor, except bounds of the ratio, which
    must contain 1.
    """
    defaults = trust_regions.thresholds(trust_regions.find(name)).items()
    around_1 = ("band_low", "band_high", "max_ratio", "least_weight")
    return {
        key: value * factor
        for key, value in defaults
        if isinstance(value, float) and key not in around_1
    }


@pytest.mark.parametrize("name", ONE_SIDED)
@given(tokens, st.sampled_from([1e-3, 0.1, 1.0, 2.0]), st.sampled_from([torch.float32, F64]))
@settings(max_examples=60, deadline=None)
def test_a_one_sided_mask_never_blocks_a_move_towards_the_anchor(
    name: str, drawn: list[tuple[float, float, float]], factor: float, dtype: torch.dtype
) -> None:
    rollout, trainer, advantage_T = torch.tensor(drawn, dtype=dtype).T.unbind(0)
    # Equal probabilities occur
    trainer = torch.where(torch.arange(len(drawn)) % 7 == 3, rollout, trainer)
    keep_T = ask(name, policies(rollout, trainer), advantage_T, **scaled(name, factor)).keep_T
    towards_T = ((advantage_T > 0) & (trainer <= rollout)) | (
        (advantage_T < 0) & (trainer >= rollout)
    )
    assert keep_T[towards_T | (advantage_T == 0)].all()


@pytest.mark.parametrize("name", [name for name in ONE_SIDED if name != "none"])
def test_a_one_sided_mask_blocks_moves_away(name: str) -> None:
    """Otherwise the test above would be void; the minimal mask looks only at negatives."""
    rollout, trainer = torch.tensor([-2.0, -0.1], dtype=F64), torch.tensor([-0.1, -2.0], dtype=F64)
    expected = [name == "minimal-negative", False]
    assert kept(name, policies(rollout, trainer), torch.tensor([1.0, -1.0], dtype=F64)) == expected


@pytest.mark.parametrize("name", [name for name in ONE_SIDED if name.startswith("top-k")])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_equal_probability_is_no_move_away_whatever_the_other_tokens_do(
    name: str, sign: float
) -> None:
    """p = q at the sampled token, while the rest of the distribution moved beyond any threshold."""
    sampled = torch.tensor([0.2], dtype=F64).log()
    rollout, trainer = torch.tensor([[[0.7, 0.2]], [[0.05, 0.2]]], dtype=F64).log()
    topk = TopKLogProbs(torch.tensor([1]), torch.tensor([[0, 1]]), rollout, trainer)
    same = Policies(sampled, sampled, None, torch.tensor([0, 1]), topk)
    assert kept(name, same, torch.tensor([sign], dtype=F64), k=2) == [True]


@pytest.mark.parametrize("name", sorted(set(REGIONS) - set(ONE_SIDED)))
def test_a_mask_that_says_so_blocks_a_move_towards_the_anchor(name: str) -> None:
    rollout, trainer, advantage_T = torch.tensor(TOWARDS_ITS_ANCHOR[name], dtype=F64).T.unbind(0)
    assert (advantage_T[0] > 0 and trainer[0] < rollout[0]) or (
        advantage_T[0] < 0 and trainer[0] > rollout[0]
    )
    assert not kept(name, policies(rollout, trainer), advantage_T, **NOT_BY_DEFAULT.get(name, {}))[
        0
    ]


def test_m2po_blocks_moves_back_only_if_it_counts_all_tokens() -> None:
    """M2PO's form in the paper is one-sided, the other one is not."""
    drawn = random_policies(4)
    advantage_T = signs(len(drawn.trainer))
    inward_T = advantage_T * (drawn.trainer - drawn.rollout) <= 0
    assert ask("second-moment", drawn, advantage_T).keep_T[inward_T].all()
    assert not ask("second-moment", drawn, advantage_T, counted="all").keep_T[inward_T].all()


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_on_policy_nothing_is_blocked(seed: int) -> None:
    """However small the thresholds; and the statistics are 0, except for an unused budget."""
    for dtype in (torch.float32, F64):
        same = cast(equal_policies(random_policies(seed, responses=8)), dtype)
        for name in set(REGIONS) - OF_OTHER_THINGS:
            decision = ask(name, same, signs(len(same.rollout), seed, dtype), **scaled(name, 1e-6))
            assert decision.keep_T.all(), name
            assert (
                decision.statistic_T < 0 if name == "cumulative-tv" else decision.statistic_T == 0
            ).all(), name


def test_masks_that_do_not_measure_distance_block_on_policy_too() -> None:
    same = equal_policies(random_policies(0))
    advantage_T = signs(len(same.rollout))
    assert same.entropy_T is not None
    expected_T = same.entropy_T >= torch.quantile(same.entropy_T, 0.8)
    assert torch.equal(ask("entropy-quantile", same, advantage_T).keep_T, expected_T)
    dropped_T = ~ask("covariance-clip", same, advantage_T, share=1.0).keep_T
    centred = (x - x.mean() for x in (advantage_T, same.trainer))
    covariance_T = next(centred) * next(centred)
    assert torch.equal(dropped_T, (covariance_T > 1) & (covariance_T < 5)) and dropped_T.any()


@looped("seed", range(3))
@looped("name", REGIONS)
def test_looser_thresholds_keep_more(name: str, seed: int) -> None:
    drawn = random_policies(seed)
    advantage_T = signs(len(drawn.trainer), seed)
    for threshold, default in trust_regions.thresholds(trust_regions.find(name)).items():
        if isinstance(default, (bool, str)) or threshold in NEITHER:
            continue
        values = LOOSER.get(f"{threshold} of {name}") or LOOSER.get(threshold)
        assert values, f"add looser values for {threshold}"
        fixed = {"share": 1.0} if threshold.startswith("cov_") else {}
        tight, loose = (
            ask(name, drawn, advantage_T, **fixed, **{threshold: value}).keep_T for value in values
        )
        assert (loose | ~tight).all()
        assert tight.sum() < loose.sum(), f"{threshold} of {name} does nothing"


BY_SIGN = {
    "ratio": ("ratio-clip", "relaxed-ratio-clip", "sequence-ratio"),
    "tv": ("binary-tv", "top-k-tv"),
    "kl": ("binary-kl", "top-k-kl"),
    "log": ("log-ratio-clip",),
}


def test_thresholds_by_sign_act_on_their_own_side() -> None:
    drawn = random_policies(5)
    advantage_T = signs(len(drawn.trainer))
    for region, name in ((region, name) for region, names in BY_SIGN.items() for name in names):
        default = ask(name, drawn, advantage_T).keep_T
        for threshold, side_T in (
            (f"{region}_low", advantage_T < 0),
            (f"{region}_high", advantage_T > 0),
        ):
            changed_T = ask(name, drawn, advantage_T, **{threshold: 1e-6}).keep_T != default
            assert changed_T.any() and not changed_T[~side_T].any()


def test_by_default_the_thresholds_of_dppo_are_one() -> None:
    """One δ, as in the paper: |p − q|, or KL, beyond it, and A in the direction of the move."""
    drawn = random_policies(5)
    advantage_T = signs(len(drawn.trainer))
    away_T = advantage_T * (drawn.trainer - drawn.rollout) > 0
    for kind in ("tv", "kl"):
        for name in BY_SIGN[kind]:
            limits = trust_regions.thresholds(trust_regions.find(name))
            assert limits[f"{kind}_low"] == limits[f"{kind}_high"]
            decision = ask(name, drawn, advantage_T)
            assert torch.equal(
                decision.keep_T, ~(away_T & (decision.statistic_T.abs() > limits[f"{kind}_low"]))
            )


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_relaxation(dtype: torch.dtype) -> None:
    """α = 0 is plain clipping; high and low relax one sign each, and both relaxes the two."""
    drawn = cast(random_policies(6), dtype)
    advantage_T = signs(len(drawn.trainer), dtype=dtype)
    bounds = {"ratio_low": 0.1, "ratio_high": 0.15}
    clipped = ask("ratio-clip", drawn, advantage_T, **bounds)
    keep = {}
    for relax in ("high", "low", "both"):
        plain = ask("relaxed-ratio-clip", drawn, advantage_T, alpha=0.0, relax=relax, **bounds)
        assert torch.equal(plain.keep_T, clipped.keep_T) and torch.equal(
            plain.statistic_T, clipped.statistic_T
        )
        keep[relax] = ask(
            "relaxed-ratio-clip", drawn, advantage_T, alpha=0.2, relax=relax, **bounds
        ).keep_T
    high_T, low_T = (keep[relax] & ~clipped.keep_T for relax in ("high", "low"))
    assert high_T.any() and (advantage_T[high_T] > 0).all()
    assert low_T.any() and (advantage_T[low_T] < 0).all()
    assert torch.equal(keep["both"], keep["high"] | keep["low"])
    assert (drawn.rollout[high_T | low_T] < math.log(0.2)).all()
    # No improbable token stays blocked
    assert ((drawn.rollout >= math.log(0.2)) | keep["both"]).all()


@given(seeds)
@settings(max_examples=15, deadline=None)
def test_top_1_with_replacement_is_binary(seed: int) -> None:
    drawn = random_policies(seed, responses=10)
    advantage_T = signs(len(drawn.trainer), seed)
    compared = drawn.compare(TRAINER_ROLLOUT)
    tv_T, kl_T = compared.topk(1, replace_last=True)
    torch.testing.assert_close(tv_T, compared.difference_T.abs(), rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(kl_T, compared.binary_kl_T, rtol=1e-9, atol=1e-13)
    for name, limit in (
        ("tv", {"tv_low": 0.15, "tv_high": 0.2}),
        ("kl", {"kl_low": 0.05, "kl_high": 0.04}),
    ):
        top_1 = kept(f"top-k-{name}", drawn, advantage_T, k=1, replace_last=True, **limit)
        assert top_1 == kept(f"binary-{name}", drawn, advantage_T, **limit)


@pytest.mark.parametrize("replace_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_top_k_decisions_against_brute_force(replace_last: bool, dtype: torch.dtype) -> None:
    drawn = random_policies(7, vocabulary=60)
    topk = drawn.topk
    assert topk is not None
    alone_T = (topk.ids_TK != topk.response_ids_T[:, None]).all(-1)
    assert 10 < alone_T.sum() < len(alone_T) - 10
    mu, pi = (
        partition(drawn, topk.rollout, drawn.rollout, replace_last),
        partition(drawn, topk.trainer, drawn.trainer, replace_last),
    )
    statistic = {
        "tv": (mu - pi).abs().sum(-1) / 2,
        "kl": torch.where(mu > 0, mu * (mu / pi).log(), 0.0).sum(-1),
    }
    advantage_T = signs(len(drawn.trainer), dtype=dtype)
    away_T = advantage_T * (drawn.trainer - drawn.rollout) > 0
    for name, limit in (("tv", 0.2), ("kl", 0.05), ("tv", 0.05), ("kl", 0.4)):
        blocked_T = away_T & (statistic[name] > limit)
        assert blocked_T.any() and not blocked_T.all()
        near_T = (statistic[name] / limit - 1).abs() < (1e-4 if dtype == torch.float32 else 1e-9)
        sides = {f"{name}_low": limit, f"{name}_high": limit}
        decision = ask(
            f"top-k-{name}", cast(drawn, dtype), advantage_T, **sides, replace_last=replace_last
        )
        assert torch.equal(decision.keep_T | near_T, ~blocked_T | near_T) and near_T.sum() < 3
