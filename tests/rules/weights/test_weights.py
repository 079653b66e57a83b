"""What every file in weights/ promises, and its values by hand."""

from __future__ import annotations

import inspect
import string
from math import cosh, exp, inf, log

import pytest
import torch
from torch import Tensor

from mismatch_cli.base import registry
from mismatch_cli.rules import weights
from mismatch_cli.rules.algorithms.masks_and_factors import factor
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.rules.policies import Policies, Ratio
from tests.rules.trust_regions.cases import (
    F64,
    cast,
    equal_policies,
    policies,
    random_policies,
    signs,
    taken,
    weigh,
    weight_T,
)

WEIGHTS = registry.names(weights.PACKAGE)
OVER_BATCHES = {"covariance-pull": "batch", "gbpo": "group"}
DEFAULTS: dict[str, dict[str, float]] = {
    "capped-ratio": {"floor": 0.0, "cap": inf},
    "covariance-pull": {"beta": 0.1, "share": 2e-4},  # verl
    "drpo": {"epsilon": 12.5},
    "gbpo": {"ratio_low": 0.3, "ratio_high": 0.3, "temperature": 1e-4},  # its README
    "gmpo": {"log_low": 0.4, "log_high": 0.4},  # its code, TRL
    "n-step-ratio": {"steps": 2},
    "prefix-minimum": {"ratio_low": 0.2, "ratio_high": 0.28},
    "pull": {"beta": 0.05},  # tinker's page
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "topr": {},
    "vespo": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
}
LEVELS = [Ratio(level=level) for level in ("token", "product", "mean")]


def test_defaults_are_the_published_ones() -> None:
    assert {name: weights.parameters(weights.find(name)) for name in WEIGHTS} == DEFAULTS


@pytest.mark.parametrize("name", WEIGHTS)
def test_signature_and_texts(name: str) -> None:
    module = weights.find(name)
    assert inspect.getdoc(module) and inspect.getdoc(module.weight)
    assert getattr(module, "SCOPE", None) == OVER_BATCHES.get(name)
    positional = ["compared", "level", "advantage_T", *["settled_TF"] * (name in OVER_BATCHES)]
    functions = [module.weight, *((module.collect, module.settle) if name in OVER_BATCHES else ())]
    for function in functions:
        named = inspect.signature(function).parameters
        assert {n: p.default for n, p in named.items() if p.kind is p.KEYWORD_ONLY} == DEFAULTS[
            name
        ]
    assert [
        n
        for n, p in inspect.signature(module.weight).parameters.items()
        if p.kind is not p.KEYWORD_ONLY
    ] == positional
    assert set(module.SYMBOLS) <= set(DEFAULTS[name])
    if hasattr(module, "FORMULA"):  # capped-ratio builds its own
        fields = {field for _, field, _, _ in string.Formatter().parse(module.FORMULA) if field}
        assert set(DEFAULTS[name]) <= fields <= {"r", "p", "q"} | set(DEFAULTS[name])
    assert not set("{}") & set(str(factor(name)))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_changes_no_input_and_has_one_number_per_token(
    name: str, dtype: torch.dtype
) -> None:
    batch = cast(random_policies(0, responses=12), dtype)
    advantage_T = signs(len(batch.trainer), dtype=dtype)
    alike, unchanged = (cast(random_policies(0, responses=12), dtype) for _ in range(2))
    for ratio in LEVELS:
        weight_T = weigh(factor(name, ratio), batch, advantage_T)
        assert weight_T.shape == advantage_T.shape and not weight_T.isnan().any()
        assert torch.equal(weight_T, weigh(factor(name, ratio), alike, advantage_T))
        assert torch.equal(weight_T, weigh(factor(name, ratio), batch, advantage_T))
    for column in ("rollout", "trainer"):
        assert torch.equal(getattr(batch, column), getattr(unchanged, column))


@pytest.mark.parametrize("name", sorted(set(WEIGHTS) - set(OVER_BATCHES)))
def test_a_weight_sees_no_other_response(name: str) -> None:
    batch = random_policies(6, responses=12)
    advantage_T = signs(len(batch.trainer))
    for ratio in LEVELS:
        together = weigh(factor(name, ratio), batch, advantage_T)
        for s in range(12):
            alone, place_T = taken(batch, [s])
            weight_T = weigh(factor(name, ratio), alone, advantage_T[place_T])
            torch.testing.assert_close(weight_T, together[place_T], rtol=1e-12, atol=1e-13)


def test_equal_policies_weigh_one_and_pull_nowhere() -> None:
    same = equal_policies(random_policies(0))
    advantage_T = signs(len(same.rollout))
    for name in WEIGHTS:
        for ratio in LEVELS:
            weight_T = weigh(factor(name, ratio), same, advantage_T)
            expected = torch.tensor(0.0 if name in ("pull", "covariance-pull") else 1.0, dtype=F64)
            assert (weight_T.abs() if name == "gbpo" else weight_T).eq(expected).all(), name


@pytest.mark.parametrize("lengths", [[], [0], [0, 1, 0]], ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_few_tokens(name: str, lengths: list[int]) -> None:
    empty = torch.zeros(sum(lengths), dtype=F64)
    drawn = policies(empty - 1, empty - 0.5)
    batch = Policies(drawn.rollout, drawn.trainer, None, torch.tensor([0, *lengths]).cumsum(0))
    for ratio in LEVELS:
        weight_T = weigh(factor(name, ratio), batch, empty + 1)
        assert weight_T.shape == empty.shape and weight_T.isfinite().all()


def two_responses() -> tuple[Policies, Tensor]:
    """d = 0.5, −1, 0.2 with A = 1, and −0.3, 0.8 with A = −2."""
    rollout = torch.tensor([-1, -1, -2, -0.7, -3], dtype=F64)
    d_T = torch.tensor([0.5, -1, 0.2, -0.3, 0.8], dtype=F64)
    return policies(rollout, rollout + d_T, lengths=[3, 2]), torch.tensor(
        [1, 1, 1, -2, -2], dtype=F64
    )


def found(name: str, level: str = "token", **chosen: float) -> list[float]:
    batch, advantage_T = two_responses()
    return weigh(factor(name, Ratio(level=level), **chosen), batch, advantage_T).tolist()


def test_weights_by_hand() -> None:
    r = [exp(d) for d in (0.5, -1, 0.2, -0.3, 0.8)]
    near = pytest.approx
    assert found("capped-ratio", floor=0.5, cap=1.5) == near([1.5, 0.5, r[2], r[3], 1.5])
    assert found("pull", beta=2.0) == near([-1, 2, -0.4, 0.6, -1.6])
    assert found("pull", "product", beta=2.0) == near([0.6] * 3 + [-1] * 2)
    assert found("topr") == near([1, 1, 1, r[3], 1])
    # Σd = 0.5 of the negative response: capped at 1
    assert found("topr", "product") == near([1, 1, 1, 1, 1])
    # f′(r) r = sech²(τ (r − 1)/2) r
    tau = [1.0] * 3 + [1.05] * 2
    assert found("sapo") == near(
        [x / cosh(t * (x - 1) / 2) ** 2 for t, x in zip(tau, r, strict=True)]
    )
    # φ(w) = e^λ w^k e^(−λw) with w = e^(−0.3) and e^0.5
    up, down = exp(-0.3), exp(0.5)
    assert found("vespo", "product") == near(
        [exp(3) * up**2 * exp(-3 * up)] * 3 + [exp(2) * down**3 * exp(-2 * down)] * 2
    )
    q = [exp(x) for x in (-1, -1, -2, -0.7, -3)]
    moved = [b * (a - 1) for a, b in zip(r, q, strict=True)]  # p − q
    by_sign = zip(r, moved, (1, 1, 1, -1, -1), strict=True)
    assert found("drpo", epsilon=0.1) == near([x * (1 - s * m / 0.1) for x, m, s in by_sign])
    # p − q = 0.24: beyond ε, the weight is reversed
    assert found("drpo", epsilon=0.1)[0] < 0 < found("drpo")[0]
    # the smallest earlier ratio: none, e^0.5, e^−1 | none, e^−0.3
    assert found("prefix-minimum") == near([1.28, 0.8, 0.8, 0.8, 1.28])
    assert found("prefix-minimum", ratio_low=1.0, ratio_high=9.0) == near(
        [exp(d) for d in (0.5, -0.5, -0.8, -0.3, 0.5)]
    )
    assert found("n-step-ratio") == near([exp(d) for d in (-0.5, -0.8, 0.2, 0.5, 0.8)])
    assert found("n-step-ratio", steps=1) == near(r)
    assert found("n-step-ratio", steps=64) == near([exp(d) for d in (-0.3, -0.8, 0.2, 0.5, 0.8)])
    # d is at most 0.4 for A > 0, and at least −0.2 for A < 0
    assert found("gmpo", log_low=0.2) == near(
        [exp((0.4 - 1 + 0.2) / 3)] * 3 + [exp((-0.2 + 0.8) / 2)] * 2
    )


def test_a_token_without_advantage_adds_nothing_to_a_clipped_mean() -> None:
    batch, advantage_T = two_responses()
    advantage_T[1] = 0
    weight_T = weigh(factor("gmpo"), batch, advantage_T)
    assert weight_T[0].item() == pytest.approx(exp((0.4 + 0 + 0.2) / 3))


def test_weights_of_a_group_and_of_a_batch_by_hand() -> None:
    """The median of A = 1 and −2 is −0.5: the targets are 1.3 and 0.7, and r = e^0.5 is beyond
    the first.
    """
    r = [exp(d) for d in (0.5, -1, 0.2, -0.3, 0.8)]
    assert found("gbpo") == pytest.approx([-r[0], r[1], r[2], r[3], r[4]])
    # with σ(±1.5) = 0.8176 the targets are 1.1905 and 0.8095: 1.22 is beyond, 0.74 below, where A <
    # 0 means up
    assert found("gbpo", temperature=1.0) == pytest.approx([-r[0], r[1], -r[2], -r[3], r[4]])
    # A − mean A = 1.2 and −1.8, log p = −.5 −2 −1.8 −1 −2.2 with the mean −1.5: 1.2 −.6 −.36 −.9
    # 1.26
    assert found("covariance-pull") == pytest.approx([0, 0, 0, 0, -0.1])
    assert found("covariance-pull", share=0.4, beta=1.0) == pytest.approx([-1, 0, 0, 0, -1])
    assert found("covariance-pull", share=0.6, beta=1.0) == pytest.approx([-1, 0, -1, 0, -1])
    assert found("covariance-pull", share=1.0, beta=1.0) == pytest.approx([-1, 1, -1, 1, -1])


def test_a_single_answer_has_a_median_of_0() -> None:
    """Its target is 1 ± ε by the sign of A: it is not its own median, whose target would be 1."""
    rollout = torch.tensor([-1.0], dtype=F64)
    for d, a, expected in ((0.1, 1.0, 1), (0.5, 1.0, -1), (-0.1, -1.0, 1), (-0.5, -1.0, -1)):
        batch = policies(rollout, rollout + d)
        weight = weigh(factor("gbpo"), batch, torch.tensor([a], dtype=F64)).item()
        assert weight == pytest.approx(expected * exp(d)), (d, a)


def test_where_one_factor_is_0_and_another_infinite_the_weight_is_0() -> None:
    """As with the clamps of frameworks; an infinite SAPO or VESPO ratio has the weight 0, too."""
    near, never = torch.tensor([-1.0], dtype=F64), torch.tensor([-inf], dtype=F64)
    for name in ("ppo-tis", "ppo-mis", "ppo-seq-tis", "vaco", "sapo"):
        batch = policies(near, near, never)
        for a in (1.0, -1.0):
            assert weight_T(TABLE[name], batch, torch.tensor([a], dtype=F64)).item() == 0, name
    assert weight_T(TABLE["vespo"], policies(never, near), torch.ones(1, dtype=F64)).item() == 0


def test_an_excluded_token_does_not_hide_the_covariance_of_others() -> None:
    batch, advantage_T = two_responses()
    trainer = torch.cat([batch.trainer, torch.tensor([-inf], dtype=F64)])
    rollout, advantage_T = (
        torch.cat([x, torch.tensor([-1.0], dtype=F64)]) for x in (batch.rollout, advantage_T)
    )
    weight_T = weigh(
        factor("covariance-pull", share=0.4, beta=1.0), policies(rollout, trainer), advantage_T
    )
    assert weight_T[:5].tolist() == [-1, 0, 0, 0, -1]


def test_a_formula_shows_its_ratio_and_its_numbers() -> None:
    assert str(factor("vespo", Ratio(level="product"), k_pos=2.5)) == (
        "e^λ w^k e^(−λw) with w = Πr, k = 2.5 and λ = 3 for A ≥ 0, k = 3 and λ = 2 otherwise"
    )
    assert str(factor("pull", Ratio("trainer", "recomputed"), beta=log(2))) == "−0.693147 log r′"
    assert (
        str(factor("capped-ratio", Ratio("recomputed", "rollout"), floor=0.5, cap=2))
        == "max(min(ρ, 2), 0.5)"
    )
