"""Full TV and KL from the tiles of the head: against float64 over full rows, without effect on
anything else.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.head import Head, RolloutRows, score_hidden
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from tests.models.scoring.test_head import PLAIN, random_case, some_ids

TRUNCATED = SamplingSettings(temperature=0.7, top_p=0.9, top_k=40)
T, V = 150, 500


def reference(mu_TV: torch.Tensor, logp_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """½ Σ |π − μ| and Σ μ log(μ/π) as written, in float64, where both sum to one."""
    mu_TV, logp_TV = mu_TV.double().log_softmax(1), logp_TV.double().log_softmax(1)
    terms_TV = torch.where(mu_TV == -torch.inf, 0, mu_TV.exp() * (mu_TV - logp_TV))
    return (mu_TV.exp() - logp_TV.exp()).abs().sum(1) / 2, terms_TV.sum(1)


@pytest.mark.parametrize("tile", [(1024, 2048), (64, 77), (8, 64)])
@pytest.mark.parametrize("sampling", [PLAIN, SamplingSettings(temperature=0.7), TRUNCATED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tile_gives_the_float64_divergence(tile, sampling, dtype):
    hidden_TH, weight_VH = random_case(T, V, dtype=dtype)
    noise_TV = 0.1 * torch.randn(T, V, generator=torch.Generator().manual_seed(5))
    head, (target_T, query_TK) = Head(weight_VH), some_ids(T, V)
    mu_TV = (sampling.process(head.logits(hidden_TH)) + noise_TV).log_softmax(1)
    some = [*range(3, 60), *range(100, 148)]  # of two responses, over tile borders
    rollout = RolloutRows({token: mu_TV[token].numpy() for token in some})
    got = score_hidden(hidden_TH, head, target_T, query_TK, sampling, tile, rollout)
    logp_TV = sampling.process(head.logits(hidden_TH)).double().log_softmax(1)
    tv_T, kl_T = reference(mu_TV, logp_TV)
    # A tile may round a half-precision logit to its neighbour; in float32 processors add in another
    # order, which moves a logit of 10 by 1e-6.
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 1e-3}
    )
    torch.testing.assert_close(got.tv_full_T[some].double(), tv_T[some], **tolerance)
    torch.testing.assert_close(got.kl_full_T[some].double(), kl_T[some], **tolerance)
    others = sorted(set(range(T)) - set(some))
    assert got.tv_full_T[others].isnan().all() and got.kl_full_T[others].isnan().all()
    plain = score_hidden(hidden_TH, head, target_T, query_TK, sampling, tile)
    for with_it, without in zip(got[:4], plain[:4], strict=True):
        assert torch.equal(with_it, without)


def test_equal_distributions_have_no_divergence_and_a_narrower_engine_has_minus_infinity_beyond():
    hidden_TH, weight_VH = random_case(40, V)
    target_T, query_TK = some_ids(40, 400)
    mu_TV = Head(weight_VH[:400]).logits(hidden_TH).log_softmax(1)
    for head in (Head(weight_VH[:400]), Head(weight_VH)):
        rows = RolloutRows(dict(enumerate(mu_TV.numpy())))
        got = score_hidden(hidden_TH, head, target_T, query_TK, PLAIN, (64, 96), rows)
        outside_T = head.logits(hidden_TH).double().softmax(1)[:, 400:].sum(1)
        torch.testing.assert_close(got.tv_full_T.double(), outside_T, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            got.kl_full_T.double(), -torch.log1p(-outside_T), rtol=1e-5, atol=1e-6
        )


def test_what_the_trainer_excludes_has_an_infinite_kl():
    hidden_TH, weight_VH = random_case(40, V)
    mu_TV = Head(weight_VH).logits(hidden_TH).log_softmax(1)
    rows = RolloutRows(dict(enumerate(mu_TV.numpy())))
    got = score_hidden(
        hidden_TH, Head(weight_VH), *some_ids(40, V), SamplingSettings(top_k=5), None, rows
    )
    assert (got.kl_full_T == torch.inf).all()
    fifth_T1 = mu_TV.topk(5).values[:, -1:]
    torch.testing.assert_close(
        got.tv_full_T, (mu_TV.exp() * (mu_TV < fifth_T1)).sum(1), rtol=1e-5, atol=1e-6
    )


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer.load(str(bundled("model")), sampling=PLAIN, dtype="float32")


def test_each_response_gets_its_own_divergence_and_no_other_number_changes(trainer, rng):
    """In one micro-batch: divergences only for the responses that ask for them, and all else
    equal to the bit.
    """
    lengths = (7, 30, 19, 25)
    plain = [
        ScoreRequest([1, 2, 3 + i], rng.integers(5, 900, n).tolist()) for i, n in enumerate(lengths)
    ]
    mu = {i: rng.normal(size=(lengths[i], 2048)).astype(np.float32) for i in (1, 3)}
    mu = {i: torch.from_numpy(rows).log_softmax(1).numpy() for i, rows in mu.items()}
    with_full = [dataclasses.replace(r, logp_rollout_TV=mu.get(i)) for i, r in enumerate(plain)]
    after, before = (trainer.score(requests, token_budget=256) for requests in (with_full, plain))
    for i, (scores, other) in enumerate(zip(after, before, strict=True)):
        assert np.array_equal(scores.logp_T, other.logp_T) and np.array_equal(
            scores.entropy_T, other.entropy_T
        )
        assert other.tv_full_T is None
        if i not in mu:
            assert scores.tv_full_T is None and scores.kl_full_T is None
            continue
        ids = torch.tensor(
            [plain[i].prompt_ids + plain[i].response_ids], device=trainer.model.device
        )
        with torch.inference_mode():
            logp_TV = trainer.model(ids).logits[0, 2:-1].cpu().double().log_softmax(1)
        tv_T, kl_T = reference(torch.from_numpy(mu[i]), logp_TV)
        np.testing.assert_allclose(scores.tv_full_T, tv_T, rtol=1e-4)
        np.testing.assert_allclose(scores.kl_full_T, kl_T, rtol=1e-4)
    assert all(
        scores.tv_full_T is None for scores in trainer.score_again(with_full, token_budget=256)
    )


def test_an_engine_with_more_tokens_is_refused(trainer):
    wider = ScoreRequest([1], [2], logp_rollout_TV=np.full((1, 2049), -7.6, np.float32))
    with pytest.raises(MismatchError, match="2049 tokens, but the trainer has only 2048"):
        trainer.score([wider], token_budget=64)
