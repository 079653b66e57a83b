"""Divergences against worked numbers, float64 references and the inequalities between them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mismatch_cli.base.arrays import select
from mismatch_cli.rules import divergences as dv

F64 = torch.float64
INF = float("inf")


def prob_difference(logp_rollout_T: Tensor, logp_trainer_T: Tensor) -> Tensor:
    return dv.compare_sampled_token(logp_rollout_T, logp_trainer_T).difference_T


def binary_tv(logp_rollout_T: Tensor, logp_trainer_T: Tensor) -> Tensor:
    return abs(prob_difference(logp_rollout_T, logp_trainer_T))


def binary_kl(logp_rollout_T: Tensor, logp_trainer_T: Tensor) -> Tensor:
    return dv.compare_sampled_token(logp_rollout_T, logp_trainer_T).binary_kl_T


def k3(logp_rollout_T: Tensor, logp_trainer_T: Tensor) -> Tensor:
    return dv.compare_sampled_token(logp_rollout_T, logp_trainer_T).k3_T


# Computed from the formulas: μ, π, r, TV, binary KL
VECTORS = [
    (1e-4, 1e-2, 100, 0.0099, 0.00949),
    (0.99, 0.80, 0.8081, 0.19, 0.18100),
    (0.80, 0.99, 1.2375, 0.19, 0.42867),
    (0.99, 0.40, 0.4040, 0.59, 0.85623),
    (0.10, 0.129, 1.29, 0.029, 0.00401),
    (0.50, 0.34, 0.68, 0.16, 0.05402),
    (0.95, 0.999, 1.0516, 0.049, 0.14782),
    (0.02, 0.20, 10, 0.18, 0.15283),
]


@pytest.mark.parametrize(("mu", "pi", "ratio", "tv", "kl"), VECTORS)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_worked_numbers(
    mu: float, pi: float, ratio: float, tv: float, kl: float, dtype: torch.dtype
) -> None:
    logp_rollout = torch.tensor([mu], dtype=F64).log().to(dtype)
    logp_trainer = torch.tensor([pi], dtype=F64).log().to(dtype)
    assert (logp_trainer - logp_rollout).exp().item() == pytest.approx(ratio, abs=5e-5, rel=1e-4)
    assert prob_difference(logp_rollout, logp_trainer).item() == pytest.approx(pi - mu, rel=2e-6)
    assert binary_tv(logp_rollout, logp_trainer).item() == pytest.approx(tv, rel=2e-6)
    assert binary_kl(logp_rollout, logp_trainer).item() == pytest.approx(kl, abs=6e-6)


def test_the_estimator_of_kl() -> None:
    mu, pi = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    assert k3(mu, pi).tolist() == pytest.approx([0.5 - 1 + math.log(2), 1.5 - 1 - math.log(1.5)])


def _grid(points: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities from −1e-9 to −20 in float32, every pair."""
    logp = -torch.logspace(-9, math.log10(20), points, dtype=F64).float()
    return logp.repeat_interleave(points), logp.repeat(points)


def _published_binary_kl(logp_rollout: torch.Tensor, logp_trainer: torch.Tensor) -> torch.Tensor:
    mu, pi = logp_rollout.exp(), logp_trainer.exp()
    return mu * (logp_rollout - logp_trainer) + (1 - mu) * torch.log(
        (1 - mu + 1e-8) / (1 - pi + 1e-8)
    )


def test_binary_kl_decides_right_where_the_published_form_does_not() -> None:
    mu, pi = _grid(300)
    truth = binary_kl(mu.double(), pi.double())
    published_wrong = ((_published_binary_kl(mu, pi) > 0.05) != (truth > 0.05)).sum().item()
    ours_wrong = ((binary_kl(mu, pi) > 0.05) != (truth > 0.05)).sum().item()
    assert published_wrong > 20  # or the grid misses the corner that this test is about
    assert ours_wrong == 0


def test_binary_kl_where_the_published_form_is_off_by_a_fifth() -> None:
    # style.md §5: 0.0449 published, 0.0536 true
    mu, pi = torch.tensor([-0.0038]), torch.tensor([-1e-9])
    assert _published_binary_kl(mu, pi).item() == pytest.approx(0.0449, abs=2e-3)
    assert binary_kl(mu, pi).item() == pytest.approx(0.0536, abs=1e-4)


def test_binary_kl_reference_is_independent() -> None:
    """The float64 form used as truth above, compared with the textbook form in the middle of the
    simplex.
    """
    mu, pi = torch.rand(2, 1000, dtype=F64) * 0.8 + 0.1
    textbook = mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log()
    torch.testing.assert_close(binary_kl(mu.log(), pi.log()), textbook, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(
    ("function", "budget"),
    [(prob_difference, 4e-7), (binary_tv, 4e-7), (binary_kl, 1e-5), (k3, 2e-6)],
)
def test_relative_error_in_float32(function, budget: float) -> None:
    mu, pi = _grid(300)
    truth = function(mu.double(), pi.double())
    error = (function(mu, pi).double() - truth).abs()
    is_nonzero = truth.abs() > 1e-30  # below, float32 underflows
    assert (error[is_nonzero] / truth.abs()[is_nonzero]).max().item() < budget


def test_phi_does_not_cancel() -> None:
    d = torch.tensor([0.0, 1e-30, -1e-6, 1e-4, -0.1249, 0.1251, 3.0, -40.0, -INF])
    exact = [0.0, 0.0, 5e-13 * (1 - 1e-6 / 3), 5e-9 * (1 + 1e-4 / 3)]
    assert dv.phi(d)[:4].tolist() == pytest.approx(exact, rel=1e-6)
    assert dv.phi(d)[4:8].tolist() == pytest.approx(
        [math.expm1(x) - x for x in d[4:8].tolist()], rel=3e-6
    )
    assert dv.phi(d)[8].item() == INF


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_phi_against_exact_series(dtype: torch.dtype) -> None:
    d = torch.linspace(-1, 1, 4001, dtype=dtype)
    exact = sum(d.double() ** k / float(math.factorial(k)) for k in range(25, 1, -1))
    is_nonzero = d != 0
    relative = ((dv.phi(d).double() - exact) / exact)[is_nonzero].abs().max().item()
    assert relative < 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    mu, pi = torch.tensor([-0.5, -2.0], dtype=dtype), torch.tensor([-0.25, -3.0], dtype=dtype)
    assert binary_kl(mu, pi).dtype == torch.float32
    torch.testing.assert_close(binary_kl(mu, pi), binary_kl(mu.float(), pi.float()))
    torch.testing.assert_close(k3(mu, pi), k3(mu.float(), pi.float()))


def test_log_prob_zero_means_half_a_unit_in_the_last_place() -> None:
    mu, zero = torch.tensor([-0.05]), torch.zeros(1)
    tiny = torch.tensor([-(2.0**-24)])
    assert binary_kl(zero, zero).item() == 0
    assert binary_kl(mu, zero).item() == pytest.approx(binary_kl(mu, tiny).item(), rel=1e-5)
    assert 0.05 < binary_kl(mu, zero).item() < INF
    assert binary_kl(zero, mu).item() == pytest.approx(
        0.05 + 2**-24 * math.log(2**-24 / 0.0488), rel=1e-3
    )


def test_a_token_outside_the_trainers_support() -> None:
    mu, outside = torch.tensor([0.3]).log(), torch.tensor([-INF])
    assert prob_difference(mu, outside).item() == pytest.approx(-0.3)
    assert binary_tv(mu, outside).item() == pytest.approx(0.3)
    assert binary_kl(mu, outside).item() == INF


def test_enormous_gaps_stay_finite() -> None:
    mu, pi = torch.tensor([-101.0, -0.5]), torch.tensor([-1.0, -101.0])
    assert prob_difference(mu, pi).tolist() == pytest.approx([math.exp(-1), -math.exp(-0.5)])
    assert binary_kl(mu, pi).tolist() == pytest.approx(
        binary_kl(mu.double(), pi.double()).tolist(), rel=1e-5
    )


def test_log_odds_recover_a_shift_of_one_logit() -> None:
    logits = torch.randn(2000, 30, generator=torch.Generator().manual_seed(0), dtype=F64) * 3
    shifted = logits.clone()
    shifted[:, 4] += 0.125
    mu, pi = (x.log_softmax(-1)[:, 4] for x in (logits, shifted))
    torch.testing.assert_close(
        dv.compare_sampled_token(mu, pi).log_odds_gap_T,
        torch.full_like(mu, 0.125),
        rtol=0,
        atol=1e-11,
    )
    inner = mu < -0.01
    error = dv.compare_sampled_token(mu.float(), pi.float()).log_odds_gap_T[inner] - 0.125
    assert error.abs().max().item() < 1e-4


log_probs = st.floats(-30, -1e-12)


@given(log_probs, log_probs)
@settings(max_examples=200, deadline=None)
def test_binary_properties(log_mu: float, log_pi: float) -> None:
    for dtype, slack in ((torch.float32, 1e-6), (F64, 1e-12)):
        mu, pi = torch.tensor([log_mu], dtype=dtype), torch.tensor([log_pi], dtype=dtype)
        tv, kl = binary_tv(mu, pi).item(), binary_kl(mu, pi).item()
        assert 0 <= tv <= 1 and kl >= 0
        assert tv**2 <= kl / 2 * (1 + 20 * slack) + slack**2  # Pinsker
        assert binary_tv(pi, mu).item() == pytest.approx(tv, rel=20 * slack, abs=1e-30)


def _distributions(
    seed: int, vocabulary: int, gap: float, rows: int = 16
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator, dtype=F64) * 3
    mu = logits.log_softmax(-1)
    pi = (logits + gap * torch.randn(rows, vocabulary, generator=generator, dtype=F64)).log_softmax(
        -1
    )
    ids = torch.multinomial(mu.exp(), 1, generator=generator).squeeze(1)
    return mu, pi, ids


def _topk(mu, pi, ids, k: int, dtype=F64, **options) -> tuple[torch.Tensor, torch.Tensor]:
    top = mu.topk(k, dim=-1).indices
    rows = torch.arange(len(ids))
    arguments = (mu[rows, ids], pi[rows, ids], mu.gather(1, top), pi.gather(1, top))
    return dv.topk_divergences(
        *(x.to(dtype) for x in arguments), dv.sampled_in_topk(ids, top), **options
    )


@given(
    st.integers(0, 10**6),
    st.integers(2, 40),
    st.integers(1, 40),
    st.sampled_from([1e-6, 1e-2, 0.3, 3.0]),
)
@settings(max_examples=150, deadline=None)
def test_a_finer_partition_never_shrinks_a_divergence(
    seed: int, vocabulary: int, k: int, gap: float
) -> None:
    mu, pi, ids = _distributions(seed, vocabulary, gap)
    k = min(k, vocabulary)
    rows = torch.arange(len(ids))
    binary = binary_tv(mu[rows, ids], pi[rows, ids]), binary_kl(mu[rows, ids], pi[rows, ids])
    published, topk = _topk(mu, pi, ids, k, replace_last=True), _topk(mu, pi, ids, k)
    full = dv.full_tv(mu, pi), dv.full_kl(mu, pi)
    for coarse, fine in ((binary, published), (published, topk), (topk, full)):
        # 1 − Σ is rounded, and the KL has its logarithm
        for one, other in zip(coarse, fine, strict=True):
            assert (one >= 0).all() and (one <= other * (1 + 1e-6) + 1e-12).all()
    tv, kl = topk
    assert (tv**2 <= kl / 2 * (1 + 1e-6) + 1e-12).all()  # Pinsker


def test_top_1_with_replacement_is_binary() -> None:
    mu, pi, ids = _distributions(0, 50, 0.3, rows=500)
    rows = torch.arange(len(ids))
    assert 0 < (mu.argmax(-1) == ids).sum() < 500  # both cases occur
    for dtype, slack in ((F64, 1e-12), (torch.float32, 2e-6)):
        tv, kl = _topk(mu, pi, ids, 1, dtype, replace_last=True)
        binary = mu[rows, ids].to(dtype), pi[rows, ids].to(dtype)
        torch.testing.assert_close(tv, binary_tv(*binary), atol=slack, rtol=0)
        torch.testing.assert_close(kl, binary_kl(*binary), atol=slack, rtol=0)


def test_full_kl_is_the_textbook_sum() -> None:
    mu, pi, _ = _distributions(1, 30, 0.5)
    torch.testing.assert_close(
        dv.full_kl(mu, pi), (mu.exp() * (mu - pi)).sum(-1), rtol=1e-10, atol=1e-14
    )
    mu[:, 0], pi[:, 1] = -INF, pi[:, 1]
    mu = mu.log_softmax(-1)
    inside = mu > -INF
    textbook = torch.where(inside, mu.exp() * (mu - pi), 0).sum(-1)
    torch.testing.assert_close(dv.full_kl(mu, pi), textbook, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_full_kl_where_mu_underflows_is_the_mass_of_pi_there(dtype: torch.dtype) -> None:
    # μ = 1, e^-1000, e^-1000 and π = .5, .5, 0: log 2, without a product 0 · ∞. A μ that is barely
    # above 0 has no product with an infinite φ either.
    pi = torch.tensor([[0.5, 0.5, 0.0]], dtype=dtype).log()
    barely = math.log(torch.finfo(dtype).smallest_normal) - 3
    for logp in (-1000.0, barely):
        mu = torch.tensor([[0.0, logp, -1000.0]], dtype=dtype)
        assert dv.full_kl(mu, pi).item() == pytest.approx(math.log(2), rel=1e-6)


def test_topk_worked_by_hand() -> None:
    # μ = .5 .3 .1 (.1 others), π = .4 .3 .2 (.1 others), K = 2, sampled the third: TV = (.1 + 0 +
    # .1 + 0)/2 = .1
    mu, pi = torch.tensor([[0.5, 0.3, 0.1]]).log(), torch.tensor([[0.4, 0.3, 0.2]]).log()
    arguments = (mu[:, 2], pi[:, 2], mu[:, :2], pi[:, :2], torch.tensor([False]))
    tv, kl = dv.topk_divergences(*arguments)
    assert tv.item() == pytest.approx(0.1, abs=1e-7)
    assert kl.item() == pytest.approx(0.5 * math.log(5 / 4) - 0.1 * math.log(2), abs=1e-6)
    # replaced: {.5, .1, others .4} against {.4, .2, .4}
    tv, kl = dv.topk_divergences(*arguments, replace_last=True)
    assert tv.item() == pytest.approx(0.1, abs=1e-7)
    assert kl.item() == pytest.approx(0.5 * math.log(5 / 4) - 0.1 * math.log(2), abs=1e-6)


def test_others_below_the_resolution_give_no_infinity() -> None:
    """Top-K probabilities that sum to one up to rounding: nothing is left to compare."""
    logits = torch.randn(2000, 20, generator=torch.Generator().manual_seed(3)) * 4
    mu, pi = logits.log_softmax(-1), (logits + 0.01 * torch.randn(2000, 20)).log_softmax(-1)
    for others in (0.0, 1e-7):
        in_topk = torch.ones(2000, dtype=torch.bool)
        tv, kl = dv.topk_divergences(mu[:, 0], pi[:, 0], mu + math.log1p(-others), pi, in_topk)
        assert torch.isfinite(kl).all() and (kl >= 0).all()
        torch.testing.assert_close(
            kl.double(), dv.full_kl(mu.double(), pi.double()), atol=4e-6, rtol=1e-3
        )
        torch.testing.assert_close(
            tv.double(), dv.full_tv(mu.double(), pi.double()), atol=1e-6, rtol=1e-4
        )


def test_equal_policies_have_no_divergence_at_all() -> None:
    mu, _, ids = _distributions(4, 200, 0.0, rows=500)
    tv, kl = _topk(mu.float(), mu.float(), ids, 20, torch.float32)
    assert (tv == 0).all() and (kl == 0).all()


def test_small_differences_survive_in_float32() -> None:
    mu, pi, ids = _distributions(5, 200, 1e-3, rows=300)
    truth_tv, truth_kl = _topk(mu.float(), pi.float(), ids, 20)
    tv, kl = _topk(mu.float(), pi.float(), ids, 20, torch.float32)
    torch.testing.assert_close(tv.double(), truth_tv, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(kl.double(), truth_kl, rtol=2e-2, atol=1e-10)


@pytest.mark.parametrize("change", [1e-4, -1e-4])
@pytest.mark.parametrize("mass", [0.1, 0.5, 0.9])
def test_the_others_share_a_small_change_in_float32(mass: float, change: float) -> None:
    """One rank and all others: the binary divergence, from the same numbers in float64."""
    logq_T, logp_T = torch.tensor([[mass], [mass + change]]).log()
    mu, pi = logq_T.double().exp().item(), logp_T.double().exp().item()
    kl = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    columns = logq_T[:, None], logp_T[:, None]
    _, kl_T = dv.topk_divergences(logq_T, logp_T, *columns, torch.tensor([True]))
    assert kl_T.item() == pytest.approx(kl, rel=2e-5)


def test_ranks_outside_a_truncated_support_belong_to_the_others() -> None:
    mu = torch.tensor([[0.7, 0.3, 0.0]]).log()
    pi = torch.tensor([[0.6, 0.3, 0.05]]).log()  # another 0.05 is outside the top-3
    tv, kl = dv.topk_divergences(mu[:, 0], pi[:, 0], mu, pi, torch.tensor([True]))
    assert tv.item() == pytest.approx(0.1, abs=1e-6)  # (.1 + 0 + .1)/2
    assert kl.item() == pytest.approx(0.7 * math.log(7 / 6), abs=2e-5)
    excluded = torch.tensor([[0.7, float(0), 0.3]]).log()
    tv, kl = dv.topk_divergences(mu[:, 0], excluded[:, 0], mu, excluded, torch.tensor([True]))
    assert tv.item() == pytest.approx(0.3, abs=1e-6) and kl.item() == INF


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("replace_last", [False, True])
def test_block_size_changes_no_bit(dtype, replace_last, monkeypatch) -> None:
    """Also if one side excludes a token."""
    mu, pi, ids = _distributions(3, 40, 0.5, rows=1000)
    top = mu.topk(20, dim=-1).indices
    rows = torch.arange(len(ids))
    columns = [
        x.to(dtype) for x in (mu[rows, ids], pi[rows, ids], mu.gather(1, top), pi.gather(1, top))
    ]
    columns[1][::13] = columns[2][::7, -1] = columns[3][::11, 0] = -INF
    results = []
    for block in (2**30, 600, 1):
        monkeypatch.setattr(dv, "BLOCK", block)
        results.append(
            dv.topk_divergences(*columns, dv.sampled_in_topk(ids, top), replace_last=replace_last)
        )
        assert not any(x.isnan().any() for x in results[-1])
        assert all(torch.equal(x, y) for x, y in zip(results[0], results[-1], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_selection_by_bits_equals_where(dtype) -> None:
    """Also for NaN, and with gradients."""
    x = torch.tensor([1.5, -0.0, INF, math.nan, -2.0, 1e-300], dtype=dtype)
    y = torch.tensor([math.nan, 3.0, -INF, 0.0, INF, -1.0], dtype=dtype)
    flags = torch.tensor([True, True, False, True, False, False])
    for chosen in (flags, ~flags):
        expected = torch.where(chosen, x, y)
        assert select(chosen, x, y).numpy().tobytes() == expected.numpy().tobytes()
    learned = torch.zeros(6, dtype=dtype, requires_grad=True)
    select(flags, learned, y).sum().backward()
    assert learned.grad is not None and learned.grad.tolist() == flags.tolist()
