"""The trainer reads an environment's tokens and never learns from them, in any algorithm or
aggregation.

The reference is a loss by hand in float64, from the logits of the tokens that the model wrote and
of no others.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mismatch_cli.rules.batch import Episode
from mismatch_cli.train.coefficients import LearnedResponse
from mismatch_cli.train.learner import Learner
from mismatch_cli.train.sync import WeightSync, prove_equal
from mismatch_cli.train.train_config import AGGREGATIONS
from tests.train.learners import (
    NEAR,
    STILL,
    assert_same_gradients,
    by_hand,
    gradients,
    make_samples,
    requests_of,
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
OF_TOP_K = ("dppo-topk-tv", "dppo-topk-kl-recompute")


def episodes(learner: Learner, there: float = np.nan, gap: float = 0.4) -> list[LearnedResponse]:
    """With `there` at all tokens of the environment, in every column of a policy."""
    changed = []
    samples = make_samples(learner, gap, tuple(map(sum, TURNS)), ADVANTAGES, group=2)
    for sample, turns in zip(samples, TURNS, strict=True):
        mask_T = np.repeat(np.arange(len(turns)) % 2 == 0, turns)
        said = sample.rollout
        for column in (sample.logp_recomputed_T, said.logp_rollout_T, said.topk_logp_rollout_TK):
            column[~mask_T] = there
        said.rank_rollout_T[~mask_T] = -1
        episode = Episode(**vars(said), loss_mask_T=mask_T, turns=len(turns) // 2 + 1)
        changed.append(replace(sample, rollout=episode))
    return changed


def test_the_gradient_is_that_of_the_models_own_tokens(make_learner):
    cases = [(name, "sequence-sum") for name in KINDS]
    cases += [(name, other) for name in ("reinforce", "gspo") for other in AGGREGATIONS[1:]]
    for name, aggregation in cases:
        learner = make_learner(name, aggregation=aggregation)
        samples = episodes(learner, gap=NEAR.get(name, 0.4))
        update = learner.update(samples)
        expected, _ = by_hand(learner, samples, name, aggregation)
        assert_same_gradients(gradients(learner), expected)
        for sample, logp_T, entropy_T in zip(samples, update.logp, update.entropy, strict=True):
            for column_T in (logp_T, entropy_T):  # measured at the model's tokens only
                np.testing.assert_array_equal(np.isnan(column_T), ~sample.rollout.sampled_T)


def test_nothing_at_a_masked_token_reaches_the_gradient(make_learner):
    """Neither NaN nor numbers, in top-K columns too."""
    for name in ("dppo-binary-tv", "gspo", "m2po", *OF_TOP_K):
        learners = make_learner(name), make_learner(name)
        for learner, there in zip(learners, (np.nan, -3.0), strict=True):
            learner.update(episodes(learner, there))
        one, other = map(gradients, learners)
        assert all(torch.equal(gradient, other[name]) for name, gradient in one.items())
        assert all(torch.isfinite(gradient).all() for gradient in one.values())
        assert any(gradient.abs().max() > 0 for gradient in one.values())


def test_the_mask_makes_the_difference(make_learner):
    """The same tokens without a mask have another gradient: the comparison above could fail."""
    learner = make_learner("reinforce")
    samples = episodes(learner, there=-3.0)
    expected, _ = by_hand(learner, samples, "reinforce", "sequence-sum")
    whole = [replace(s, rollout=replace(s.rollout, loss_mask_T=None)) for s in samples]
    learner.update(whole)
    with pytest.raises(AssertionError):
        assert_same_gradients(gradients(learner), expected)


def sampled_with(samples: list[LearnedResponse], logp: list[np.ndarray]) -> None:
    """Put these log-probs into the engine's column."""
    for sample, logp_T in zip(samples, logp, strict=True):
        mask_T = sample.rollout.sampled_T
        sample.rollout.logp_rollout_T[mask_T] = logp_T[mask_T]


def test_what_rounding_swallows_is_no_failed_sync(make_learner):
    """The engine holds exactly the rounded weights, which a small step leaves as they were."""
    learner = make_learner("reinforce")
    trainer = learner.trainer
    weights = [weight.detach() for weight in trainer.model.parameters()]
    for weight in weights:
        weight.copy_(weight.bfloat16())
    samples = episodes(learner)
    requests = requests_of(samples)
    engine = [score.logp_T for score in trainer.score(requests, token_budget=500)]
    sampled_with(samples, engine)
    as_sent, unrounded = (
        WeightSync(STILL, trainer, exact=False, token_budget=500, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32)
    )
    for sync in (as_sent, unrounded):
        sync.load(1, at_start=True)
        sync.score_before_update(1, samples)
        assert sync.prove(1, samples, engine)["sync"] == "undecidable"
    for weight in weights:
        weight.mul_(1.001)  # at most half of the distance to the next number in bfloat16
    later = [score.logp_T for score in trainer.score(requests, token_budget=500)]
    before = [weight.clone() for weight in weights]
    for sync in (as_sent, unrounded):
        sync.load(2)
        sync.score_before_update(2, samples)
        assert all(torch.equal(*pair) for pair in zip(weights, before, strict=True))
    answer = as_sent.prove(2, samples, later)
    assert answer["sync"] == "undecidable"
    assert answer["rounding"]["weights_changed"] < 0.5 and answer["rounding"]["abs_dp_mean"] > 1e-5
    with pytest.raises(Exception, match="fit the weights of an earlier step better"):
        unrounded.prove(2, samples, later)


def test_the_proof_of_the_sync_leaves_masked_tokens_out(make_learner):
    learner = make_learner("reinforce")
    samples = episodes(learner)
    requests = requests_of(samples)
    scores = learner.trainer.score(requests, token_budget=500)
    sampled_with(samples, [score.logp_T for score in scores])
    logp = learner.update(samples).logp
    sync = WeightSync(STILL, learner.trainer, exact=True, token_budget=500)
    assert sync.prove(1, samples, logp) == {"sync": "proven"}
    lower = WeightSync(
        STILL, learner.trainer, exact=False, token_budget=500, dtype=learner.trainer.dtype
    )
    for step in (1, 2):  # the same weights, scored once more as the older ones
        lower.load(step)
        lower.score_before_update(step, samples)
        logp = [score.logp_T for score in learner.trainer.score(requests, token_budget=500)]
        sampled_with(samples, logp)
        assert lower.prove(step, samples, logp)["sync"] == "undecidable"
        assert lower.facts()["odds_gap"] < 1e-6
    with pytest.raises(Exception, match="weight sync failed"):
        # NaN, if they were not left out
        prove_equal([s.rollout.logp_rollout_T for s in samples], logp)
