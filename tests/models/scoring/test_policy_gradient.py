"""The policy-gradient head against autograd through full logits: every transform, dtype and
tile.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring import policy_gradient
from mismatch_cli.models.scoring.head import Head, score_hidden
from mismatch_cli.models.scoring.policy_gradient import LogpPass, logp_pass, policy_gradient_loss
from tests.paths import ROOT

PLAIN = SamplingSettings()
TRANSFORMS = {
    "plain": {},
    "bias": {"bias_V": True},
    "divisor": {"divisor": 8.0},
    "multiplier": {"multiplier": 0.25},
    "softcap": {"softcap": 5.0},
    "everything": {"bias_V": True, "divisor": 1.7, "multiplier": 3.1, "softcap": 5.0},
}


class Case(NamedTuple):
    """Hidden states and a head that require grad, and a coefficient for each sampled token."""

    hidden_NH: Tensor
    head: Head
    ids_N: Tensor
    coefficient_N: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.hidden_NH, self.head.weight_VH, self.head.bias_V) if x is not None]

    def to(self, how: torch.dtype | str) -> Case:
        """In another dtype, or on another device."""
        leaves = [x.detach().to(how).requires_grad_() for x in self.leaves]
        columns = (x.to(leaves[0].device) for x in (self.ids_N, self.coefficient_N))
        head = replace(self.head, **dict(zip(("weight_VH", "bias_V"), leaves[1:], strict=False)))
        return Case(leaves[0], head, *columns)


def make_case(
    tokens: int = 70,
    vocabulary: int = 503,
    hidden: int = 24,
    *,
    bias_V: bool = False,
    **steps: float,
) -> Case:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    head = Head(
        normal(vocabulary, hidden) * 3 / hidden**0.5,
        normal(vocabulary) if bias_V else None,
        **steps,
    )
    ids_N = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return Case(normal(tokens, hidden), head, ids_N, normal(tokens)).to(torch.float64)


class Outcome(NamedTuple):
    loss: Tensor
    logp_N: Tensor
    entropy_N: Tensor
    gradients: list[Tensor]


def reference(case: Case, temperature: float = 1.0) -> Outcome:
    """Autograd through full logits, each step in the head's dtype and the softmax in float32 at
    least.
    """
    head = case.head
    logits_NV = (
        torch.nn.functional.linear(case.hidden_NH, head.weight_VH, head.bias_V)
        / head.divisor
        * head.multiplier
    )
    if head.softcap is not None:
        logits_NV = torch.tanh(logits_NV / head.softcap) * head.softcap
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    logp_NV = logits_NV.log_softmax(dim=-1)
    logp_N = logp_NV.gather(1, case.ids_N[:, None])[:, 0]
    loss = -(case.coefficient_N.to(logp_N) * logp_N).sum()
    entropy_N = -(logp_NV.exp() * logp_NV).sum(1)
    return Outcome(
        loss.detach(),
        logp_N.detach(),
        entropy_N.detach(),
        list(torch.autograd.grad(loss, case.leaves)),
    )


def ours(
    case: Case,
    temperature: float = 1.0,
    row_tile: int = 32,
    scale: float = 1.0,
    first_pass: LogpPass | None = None,
) -> Outcome:
    sampling = SamplingSettings(temperature=temperature)
    result = policy_gradient_loss(
        case.hidden_NH,
        case.head,
        case.ids_N,
        lambda rows, _: case.coefficient_N[rows],
        sampling,
        row_tile,
        first_pass,
    )
    gradients = torch.autograd.grad(result.loss * scale, case.leaves)
    return Outcome(result.loss.detach(), result.logp_N, result.entropy_N, list(gradients))


def assert_same(result: Outcome, expected: Outcome, tolerance: float) -> None:
    for column, exact in zip(
        (*result[:3], *result.gradients), (*expected[:3], *expected.gradients), strict=True
    ):
        assert column.shape == exact.shape and not column.requires_grad
        scale = max(1.0, exact.abs().max().item())
        torch.testing.assert_close(column.double(), exact.double(), rtol=0, atol=tolerance * scale)


def errors(result: Outcome, exact: Outcome) -> list[float]:
    """Relative distance of each gradient."""
    return [
        ((a.double() - b.double()).norm() / b.double().norm()).item()
        for a, b in zip(result.gradients, exact.gradients, strict=True)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("steps", TRANSFORMS.values(), ids=TRANSFORMS)
def test_float64_gradients_are_those_of_autograd(steps: dict, temperature: float) -> None:
    case = make_case(**steps)
    assert_same(ours(case, temperature), reference(case, temperature), 1e-10)


@pytest.mark.parametrize("steps", TRANSFORMS.values(), ids=TRANSFORMS)
def test_float32_gradients_are_exact_to_two_parts_in_a_million(steps: dict) -> None:
    case = make_case(**steps)
    rounded = case.to(torch.float32)
    result = ours(rounded, 0.7)
    assert {x.dtype for x in (*result[:3], *result.gradients)} == {torch.float32}
    exact = reference(rounded.to(torch.float64), 0.7)
    assert_same(result, exact, 2e-6)
    assert max(errors(result, exact)) < 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("steps", TRANSFORMS.values(), ids=TRANSFORMS)
def test_half_precision_gradients_are_as_good_as_autograds(steps: dict, dtype: torch.dtype) -> None:
    case = make_case(300, **steps).to(dtype)
    result, exact = ours(case, row_tile=64), reference(case.to(torch.float64))
    assert [x.dtype for x in result.gradients] == [dtype] * len(case.leaves)
    for error, limit in zip(errors(result, exact), errors(reference(case), exact), strict=True):
        assert error <= 1.01 * limit
    assert result.logp_N.dtype == result.loss.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("steps", TRANSFORMS.values(), ids=TRANSFORMS)
def test_log_prob_and_entropy_are_those_of_the_scoring_head(
    steps: dict, dtype: torch.dtype
) -> None:
    case = make_case(**steps).to(dtype)
    sampling = SamplingSettings(temperature=0.8)
    scores = score_hidden(case.hidden_NH, case.head, case.ids_N, case.ids_N[:, None], sampling)
    result = ours(case, 0.8)
    torch.testing.assert_close(result.logp_N, scores.logp_T, atol=2e-6, rtol=2e-7)
    torch.testing.assert_close(result.entropy_N, scores.entropy_T, atol=2e-6, rtol=1e-6)
    passed = logp_pass(case.hidden_NH, case.head, case.ids_N, sampling)
    assert torch.equal(passed.logp_N, scores.logp_T) and not passed.logp_N.is_inference()
    assert torch.equal(passed.entropy_N, scores.entropy_T) and not passed.entropy_N.is_inference()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", TRANSFORMS.values(), ids=TRANSFORMS)
def test_known_log_probs_give_the_same_gradients(steps: dict, dtype: torch.dtype) -> None:
    case = make_case(300, **steps).to(dtype)
    first_pass = logp_pass(case.hidden_NH, case.head, case.ids_N, SamplingSettings(temperature=0.8))
    result, expected = (
        ours(case, 0.8, row_tile=64, first_pass=first_pass),
        ours(case, 0.8, row_tile=64),
    )
    assert_same(result, expected, 1e-5)
    if dtype != torch.bfloat16:
        assert torch.equal(result.logp_N.float(), first_pass.logp_N)


def test_a_target_outside_the_support_is_computed_again() -> None:
    """Its log π is -inf, from which no normaliser follows."""
    case = make_case()
    weight_VH = case.head.weight_VH.detach().clone()
    bias_V = torch.zeros(len(weight_VH), dtype=weight_VH.dtype)
    bias_V[case.ids_N[0]] = -torch.inf
    hidden_NH, head = case.hidden_NH.detach(), Head(weight_VH, bias_V)
    first_pass = logp_pass(hidden_NH, head, case.ids_N, PLAIN)
    assert first_pass.logp_N[0] == -torch.inf
    coefficient_N = (case.ids_N != case.ids_N[0]).to(weight_VH.dtype)

    def gradient(first_pass: LogpPass | None) -> torch.Tensor:
        leaf_NH = hidden_NH.clone().requires_grad_()
        rule = lambda rows, _: coefficient_N[rows]  # noqa: E731
        result = policy_gradient_loss(leaf_NH, head, case.ids_N, rule, PLAIN, first_pass=first_pass)
        return torch.autograd.grad(result.loss, leaf_NH)[0]

    torch.testing.assert_close(gradient(first_pass), gradient(None), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("row_tile", [1, 7, 64, 70, 1000])
def test_the_tile_does_not_change_the_result(
    row_tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(**TRANSFORMS["everything"])
    expected = ours(case)
    monkeypatch.setattr(policy_gradient, "SLICE", 100)
    monkeypatch.setattr(policy_gradient, "CPU_LOGITS", 0)
    monkeypatch.setattr(policy_gradient, "LEAST_CPU_ROWS", 3)
    assert_same(ours(case, row_tile=row_tile), expected, 1e-12)


def test_the_number_of_rows_in_cache_does_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(**TRANSFORMS["everything"]).to(torch.float32)
    expected = ours(case)
    for logits, least in ((0, 1), (0, 4), (1 << 20, 4)):
        monkeypatch.setattr(policy_gradient, "CPU_LOGITS", logits)
        monkeypatch.setattr(policy_gradient, "LEAST_CPU_ROWS", least)
        result = ours(case)
        assert torch.equal(result.logp_N, expected.logp_N) and torch.equal(
            result.entropy_N, expected.entropy_N
        )
        assert all(
            torch.equal(a, b) for a, b in zip(result.gradients, expected.gradients, strict=True)
        )


@pytest.mark.parametrize("gap", [15.0, 30.0, 120.0])
def test_slopes_keep_their_relative_precision_where_a_token_dominates(gap: float) -> None:
    logits_NV = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    logits_NV[:, 7] = gap
    hidden_NH, weight_VH = torch.eye(6, requires_grad=True), logits_NV.T.contiguous()
    result = policy_gradient_loss(
        hidden_NH, Head(weight_VH), torch.full((6,), 7), lambda *_: torch.ones(()), PLAIN
    )
    (found_NH,) = torch.autograd.grad(result.loss, hidden_NH)
    weight64 = weight_VH.double()
    rest_NV = torch.where(torch.arange(50) == 7, 0.0, logits_NV.double().softmax(1))
    slope_NV = torch.where(torch.arange(50) == 7, -rest_NV.sum(1, keepdim=True), rest_NV)
    torch.testing.assert_close(found_NH.double(), slope_NV @ weight64, rtol=1e-5, atol=1e-37)
    assert (result.logp_N <= 0).all() and (result.entropy_N >= 0).all()


def test_logits_of_minus_infinity_are_outside_the_vocabulary() -> None:
    case = make_case(bias_V=True)
    with torch.no_grad():
        case.head.bias_V[400:] = -torch.inf
    small = Case(
        case.hidden_NH, case.head.rows(slice(0, 400)), case.ids_N % 400, case.coefficient_N
    ).to(torch.float64)
    result, expected = ours(case._replace(ids_N=case.ids_N % 400)), reference(small)
    torch.testing.assert_close(result.entropy_N, expected.entropy_N, atol=1e-12, rtol=0)
    torch.testing.assert_close(result.gradients[1][:400], expected.gradients[1], atol=1e-12, rtol=0)
    assert (result.gradients[1][400:] == 0).all()
    outside = ours(case._replace(ids_N=torch.full((70,), 450), coefficient_N=torch.zeros(70)))
    assert (
        (outside.logp_N == -torch.inf).all()
        and outside.entropy_N.isfinite().all()
        and outside.loss == 0
    )


def test_a_rule_sees_each_tile_once_in_order_without_grad_mode() -> None:
    case = make_case()
    tiles: list[tuple[slice, Tensor]] = []

    def ratio(rows: slice, logp_R: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        tiles.append((rows, logp_R.clone()))
        return logp_R.exp() * case.coefficient_N[rows]

    result = policy_gradient_loss(case.hidden_NH, case.head, case.ids_N, ratio, PLAIN, row_tile=32)
    assert [rows for rows, _ in tiles] == [slice(0, 32), slice(32, 64), slice(64, 70)]
    assert torch.equal(torch.cat([logp for _, logp in tiles]), result.logp_N)
    gradients = list(torch.autograd.grad(result.loss, case.leaves))
    expected = reference(case._replace(coefficient_N=result.logp_N.exp() * case.coefficient_N))
    assert_same(
        Outcome(result.loss.detach(), result.logp_N, result.entropy_N, gradients), expected, 1e-10
    )


def spy(monkeypatch: pytest.MonkeyPatch) -> list[tuple[policy_gradient.WantedGradients, list[int]]]:
    """The arguments of each tile's backward products: the gradients wanted, and the tokens."""
    calls = []
    add = policy_gradient.add_products

    def noted(*args: Any) -> None:
        calls.append((args[0], args[-1].tolist()))
        add(*args)

    monkeypatch.setattr(policy_gradient, "add_products", noted)
    return calls


def test_tokens_without_coefficient_enter_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()
    case.coefficient_N[20:50] = 0  # the end of a tile, a full one, and the start of another
    case.coefficient_N[::7] = 0
    expected = reference(case)
    calls = spy(monkeypatch)
    assert_same(ours(case, row_tile=16), expected, 1e-10)
    assert [rows for _, rows in calls if rows] == [
        [i for i in range(start, min(start + 16, 70)) if case.coefficient_N[i] != 0]
        for start in (0, 16, 48, 64)
    ]
    assert len(calls) == 4


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 1e30])
def test_a_token_without_coefficient_cannot_spoil_the_others(bad: float) -> None:
    case = make_case().to(torch.float32)
    expected = ours(
        case._replace(coefficient_N=case.coefficient_N.index_fill(0, torch.tensor([3]), 0.0))
    )
    with torch.no_grad():
        case.hidden_NH[3] = bad
    case.coefficient_N[3] = 0
    for gradient, exact in zip(ours(case).gradients, expected.gradients, strict=True):
        assert torch.equal(gradient, exact)
    nothing = ours(case._replace(coefficient_N=torch.zeros(70)))
    assert nothing.loss == 0 and all((x == 0).all() for x in nothing.gradients)


def test_a_broken_token_with_a_coefficient_is_not_silent() -> None:
    case = make_case().to(torch.float32)
    case.coefficient_N[5] = torch.nan
    result = ours(case)
    assert (
        result.loss.isnan()
        and result.gradients[0][5].isnan().all()
        and result.gradients[1].isnan().all()
    )
    assert result.gradients[0][6].isfinite().all()


def test_no_tokens() -> None:
    case = make_case(tokens=0, bias_V=True)
    result = ours(case)
    assert result.loss == 0 and result.logp_N.shape == result.entropy_N.shape == (0,)
    assert [x.shape for x in result.gradients] == [x.shape for x in case.leaves]
    assert all((x == 0).all() for x in result.gradients)


def test_float16_with_loss_scaling_neither_loses_small_gradients_nor_hides_overflow() -> None:
    case = make_case(64).to(torch.float16)
    # Below float16 without the scaling
    small = case._replace(coefficient_N=case.coefficient_N * 1e-6)
    exact = reference(small.to(torch.float64))
    result = ours(small, scale=2.0**16)
    unscaled = result._replace(gradients=[x.double() / 2**16 for x in result.gradients])
    assert max(errors(unscaled, exact)) < 0.01
    overflown = ours(case, scale=2.0**20)
    assert all(x.isinf().any() for x in overflown.gradients)
    assert all(
        ((x != 0) | (y == 0)).all()
        for x, y in zip(overflown.gradients, ours(case).gradients, strict=True)
    )


def test_backward_works_once_and_has_no_derivative() -> None:
    case = make_case()
    result = policy_gradient_loss(
        case.hidden_NH, case.head, case.ids_N, lambda rows, _: case.coefficient_N[rows], PLAIN
    )
    (slope_NH,) = torch.autograd.grad(result.loss, case.hidden_NH, create_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        torch.autograd.grad(result.loss, case.hidden_NH)
    assert not slope_NH.requires_grad


def test_without_grad_and_with_a_frozen_head(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()
    calls = spy(monkeypatch)
    before = [x.detach().clone() for x in case.leaves]
    rule = lambda rows, _: case.coefficient_N[rows]  # noqa: E731
    with torch.no_grad():
        result = policy_gradient_loss(case.hidden_NH, case.head, case.ids_N, rule, PLAIN)
    expected = reference(case)
    assert not result.loss.requires_grad
    assert all(gradient is None for gradients, _ in calls for gradient in gradients)
    torch.testing.assert_close(result.loss, expected.loss)
    frozen = replace(case.head, weight_VH=case.head.weight_VH.detach())
    policy_gradient_loss(case.hidden_NH, frozen, case.ids_N, rule, PLAIN).loss.backward()
    torch.testing.assert_close(case.hidden_NH.grad, expected.gradients[0], atol=1e-10, rtol=0)
    assert case.head.weight_VH.grad is None
    assert all(torch.equal(x, y) for x, y in zip(before, case.leaves, strict=True))


def test_a_float32_head_of_a_bfloat16_model() -> None:
    case = make_case().to(torch.bfloat16)
    result = policy_gradient_loss(
        case.hidden_NH,
        case.head.float32(),
        case.ids_N,
        lambda rows, _: case.coefficient_N[rows],
        PLAIN,
    )
    gradients = torch.autograd.grad(result.loss, case.leaves)
    assert [x.dtype for x in gradients] == [torch.bfloat16] * 2
    for gradient, exact in zip(gradients, reference(case.to(torch.float64)).gradients, strict=True):
        torch.testing.assert_close(gradient.double(), exact, rtol=2**-8, atol=1e-4)


def test_what_is_refused() -> None:
    case = make_case()
    with pytest.raises(ValueError, match="full support"):
        policy_gradient_loss(
            case.hidden_NH,
            case.head,
            case.ids_N,
            lambda *_: torch.ones(()),
            SamplingSettings(top_k=5),
        )
    with pytest.raises(RuntimeError, match="expand"):
        policy_gradient_loss(
            case.hidden_NH, case.head, case.ids_N, lambda *_: torch.ones(3, 1), PLAIN
        )


MEMORY = """
import torch
from lab.scoring import peak, reset_peak
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.head import Head
from mismatch_cli.models.scoring.policy_gradient import policy_gradient_loss

torch.set_num_threads(1)


def run(tokens, vocabulary):
    hidden_NH = torch.randn(tokens, 256, requires_grad=True)
    weight_VH = torch.empty(vocabulary, 256).normal_(std=0.1).requires_grad_()
    ids_N = torch.randint(0, vocabulary, (tokens,))
    coefficient_N = torch.ones(tokens)
    coefficient_N[300:-300] = 0  # skips most backward products to save time; every kind of tile remains
    before = reset_peak()
    rule = lambda rows, _: coefficient_N[rows]
    policy_gradient_loss(hidden_NH, Head(weight_VH), ids_N, rule, SamplingSettings()).loss.backward()
    assert weight_VH.grad.abs().sum() > 0
    return peak() - before


run(20, 99)
print(run(2048, 151_936))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="the peak of resident memory can be reset on Linux alone"
)
def test_two_thousand_tokens_take_less_than_400_mb() -> None:
    """The weight's gradient is 156 MB, the logits would be 1,245 MB."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert 156 < float(done.stdout) < 400


@pytest.mark.parametrize(("vocabulary", "rows"), [(1 << 11, 64), (1 << 14, 8), (1 << 17, 4)])
def test_a_cpu_takes_as_many_tokens_at_once_as_fit_its_cache(vocabulary: int, rows: int) -> None:
    """2^17 logits, but at least four tokens: this memory is beside that of a whole tile."""
    head = Head(torch.empty(vocabulary, 1))
    tiles = policy_gradient.GradientTiles(head, 1.0, torch.empty(70, vocabulary))
    assert tiles.z_RV.shape == tiles.cap_slope_RV.shape == (rows, vocabulary)


class OnGpu(Tensor):
    """Says so, and is not."""

    is_cuda = True


def test_products_on_a_gpu_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no such products of bfloat16 numbers; these are exact, then rounded as asked."""

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return (a.double() @ b.double()).to(out_dtype)

    def addmm(added: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor) -> None:
        out.copy_(added + mm(a, b, out_dtype))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    a_UV, b_UH = (torch.randn(30, n).bfloat16().as_subclass(OnGpu) for n in (7, 5))
    exact_VH = a_UV.double().T @ b_UH.double()
    torch.testing.assert_close(policy_gradient._product(a_UV.T, b_UH), exact_VH.float())
    sum_VH = torch.ones(7, 5).as_subclass(OnGpu)
    policy_gradient._add_product(sum_VH, a_UV, a_UV, b_UH)
    torch.testing.assert_close(sum_VH, exact_VH.float() + 1)
