"""The tiled head against float64: any tile, any logits, and the rounding grid of bfloat16 to the
bit.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring import head as head_module
from mismatch_cli.models.scoring.head import Head, HeadScores, score_hidden

PLAIN = SamplingSettings()


class Reference(NamedTuple):
    logp_T: torch.Tensor
    entropy_T: torch.Tensor
    rank_T: torch.Tensor
    logp_at_ids_TK: torch.Tensor


def reference(
    logits_TV: torch.Tensor,
    target_T: torch.Tensor,
    query_TK: torch.Tensor,
    temperature: float = 1.0,
) -> Reference:
    """The same from full rows in float64; -inf logits are outside the support."""
    z_TV = logits_TV.double() / temperature
    logp_TV = z_TV.log_softmax(dim=-1)
    target_T1 = target_T[:, None]
    rank_T = (z_TV > z_TV.gather(1, target_T1)).sum(1) + 1
    entropy_T = -(logp_TV.exp() * logp_TV).nan_to_num(0.0).sum(1)
    return Reference(
        logp_TV.gather(1, target_T1)[:, 0], entropy_T, rank_T, logp_TV.gather(1, query_TK)
    )


def head_of(logits_TV: torch.Tensor) -> tuple[torch.Tensor, Head]:
    """Hidden states and a head whose product is these logits to the bit: one-hot rows times the
    transposed logits.
    """
    return torch.eye(len(logits_TV), dtype=logits_TV.dtype), Head(logits_TV.T.contiguous())


def some_ids(
    tokens: int, vocabulary: int, queries: int = 5, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids_TQ = torch.randint(0, vocabulary, (tokens, queries + 1), generator=generator)
    return ids_TQ[:, 0], ids_TQ[:, 1:]


def random_case(
    tokens: int,
    vocabulary: int,
    hidden: int = 48,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_TH = torch.randn(tokens, hidden, generator=generator)
    weight_VH = torch.randn(vocabulary, hidden, generator=generator) * 3 / hidden**0.5
    return hidden_TH.to(dtype), weight_VH.to(dtype)


def assert_matches(got: HeadScores, expected: Reference, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got.logp_T.double(), expected.logp_T, atol=tolerance, rtol=2e-7)
    torch.testing.assert_close(
        got.entropy_T.double(), expected.entropy_T, atol=tolerance, rtol=1e-6
    )
    torch.testing.assert_close(
        got.logp_at_ids_TK.double(), expected.logp_at_ids_TK, atol=tolerance, rtol=2e-7
    )
    assert got.rank_T.tolist() == expected.rank_T.tolist()
    assert [x.dtype for x in got] == [
        torch.float32,
        torch.float32,
        torch.int32,
        *[torch.float32] * 3,
    ]


@pytest.mark.parametrize("tile", [(1024, 2048), (20, 64), (17, 1), (64, 1003), (33, 1002)])
@pytest.mark.parametrize("vocabulary", [512, 1003])
@pytest.mark.parametrize("tokens", [1, 16, 17, 70])
def test_every_tile_gives_the_float64_answer(
    tokens: int, vocabulary: int, tile: tuple[int, int]
) -> None:
    logits_TV = torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(1)) * 4
    hidden_TH, head = head_of(logits_TV)
    target_T, query_TK = some_ids(tokens, vocabulary)
    assert_matches(
        score_hidden(hidden_TH, head, target_T, query_TK, PLAIN, tile),
        reference(logits_TV, target_T, query_TK),
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_logits_up_to_eighty_in_any_tile(data: st.DataObject) -> None:
    tokens, vocabulary = data.draw(st.integers(17, 40)), data.draw(st.integers(1, 90))
    seed, scale = (
        data.draw(st.integers(0, 2**16)),
        data.draw(st.sampled_from([0.0, 1e-3, 1.0, 20.0, 80.0])),
    )
    logits_TV = (
        torch.rand(tokens, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    ) * scale
    hidden_TH, head = head_of(logits_TV)
    target_T, query_TK = some_ids(tokens, vocabulary, seed=seed)
    got = score_hidden(
        hidden_TH, head, target_T, query_TK, PLAIN, (tokens, data.draw(st.integers(1, vocabulary)))
    )
    assert_matches(got, reference(logits_TV, target_T, query_TK))
    assert (got.logp_T <= 0).all()
    assert (got.entropy_T >= 0).all()


@pytest.mark.parametrize("gap", [5.0, 12.0, 20.0, 30.0, 45.0])
@pytest.mark.parametrize("winner", [0, 63, 64, 999])
def test_log_prob_of_a_dominating_token_keeps_its_relative_precision(
    gap: float, winner: int
) -> None:
    logits_TV = torch.randn(20, 1000, generator=torch.Generator().manual_seed(2))
    logits_TV[:, winner] = gap + 40
    hidden_TH, head = head_of(logits_TV - 40)
    target_T, query_TK = torch.full((20,), winner), torch.tensor([[winner, 5, 700]]).expand(20, -1)
    got = score_hidden(hidden_TH, head, target_T, query_TK, PLAIN, (32, 64))
    others_T = (logits_TV - 40).double()[:, torch.arange(1000) != winner].logsumexp(1)
    exact_T = -torch.log1p((others_T - (logits_TV - 40)[:, winner].double()).exp())
    torch.testing.assert_close(got.logp_T.double(), exact_T, rtol=2e-6, atol=0)
    assert got.logp_at_ids_TK[:, 0].tolist() == got.logp_T.tolist()
    assert_matches(got, reference(logits_TV - 40, target_T, query_TK), tolerance=1e-5)


def test_log_prob_of_a_dominating_other_token_is_absolutely_precise() -> None:
    logits_TV = torch.randn(20, 1000, generator=torch.Generator().manual_seed(3))
    logits_TV[:, 500] = 25.0
    hidden_TH, head = head_of(logits_TV)
    target_T, query_TK = torch.full((20,), 3), torch.full((20, 1), 500)
    got = score_hidden(hidden_TH, head, target_T, query_TK, PLAIN, (32, 64))
    expected = reference(logits_TV, target_T, query_TK)
    torch.testing.assert_close(
        got.logp_at_ids_TK.double(), expected.logp_at_ids_TK, atol=1e-7, rtol=0
    )


def test_probabilities_at_all_ids_sum_to_one_and_give_the_entropy() -> None:
    hidden_TH, weight_VH = random_case(40, 300)
    everything_TK = torch.arange(300).expand(40, -1)
    got = score_hidden(hidden_TH, Head(weight_VH), torch.arange(40), everything_TK, PLAIN, (32, 64))
    logp_TV = got.logp_at_ids_TK.double()
    torch.testing.assert_close(
        logp_TV.exp().sum(1), torch.ones(40, dtype=torch.float64), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(
        -(logp_TV.exp() * logp_TV).sum(1), got.entropy_T.double(), atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [5, 50])
def test_a_half_precision_head_shows_its_rounded_logits(dtype: torch.dtype, tokens: int) -> None:
    hidden_TH, weight_VH = random_case(tokens, 1003, dtype=dtype)
    head = Head(weight_VH)
    target_T, query_TK = some_ids(tokens, 1003)
    got = score_hidden(hidden_TH, head, target_T, query_TK, PLAIN, (64, 128))
    logits_TV = torch.nn.functional.linear(hidden_TH, weight_VH)
    assert logits_TV.unique().numel() < 0.8 * logits_TV.numel()  # ties: the rounding grid shows
    assert_matches(got, reference(logits_TV, target_T, query_TK))


def test_tied_tokens_share_the_better_rank() -> None:
    logits_TV = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 0.0]], dtype=torch.bfloat16).repeat(20, 1)
    hidden_TH, head = head_of(logits_TV)
    ranks = [
        score_hidden(hidden_TH, head, torch.full((20,), i), torch.zeros(20, 0), PLAIN, (32, 2))
        .rank_T[0]
        .item()
        for i in range(6)
    ]
    assert ranks == [5, 1, 3, 1, 3, 6]


class _Nudged(Head):
    """Mocks a BLAS whose small product rounds the target's logit to its neighbour, as tiny or
    skinny kernels do.
    """

    def logits(self, hidden_TH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits_TV = super().logits(hidden_TH, out)
        return (
            logits_TV.nextafter(torch.tensor(9e9))
            if self.vocabulary == len(hidden_TH)
            else logits_TV
        )


def test_ranks_survive_a_small_product_that_rounds_differently() -> None:
    lattice_TV = torch.randn(30, 400, generator=torch.Generator().manual_seed(4)).bfloat16().float()
    lattice_TV[:, 200:] = lattice_TV[:, :200].nextafter(torch.tensor(9e9))  # one float32 step above
    hidden_TH, head = head_of(lattice_TV)
    target_T, query_TK = torch.arange(30), some_ids(30, 400)[1]
    got = score_hidden(hidden_TH, _Nudged(head.weight_VH), target_T, query_TK, PLAIN, (30, 64))
    assert_matches(got, reference(lattice_TV, target_T, query_TK))


@pytest.mark.parametrize("temperature", [0.6, 1.7])
@pytest.mark.parametrize("tokens", [4, 40])
def test_temperature(temperature: float, tokens: int) -> None:
    logits_TV = torch.randn(tokens, 300, generator=torch.Generator().manual_seed(5)) * 3
    hidden_TH, head = head_of(logits_TV)
    target_T, query_TK = some_ids(tokens, 300)
    got = score_hidden(
        hidden_TH, head, target_T, query_TK, SamplingSettings(temperature=temperature), (64, 70)
    )
    assert_matches(got, reference(logits_TV, target_T, query_TK, temperature))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSettings(top_k=7),
        SamplingSettings(top_p=0.8),
        SamplingSettings(min_p=0.05),
        SamplingSettings(temperature=0.7, top_k=50, top_p=0.95, min_p=0.01),
        SamplingSettings(top_k=1),
    ],
)
def test_truncated_support(sampling: SamplingSettings) -> None:
    logits_TV = torch.randn(90, 300, generator=torch.Generator().manual_seed(6)) * 3
    hidden_TH, head = head_of(logits_TV)
    # Inside and outside
    target_T = logits_TV.topk(12).indices[torch.arange(90), torch.arange(90) % 12]
    query_TK = some_ids(90, 300)[1]
    got = score_hidden(hidden_TH, head, target_T, query_TK, sampling)
    processed_TV = sampling.process(logits_TV)
    assert_matches(got, reference(processed_TV, target_T, query_TK))
    outside_T = processed_TV.gather(1, target_T[:, None])[:, 0].isinf()
    assert outside_T.any()
    assert torch.equal(got.logp_T == -torch.inf, outside_T)
    support_T = processed_TV.isfinite().sum(1)
    assert torch.equal(got.rank_T[outside_T].long(), support_T[outside_T] + 1)


def test_bias_scale_and_cap_are_rounded_step_by_step_as_the_models_do() -> None:
    hidden_TH, weight_VH = random_case(40, 500, dtype=torch.bfloat16)
    bias_V = torch.randn(500, generator=torch.Generator().manual_seed(7)).bfloat16()
    logits_TV = torch.nn.functional.linear(hidden_TH, weight_VH, bias_V) / 1.7
    logits_TV = logits_TV * 3.1
    logits_TV = torch.tanh(logits_TV / 5.0) * 5.0
    head = Head(weight_VH, bias_V, divisor=1.7, multiplier=3.1, softcap=5.0)
    target_T, query_TK = some_ids(40, 500)
    got = score_hidden(hidden_TH, head, target_T, query_TK, PLAIN, (64, 128))
    assert_matches(got, reference(logits_TV, target_T, query_TK))


@pytest.mark.parametrize("transform", [{"divisor": 2.0}, {"multiplier": 2.0}, {"softcap": 2.0}])
def test_each_transform_of_the_logits_is_applied_alone(transform) -> None:
    hidden_TH, weight_VH = random_case(40, 500)
    logits_TV = hidden_TH @ weight_VH.T
    expected = {
        "divisor": logits_TV / 2,
        "multiplier": logits_TV * 2,
        "softcap": torch.tanh(logits_TV / 2) * 2,
    }
    (name,) = transform
    logits_TV = Head(weight_VH, **transform).logits(hidden_TH)
    torch.testing.assert_close(logits_TV, expected[name])


def test_float32_head_of_a_bfloat16_model() -> None:
    hidden_TH, weight_VH = random_case(40, 500, dtype=torch.bfloat16)
    head = Head(weight_VH, torch.ones(500, dtype=torch.bfloat16)).float32()
    target_T, query_TK = some_ids(40, 500)
    got = score_hidden(hidden_TH, head, target_T, query_TK, PLAIN)
    exact_TV = hidden_TH.double() @ weight_VH.double().T + 1
    torch.testing.assert_close(
        got.logp_T.double(), reference(exact_TV, target_T, query_TK).logp_T, atol=5e-6, rtol=0
    )


def test_no_tokens_and_no_queries() -> None:
    _, weight_VH = random_case(1, 50)
    got = score_hidden(
        torch.zeros(0, 48), Head(weight_VH), torch.zeros(0), torch.zeros(0, 3), PLAIN
    )
    assert [tuple(x.shape) for x in got] == [(0,), (0,), (0,), (0, 3), (0,), (0,)]
    hidden_TH, _ = random_case(20, 50)
    got = score_hidden(hidden_TH, Head(weight_VH), torch.zeros(20), torch.zeros(20, 0), PLAIN)
    assert got.logp_at_ids_TK.shape == (20, 0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_overflow_comes_out_as_nan(bad: float) -> None:
    head = Head(torch.ones(100, 1), bias_V=torch.zeros(100))
    assert head.bias_V is not None
    head.bias_V[70] = bad
    for tokens in (3, 20):
        got = score_hidden(
            torch.ones(tokens, 1), head, torch.ones(tokens), torch.zeros(tokens, 1), PLAIN, (32, 30)
        )
        assert got.logp_T.isnan().all()
        assert got.entropy_T.isnan().all()


def test_a_vocabulary_that_the_model_masks_has_probability_zero() -> None:
    logits_TV = torch.randn(20, 100, generator=torch.Generator().manual_seed(8))
    bias_V = torch.zeros(100)
    bias_V[60:] = -torch.inf
    hidden_TH, plain = head_of(logits_TV)
    target_T, query_TK = some_ids(20, 60)
    got = score_hidden(
        hidden_TH, Head(plain.weight_VH, bias_V), target_T, query_TK, PLAIN, (32, 30)
    )
    assert_matches(got, reference(logits_TV[:, :60], target_T, query_TK))


def test_targets_whose_logits_the_small_product_rounds_differently_are_ranked_by_their_tile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a GPU does for all tokens at once."""
    hidden_TH, weight_VH = random_case(150, 500)
    expected = score_hidden(hidden_TH, Head(weight_VH), *some_ids(150, 500), PLAIN, (150, 77))
    rows = Head.rows

    def other_rounding(head: Head, ids: torch.Tensor | slice) -> Head:
        part = rows(head, ids)
        return part if isinstance(ids, slice) else Head(part.weight_VH * 1.0001)

    monkeypatch.setattr(Head, "rows", other_rounding)
    monkeypatch.setattr(head_module, "score_full_rows", None)  # not needed
    scores = score_hidden(hidden_TH, Head(weight_VH), *some_ids(150, 500), PLAIN, (150, 77))
    for column, exact in zip(scores[:4], expected[:4], strict=True):
        assert torch.equal(column, exact)


def test_a_row_that_is_computed_again_replaces_itself(monkeypatch):
    """A GPU's small product rounds differently: here one row in the middle is made to differ."""
    hidden_TH, weight_VH = random_case(64, 500)
    ids_T, query_TK = some_ids(64, 500)
    expected = score_hidden(hidden_TH, Head(weight_VH), ids_T, query_TK, PLAIN, (64, 100))
    real = head_module.sampler_logits

    def differing(logits: torch.Tensor, *more: object, **named: object) -> torch.Tensor:
        """The logits of the targets alone are one row; one of them is made to differ."""
        z = real(logits, *more, **named)
        return z + 10.0 * (torch.arange(len(z)) == 7) if z.dim() == 1 else z

    monkeypatch.setattr(head_module, "sampler_logits", differing)
    scores = score_hidden(hidden_TH, Head(weight_VH), ids_T, query_TK, PLAIN, (64, 100))
    for name in ("logp_T", "entropy_T", "rank_T", "logp_at_ids_TK"):
        torch.testing.assert_close(getattr(scores, name), getattr(expected, name))


@pytest.mark.parametrize(("width", "columns"), [(32, 32), (500, 400)])
def test_a_tile_takes_the_memory_of_its_width_and_not_of_the_vocabulary(
    width: int, columns: int
) -> None:
    hidden_TH, weight_VH = random_case(20, 400)
    for _, z_TN, scratch_TN in head_module.tiles_of(hidden_TH, Head(weight_VH), PLAIN, width):
        assert z_TN.untyped_storage().nbytes() == 20 * columns * 4
        assert scratch_TN.untyped_storage().nbytes() == 20 * columns * 4
