"""The trainer reads an environment's tokens and never learns from them, in any algorithm or
aggregation.

The reference is a loss by hand in float64, from the logits of the tokens that the model wrote and
of no others.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mismatch_cli.base.hashing import hash_keys, mix
from mismatch_cli.base.options import build, replaced
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.rules.algorithms.parse import find
from mismatch_cli.rules.batch import Episode
from mismatch_cli.train.judged import Sample
from mismatch_cli.train.learner import Learner, Update
from mismatch_cli.train.sync import WeightSync, prove_equal
from mismatch_cli.train.train_config import AGGREGATIONS, TrainConfig
from tests.rules.algorithms import published
from tests.rules.algorithms.published_owners import OF_TABLE
from tests.tiny_models import saved_model

PLAIN = SamplingSettings()
CONFIG = build(
    TrainConfig,
    {"learning_rate": 1e-30, "max_tokens": 40, "max_grad_norm": 1e9, "token_budget": 70},
)
# Alternating turns of model and environment, one list per response; the last is a single turn.
TURNS, ADVANTAGES = ((5, 9, 7), (3, 12, 2, 1, 6), (11,), (4, 3, 8)), (1.0, -0.5, -1.5, 0.7)
# One of each kind: tokens, caps, whole responses (product, mean, prefix), neighbours, draws,
# groups, batches, terms.
KINDS = ("reinforce", "dppo-binary-tv", "grpo-clip-higher", "pg-tis", "gspo", "ppo-mis",
         "ppo-mis-geometric", "minpro",
         "nfpo", "gmpo", "vespo", "cppo", "trm-avg", "gbpo", "m2po", "clip-cov", "kl-cov",
         "top-entropy", "dro",
         "kimi-k1.5")  # fmt: skip
# Farther apart they block all responses
_NEAR = dict.fromkeys(("ppo-mis-geometric", "trm-avg"), 1e-3)
TOP_K = ("dppo-topk-tv", "dppo-topk-kl-recompute")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return saved_model(
        tmp_path_factory.mktemp("masked"), "Qwen3", vocab_size=211, tie_word_embeddings=True
    )


def made(folder: str, algorithm: str, **changes: Any) -> Learner:
    return Learner(
        Trainer.load(folder, sampling=PLAIN), find(algorithm), PLAIN, replaced(CONFIG, **changes)
    )


def mask_of(turns: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([np.full(n, place % 2 == 0) for place, n in enumerate(turns)])


def episodes(learner: Learner, there: float = np.nan, gap: float = 0.4) -> list[Sample]:
    """With `there` at all tokens of the environment, in every column of a policy."""
    rng = np.random.default_rng(0)
    samples = []
    for i, (turns, advantage) in enumerate(zip(TURNS, ADVANTAGES, strict=True)):
        mask_T = mask_of(turns)
        request = ScoreRequest(
            [5, 7 + i],
            rng.integers(0, 211, len(mask_T)).tolist(),
            rng.integers(0, 211, (len(mask_T), 20)),
        )
        (score,) = learner.trainer.score([request], token_budget=500)
        noise = [gap * rng.normal(size=len(mask_T)) for _ in range(2)]
        recomputed_T = np.minimum(score.logp_T + noise[0], -1e-3).astype(np.float32)
        rollout_T = np.minimum(recomputed_T + noise[1] / 2, -1e-3).astype(np.float32)
        assert score.logp_at_topk_TK is not None
        topk_TK = score.logp_at_topk_TK + np.float32(0.1)
        for column in (recomputed_T, rollout_T, topk_TK):
            column[~mask_T] = there
        rank_T, ids_TK = np.where(mask_T, 1, -1).astype(np.int32), request.topk_ids_TK
        rollout = Episode(
            [5, 7 + i],
            request.response_ids,
            rollout_T,
            rank_T,
            ids_TK,
            topk_TK,
            "stop",
            loss_mask_T=mask_T,
            turns=len(turns) // 2 + 1,
        )
        samples.append(
            Sample(rollout, advantage, recomputed_T, topk_TK, row_key=(1, 0, 0, i // 2, i % 2))
        )
    return samples


def learnt(learner: Learner, samples: list[Sample]) -> tuple[Update, dict[str, Tensor]]:
    update = learner.update(samples)
    return update, {
        name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None
    }


def by_hand(
    learner: Learner, samples: list[Sample], name: str, aggregation: str
) -> dict[str, Tensor]:
    """The published objective over only the model's tokens, in float64."""
    model, rows, entropies, luck = deepcopy(learner.model).double(), [], [], []
    model.zero_grad(set_to_none=True)
    for sample in samples:
        said, mask_T = sample.rollout, torch.from_numpy(sample.rollout.sampled_T)
        logits_TV = model(input_ids=torch.tensor([said.prompt_ids + said.response_ids])).logits[
            0, 1:-1
        ]
        logp_NV = logits_TV.log_softmax(-1)[mask_T]
        rows.append(logp_NV.gather(1, torch.tensor(said.response_ids)[mask_T][:, None])[:, 0])
        entropies.append(-(logp_NV.detach().exp() * logp_NV.detach()).sum(-1))
        place_N = np.flatnonzero(said.sampled_T).astype(np.uint64)
        luck.append(mix(hash_keys(*(np.array([key]) for key in sample.row_key)) + place_N))
    known = [s.rollout.of_sampled(x) for s in samples for x in [s.logp_recomputed_T]]
    sampled = [s.rollout.of_sampled(s.rollout.logp_rollout_T) for s in samples]
    lengths = [len(part) for part in sampled]
    flat = [torch.from_numpy(np.concatenate(parts)).double() for parts in (known, sampled)]
    advantage_N = torch.tensor(np.repeat(ADVANTAGES, lengths))
    luck_N = torch.from_numpy((np.concatenate(luck) >> np.uint64(11)) * 2.0**-53)
    nothing = torch.zeros(len(luck_N), 0)
    context = (
        (nothing, nothing, nothing),
        torch.cat(entropies),
        [s.row_key[3] for s in samples],
        luck_N,
    )
    terms_N = OF_TABLE[name](
        published.Sample(torch.cat(rows), *flat, advantage_N, lengths, *context)
    )
    (-published.aggregated(terms_N, lengths, aggregation, CONFIG.sampler.max_tokens)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    largest = max(float(g.abs().max()) for g in expected.values())
    assert largest > 0, "nothing is learnt: nothing is compared"
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name].double(), gradient, atol=1e-5 * largest, rtol=1e-4)


def test_the_gradient_is_that_of_the_models_own_tokens(folder):
    cases = [(name, "sequence-sum") for name in KINDS]
    cases += [(name, other) for name in ("reinforce", "gspo") for other in AGGREGATIONS[1:]]
    for name, aggregation in cases:
        learner = made(folder, name, aggregation=aggregation)
        samples = episodes(learner, gap=_NEAR.get(name, 0.4))
        update, found = learnt(learner, samples)
        assert_close(found, by_hand(learner, samples, name, aggregation))
        for sample, logp_T, entropy_T in zip(samples, update.logp, update.entropy, strict=True):
            for column_T in (logp_T, entropy_T):  # measured at the model's tokens only
                np.testing.assert_array_equal(np.isnan(column_T), ~sample.rollout.sampled_T)


def test_nothing_at_a_masked_token_reaches_the_gradient(folder):
    """Neither NaN nor numbers, in top-K columns too."""
    for name in ("dppo-binary-tv", "gspo", "m2po", *TOP_K):
        one, other = (
            learnt(made(folder, name), episodes(made(folder, name), there=x))[1]
            for x in (np.nan, -3.0)
        )
        assert all(torch.equal(gradient, other[name]) for name, gradient in one.items())
        assert all(torch.isfinite(gradient).all() for gradient in one.values())
        assert any(gradient.abs().max() > 0 for gradient in one.values())


def test_the_mask_makes_the_difference(folder):
    """The same tokens without a mask have another gradient: the comparison above could fail."""
    learner = made(folder, "reinforce")
    samples = episodes(learner, there=-3.0)
    expected = by_hand(learner, samples, "reinforce", "sequence-sum")
    whole = [replace(s, rollout=replace(s.rollout, loss_mask_T=None)) for s in samples]
    with pytest.raises(AssertionError):
        assert_close(learnt(learner, whole)[1], expected)


class StillEngine:
    """It takes weights and keeps none: the samples are given."""

    def load_weights(self, model: object) -> None:
        pass


def test_what_rounding_swallows_is_no_failed_sync(folder):
    """The engine holds exactly the rounded weights, which a small step leaves as they were."""
    learner = made(folder, "reinforce")
    trainer = learner.trainer
    weights = [weight.detach() for weight in trainer.model.parameters()]
    for weight in weights:
        weight.copy_(weight.bfloat16())
    samples = episodes(learner)
    requests = [ScoreRequest(s.rollout.prompt_ids, s.rollout.response_ids) for s in samples]
    engine = [score.logp_T for score in trainer.score(requests, token_budget=500)]
    for sample, logp_T in zip(samples, engine, strict=True):
        sample.rollout.logp_rollout_T[sample.rollout.sampled_T] = logp_T[sample.rollout.sampled_T]
    as_sent, unrounded = (
        WeightSync(StillEngine(), trainer, exact=False, token_budget=500, dtype=dtype)  # type: ignore[arg-type]
        for dtype in (torch.bfloat16, torch.float32)
    )
    for sync in (as_sent, unrounded):
        sync.load(1, at_start=True)
        sync.look_back(1, samples)
        assert sync.prove(1, samples, engine)["sync"] == "undecidable"
    for weight in weights:
        weight.mul_(1.001)  # at most half of the distance to the next number in bfloat16
    later = [score.logp_T for score in trainer.score(requests, token_budget=500)]
    kept = [weight.clone() for weight in weights]
    for sync in (as_sent, unrounded):
        sync.load(2)
        sync.look_back(2, samples)
        assert all(torch.equal(*pair) for pair in zip(weights, kept, strict=True))
    answer = as_sent.prove(2, samples, later)
    assert answer["sync"] == "undecidable"
    assert answer["rounding"]["weights_changed"] < 0.5 and answer["rounding"]["abs_dp_mean"] > 1e-5
    with pytest.raises(Exception, match="fit the weights of an earlier step better"):
        unrounded.prove(2, samples, later)


def test_the_proof_of_the_sync_leaves_masked_tokens_out(folder):
    learner = made(folder, "reinforce")
    samples = episodes(learner)
    requests = [ScoreRequest(s.rollout.prompt_ids, s.rollout.response_ids) for s in samples]
    scores = learner.trainer.score(requests, token_budget=500)
    for sample, score in zip(samples, scores, strict=True):
        sample.rollout.logp_rollout_T[sample.rollout.sampled_T] = score.logp_T[
            sample.rollout.sampled_T
        ]
    logp = learner.update(samples).logp
    sync = WeightSync(StillEngine(), learner.trainer, exact=True, token_budget=500)  # type: ignore[arg-type]
    assert sync.prove(1, samples, logp) == {"sync": "proven"}
    lower = WeightSync(  # type: ignore[arg-type]
        StillEngine(), learner.trainer, exact=False, token_budget=500, dtype=learner.trainer.dtype
    )
    for step in (1, 2):  # the same weights, scored once more as the older ones
        lower.load(step)
        lower.look_back(step, samples)
        logp = [score.logp_T for score in learner.trainer.score(requests, token_budget=500)]
        for sample, logp_T in zip(samples, logp, strict=True):
            sample.rollout.logp_rollout_T[sample.rollout.sampled_T] = logp_T[
                sample.rollout.sampled_T
            ]
        assert lower.prove(step, samples, logp)["sync"] == "undecidable" and lower._gap < 1e-6
    with pytest.raises(Exception, match="weight sync failed"):
        # NaN, if they were not left out
        prove_equal([s.rollout.logp_rollout_T for s in samples], logp)
