"""What every file in trust_regions/ promises."""

from __future__ import annotations

import inspect
import string

import numpy as np
import pytest
import torch
from torch import Tensor

from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules import trust_regions
from mismatch_cli.rules.algorithms.masks_and_factors import Mask
from mismatch_cli.rules.policies import (
    ENGINE_GAP,
    TRAINER_ROLLOUT,
    Policies,
    TopKLogProbs,
)
from tests.looped import looped
from tests.rules.ratios import TRAINER_RECOMPUTED
from tests.rules.trust_regions.cases import (
    F64,
    INF,
    OVER_BATCHES,
    REGIONS,
    K,
    ask,
    cast,
    columns,
    decide,
    policies,
    random_policies,
    signs,
    taken,
    with_keys,
)

SYMBOLS = {"r", "p", "q"}
SHARES = ("max_tv", "tv_low", "tv_high", "max_drop", "ratio_low", "alpha", "share", "least_weight")
NO_SHARES = {("sequence-tv", "max_tv")}  # a mean of |r − 1|, which is unbounded
# A covariance may be below 0
ANY_SIGN = {("covariance-clip", "cov_low"), ("covariance-clip", "cov_high")}
SEQUENCE = ("opsm", "sequence-mean", "sequence-product", "sequence-ratio")
UNSIGNED = {  # statistics without the sign of p − q
    "kl-estimate": "at least 0",
    "sequence-tv": "at least 0",
    "second-moment": "at least 0",
    "entropy-quantile": "at least 0",
    "cumulative-tv": "what exceeds a budget",
    "covariance-clip": "goes with A",
    "veto": "that of the furthest token",
}
ENDLESS = ("max_kl", "kl_high", "ratio_high", "log_high", "max_moment")
NUMERIC = [
    (name, threshold)
    for name in REGIONS
    for threshold, default in trust_regions.thresholds(trust_regions.find(name)).items()
    if isinstance(default, (int, float)) and not isinstance(default, bool)
]


def letter(name: str, threshold: str) -> str:
    """A threshold's name in messages: its letter, if it has one."""
    return trust_regions.symbols(trust_regions.find(name)).get(threshold, threshold)


@looped("name", REGIONS)
def test_signature_and_texts(name: str) -> None:
    region = trust_regions.find(name)
    assert inspect.getdoc(region) and inspect.getdoc(region.trust_region)
    assert (
        isinstance(region.FORMULA, str) and region.FORMULA and isinstance(region.NOT_ONE_SIDED, str)
    )
    parameters = inspect.signature(region.trust_region).parameters
    positional = ["compared", "advantage_T", *["settled_TF"] * (name in OVER_BATCHES)]
    assert list(parameters)[: len(positional)] == positional
    for threshold in list(parameters.values())[len(positional) :]:
        assert threshold.kind is inspect.Parameter.KEYWORD_ONLY
        assert isinstance(threshold.default, (float, int, str, bool))
        assert threshold.name not in SYMBOLS  # formulas need the letters
    assert set(trust_regions.thresholds(region)) == set(parameters) - set(positional)


def test_which_masks_look_at_batches() -> None:
    """Their three functions take the same thresholds, with the same defaults."""
    assert OVER_BATCHES == ["covariance-clip", "entropy-quantile", "second-moment"]
    for region in map(trust_regions.find, OVER_BATCHES):
        assert region.SCOPE in ("batch", "group")
        signatures = [
            inspect.signature(f).parameters
            for f in (region.trust_region, region.collect, region.settle)
        ]
        positional = [
            [n for n, p in signature.items() if p.kind is not p.KEYWORD_ONLY]
            for signature in signatures
        ]
        assert positional == [
            ["compared", "advantage_T", "settled_TF"],
            ["compared", "advantage_T"],
            ["rows_UM"],
        ]
        for signature in signatures:
            assert {n: p.default for n, p in signature.items() if p.kind is p.KEYWORD_ONLY} == (
                trust_regions.thresholds(region)
            )


@looped("name", sorted(set(REGIONS) - set(OVER_BATCHES)))
def test_a_mask_without_a_scope_sees_no_other_response(name: str) -> None:
    """The decisions on a response do not depend on other responses."""
    batch = random_policies(6, responses=12)
    advantage_T = signs(len(batch.trainer))
    together = ask(name, batch, advantage_T)
    for s in range(12):
        alone, place_T = taken(batch, [s])
        decision = ask(name, alone, advantage_T[place_T])
        assert torch.equal(decision.keep_T, together.keep_T[place_T])
        torch.testing.assert_close(
            decision.statistic_T, together.statistic_T[place_T], rtol=1e-9, atol=1e-12
        )


@looped("name", REGIONS)
def test_the_order_of_responses_does_not_matter(name: str) -> None:
    """Nor does it for random draws, which depend on the keys of rows."""
    batch = random_policies(7, responses=40)
    batch = with_keys(batch, np.zeros(40, dtype=np.int64), np.arange(40) // 4)
    advantage_T = signs(len(batch.trainer))
    turned, place_T = taken(
        batch, torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    )
    chosen = {"share": 0.1} if name == "covariance-clip" else {}
    expected, decision = (
        ask(name, batch, advantage_T, **chosen),
        ask(name, turned, advantage_T[place_T], **chosen),
    )
    assert torch.equal(decision.keep_T, expected.keep_T[place_T])
    torch.testing.assert_close(
        decision.statistic_T, expected.statistic_T[place_T], rtol=1e-12, atol=1e-13
    )


@looped("name", REGIONS)
def test_formula_shows_its_letters_and_every_number(name: str) -> None:
    region = trust_regions.find(name)
    fields = {field for _, field, _, _ in string.Formatter().parse(region.FORMULA) if field}
    letters_of = trust_regions.symbols(region)
    assert set(letters_of) <= set(trust_regions.thresholds(region))
    numeric = {threshold for of, threshold in NUMERIC if of == name}
    assert numeric <= fields <= SYMBOLS | set(trust_regions.thresholds(region))
    letters = {
        TRAINER_ROLLOUT: ("r", "p", "q"),
        TRAINER_RECOMPUTED: ("r′", "p", "p′"),
        ENGINE_GAP: ("ρ", "p′", "q"),
    }
    for ratio, three in letters.items():
        formula = Mask(name, ratio).formula
        assert not set("{}") & set(formula)
        for threshold, default in trust_regions.thresholds(region).items():
            assert (
                threshold not in letters_of
                or f"{letters_of[threshold].partition('_')[0]} = " in formula
            )
            assert threshold not in letters_of or f"{default:g}" in formula.rpartition("(")[2]
        assert all(
            letter in formula
            for symbol, letter in zip("rpq", three, strict=True)
            if symbol in fields
        )


def snapshot(batch: Policies) -> list[Tensor]:
    return [x.clone() for x in columns(batch)]


@looped("name", REGIONS)
@looped("dtype", [torch.float32, F64])
def test_decision_and_purity(name: str, dtype: torch.dtype) -> None:
    batch = cast(random_policies(0, responses=12), dtype)
    advantage_T = signs(len(batch.trainer), dtype=dtype)
    before, advantage_before_T = snapshot(batch), advantage_T.clone()
    decision = ask(name, batch, advantage_T)
    repeated = ask(name, batch, advantage_T)
    fresh = ask(name, cast(random_policies(0, responses=12), dtype), advantage_T)
    assert decision.keep_T.dtype == torch.bool and decision.keep_T.shape == advantage_T.shape
    assert (
        decision.statistic_T.is_floating_point() and decision.statistic_T.shape == advantage_T.shape
    )
    for other in (repeated, fresh):
        assert torch.equal(decision.keep_T, other.keep_T)
        assert torch.equal(decision.statistic_T, other.statistic_T)
    assert all(torch.equal(x, y) for x, y in zip(before, snapshot(batch), strict=True))
    assert torch.equal(advantage_T, advantage_before_T)


def test_masks_leave_no_trace_in_what_they_share() -> None:
    """All masks on the same policies, in either order, decide as each by itself."""
    shared, advantage_T = (
        random_policies(1, responses=12),
        signs(len(random_policies(1, responses=12).trainer)),
    )
    alone = {name: ask(name, random_policies(1, responses=12), advantage_T) for name in REGIONS}
    for name in [*REGIONS, *reversed(REGIONS)]:
        decision = ask(name, shared, advantage_T)
        assert torch.equal(decision.keep_T, alone[name].keep_T)
        assert torch.equal(decision.statistic_T, alone[name].statistic_T)


@looped("name", REGIONS)
@looped("dtype", [torch.float32, F64])
@looped("lengths", [[], [0], [0, 0], [1], [0, 1, 0]])
def test_few_tokens(name: str, dtype: torch.dtype, lengths: list[int]) -> None:
    empty = torch.zeros(sum(lengths), dtype=dtype)
    batch = policies(empty - 1, empty - 0.5)
    offset_S1 = torch.tensor([0, *lengths]).cumsum(0)
    batch = Policies(batch.rollout, batch.trainer, None, offset_S1, batch.topk, batch.entropy_T)
    decision = ask(name, batch, empty + 1)
    assert decision.keep_T.shape == decision.statistic_T.shape == empty.shape
    assert decision.statistic_T.isfinite().all()


@looped("name", REGIONS)
def test_an_empty_response_changes_nothing(name: str) -> None:
    rollout, trainer = (
        torch.tensor([-1.0, -2, -0.5], dtype=F64),
        torch.tensor([-0.5, -2.5, -0.6], dtype=F64),
    )
    advantage = torch.tensor([1.0, -1, -1], dtype=F64)
    for lengths in ([0, 2, 1], [2, 0, 1], [2, 1, 0]):
        with_empty = ask(name, policies(rollout, trainer, lengths=lengths), advantage)
        without = ask(name, policies(rollout, trainer, lengths=[2, 1]), advantage)
        assert torch.equal(with_empty.keep_T, without.keep_T)
        assert torch.equal(with_empty.statistic_T, without.statistic_T)


@looped("name", sorted(set(REGIONS) - set(UNSIGNED)))
def test_the_statistic_has_the_sign_of_the_move(name: str) -> None:
    batch = random_policies(2)
    d_T = batch.trainer - batch.rollout
    mean_S = torch.stack([part.mean() for part in d_T.split(batch.responses.length_S.tolist())])
    expected = mean_S[batch.responses.response_T] if name in SEQUENCE else d_T
    statistic_T = ask(name, batch, signs(len(d_T))).statistic_T
    assert torch.equal(statistic_T > 0, expected > 0) and torch.equal(statistic_T < 0, expected < 0)


def test_statistics_without_a_side() -> None:
    """Other masks' statistics are distances or other values, as their docstrings say."""
    batch = random_policies(2)
    d_T = batch.trainer - batch.rollout
    for name, says in UNSIGNED.items():
        statistic_T = ask(name, batch, signs(len(d_T))).statistic_T
        assert not torch.equal(statistic_T > 0, d_T > 0), name
        assert says != "at least 0" or (statistic_T >= 0).all(), name


@looped("name", REGIONS)
def test_without_advantage_there_is_nothing_to_block(name: str) -> None:
    batch = random_policies(3)
    zero_T = torch.zeros_like(batch.trainer)
    assert decide(Mask(name), batch, zero_T).keep_T.all()
    some_T = torch.where(torch.arange(len(zero_T)) % 2 == 0, signs(len(zero_T)), 0)
    decision = decide(Mask(name), batch, some_T)
    assert decision.keep_T[some_T == 0].all()
    alone = ask(name, batch, some_T)
    assert torch.equal(decision.keep_T[some_T != 0], alone.keep_T[some_T != 0])
    assert torch.equal(decision.statistic_T, alone.statistic_T)


def test_every_mask_blocks_something_and_keeps_something() -> None:
    """Otherwise the tests above would pass for a mask that always keeps."""
    batch = random_policies(3)
    for name in set(REGIONS) - {"none"}:
        keep_T = ask(name, batch, signs(len(batch.trainer))).keep_T
        assert keep_T.any() and not keep_T.all(), name


@looped(("name", "threshold"), [pair for pair in NUMERIC if pair not in ANY_SIGN])
@looped("value", [-1, -1e-9, float("nan")])
def test_negative_thresholds_are_refused(name: str, threshold: str, value: float) -> None:
    shown = letter(name, threshold)
    with pytest.raises(UsageError, match=f"{shown}=.*choose|{shown}=.*is out of range"):
        ask(
            name,
            random_policies(0, responses=2),
            signs(len(random_policies(0, responses=2).trainer)),
            **{threshold: value},
        )


OF_SHARES = [pair for pair in NUMERIC if pair[1] in SHARES and pair not in NO_SHARES]


@looped(("name", "threshold"), OF_SHARES)
def test_an_unreachable_threshold_is_refused(name: str, threshold: str) -> None:
    """A probability changes by at most 1, and a ratio drops by at most 1; 15 for 15 % would
    silently block nothing.
    """
    batch = random_policies(0, responses=2)
    advantage_T = signs(len(batch.trainer))
    for value in (1 + 1e-9, 15, INF):
        with pytest.raises(
            UsageError,
            match=f"{letter(name, threshold)}=.* is out of range: choose a number from 0 to 1",
        ):
            ask(name, batch, advantage_T, **{threshold: value})
    ask(name, batch, advantage_T, **{threshold: 1.0})


@looped(("name", "threshold"), [*((n, t) for n, t in NUMERIC if t in ENDLESS), *NO_SHARES])
def test_unbounded_thresholds_may_be_large(name: str, threshold: str) -> None:
    """And then keep everything with A > 0, if the mask uses only that threshold."""
    batch = random_policies(0, responses=2)
    advantage_T = signs(len(batch.trainer))
    no_draw = {"cov_high": 1.0} if name == "covariance-clip" else {}  # it also draws tokens
    assert (
        ask(name, batch, advantage_T, **no_draw, **{threshold: 1e6}).keep_T[advantage_T > 0].all()
    )


def test_which_thresholds_are_shares() -> None:
    masks_of = {
        threshold: {name for name, other in NUMERIC if other == threshold} for threshold in SHARES
    }
    assert masks_of["tv_low"] == masks_of["tv_high"] >= {"binary-tv", "top-k-tv"} and masks_of[
        "max_drop"
    ] == {"minimal-negative"}
    assert masks_of["max_tv"] >= {"probability-band", "cumulative-tv", "sequence-tv"}
    assert (
        masks_of["ratio_low"] >= {"ratio-clip", "relaxed-ratio-clip", "sequence-ratio"}
        and masks_of["alpha"]
    )
    assert masks_of["share"] == {"covariance-clip", "entropy-quantile"} and masks_of[
        "least_weight"
    ] == {"cumulative-tv"}


@looped("name", REGIONS)
def test_a_mask_that_reads_top_k_says_so(name: str) -> None:
    """READS_TOP_K decides whether a trace must hold top-K columns, and `k` how many; likewise
    for the entropy.
    """
    batch, region = random_policies(0, responses=2), trust_regions.find(name)
    lean = Policies(batch.rollout, batch.trainer, None, batch.offset_S1)
    if getattr(region, "READS_ENTROPY", False):
        with pytest.raises(ValueError, match="this rule needs the trainer's entropy"):
            ask(name, lean, signs(len(batch.trainer)))
    elif getattr(region, "READS_TOP_K", False):
        assert type(trust_regions.thresholds(region)["k"]) is int
        with pytest.raises(ValueError, match="columns"):
            ask(name, lean, signs(len(batch.trainer)))
    else:
        assert ask(name, lean, signs(len(batch.trainer))).keep_T.shape == batch.trainer.shape


def test_which_masks_read_top_k() -> None:
    assert [n for n in REGIONS if getattr(trust_regions.find(n), "READS_TOP_K", False)] == [
        "top-k-kl",
        "top-k-tv",
    ]
    assert [n for n in REGIONS if getattr(trust_regions.find(n), "READS_ENTROPY", False)] == [
        "entropy-quantile"
    ]


@looped(("low", "high"), [(1.1, 2), (0.5, 0.9)])
@looped("name", ["icepop", "sequence-mean", "sequence-product", "veto"])
def test_a_band_without_the_ratio_1_is_refused(name: str, low: float, high: float) -> None:
    with pytest.raises(UsageError, match=f"band_low={low:g}, band_high={high:g}"):
        ask(name, random_policies(0, responses=2), signs(1), band_low=low, band_high=high)


def test_other_invalid_thresholds() -> None:
    batch = random_policies(0, responses=2)
    for name, chosen in (
        ("minimal-negative", {"max_drop": 0.0}),
        ("top-k-kl", {"k": 0}),
        ("dual-clip", {"max_ratio": 0.9}),
        ("kl-estimate", {"estimator": "k1"}),
        ("kl-estimate", {"over": "min"}),
        ("second-moment", {"counted": "inward"}),
    ):
        with pytest.raises(UsageError):
            ask(name, batch, signs(len(batch.trainer)), **chosen)
    with pytest.raises(UsageError, match=r"relax=all is unknown\. Choose one of: both, high, low"):
        ask("relaxed-ratio-clip", batch, signs(len(batch.trainer)), relax="all")


EXTREME = [
    (-200, -0.1),
    (-200, -1e-3),
    (-0.1, -INF),
    (-5, -INF),
    (-200, -200),
    (-1e-3, -200),
    (-0.5, -0.5),
]


def check_extremes(
    name: str, tokens: list[tuple[float, float]], sign: float, lengths: list[int]
) -> None:
    """Decisions in float32 equal those in float64, and no statistic is NaN."""
    rollout, trainer = torch.tensor(tokens, dtype=F64).T
    advantage_T = torch.full_like(rollout, sign)
    exact = ask(name, policies(rollout, trainer, lengths=lengths), advantage_T)
    rounded = ask(
        name, policies(rollout.float(), trainer.float(), lengths=lengths), advantage_T.float()
    )
    assert not exact.statistic_T.isnan().any() and not rounded.statistic_T.isnan().any()
    assert rounded.keep_T.tolist() == exact.keep_T.tolist()


@looped("name", REGIONS)
@looped("sign", [1.0, -1.0])
@looped("lengths", [[1] * len(EXTREME), [len(EXTREME)]])
def test_infinite_ratios_and_excluded_tokens(name: str, sign: float, lengths: list[int]) -> None:
    """log p − log q = 200 is an infinite ratio in float32, and log p = −inf a token that the
    trainer excludes.
    """
    check_extremes(name, EXTREME, sign, lengths)


@looped("name", REGIONS)
def test_an_excluded_token_whose_rollout_probability_underflows(name: str) -> None:
    check_extremes(name, [(-200, -INF)], -1.0, [1])


@looped(
    ("name", "blocked"),
    [
        ("ratio-clip", True),
        ("binary-tv", True),
        ("binary-kl", True),
        ("top-k-tv", True),
        ("none", False),
    ],
)
def test_far_tokens_are_blocked(name: str, blocked: bool) -> None:
    far_up = policies(torch.tensor([-200.0]), torch.tensor([-0.1]))
    far_down = policies(torch.tensor([-0.1]), torch.tensor([-INF]))
    assert ask(name, far_up, torch.ones(1)).keep_T.item() is not blocked
    assert ask(name, far_down, -torch.ones(1)).keep_T.item() is not blocked


def test_top_k_masks_need_their_columns() -> None:
    batch = random_policies(0, responses=2)
    advantage_T = signs(len(batch.trainer))
    for name in ("top-k-tv", "top-k-kl"):
        with pytest.raises(ValueError, match=f"top-{K + 1} .* {K + 1} columns"):
            ask(name, batch, advantage_T, k=K + 1)
        with pytest.raises(ValueError, match="columns"):
            ask(name, Policies(batch.rollout, batch.trainer, None, batch.offset_S1), advantage_T)
    assert isinstance(batch.topk, TopKLogProbs)
