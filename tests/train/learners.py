"""A learner on a small model, samples near its own policy, and their published gradient by hand."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mismatch_cli.base.hashing import hash_keys, mix
from mismatch_cli.base.options import build, replace_settings
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.batch import Rollout
from mismatch_cli.train.coefficients import LearnedResponse
from mismatch_cli.train.learner import Learner
from mismatch_cli.train.train_config import TrainConfig
from tests.rules.algorithms import published
from tests.rules.algorithms.published_owners import OF_TABLE

PLAIN = SamplingSettings()
CONFIG = build(
    TrainConfig,
    {"learning_rate": 1e-30, "max_tokens": 40, "max_grad_norm": 1e9, "token_budget": 70},
)
VOCABULARY, TOP_K = 211, 20
# An engine that takes weights and keeps none, where samples are given
STILL: Any = SimpleNamespace(load_weights=lambda _: None)
# Policies that are farther apart than this have all their responses blocked
NEAR = dict.fromkeys(
    ("gspo", "gspo-rollout", "ppo-mis-geometric", "trm-avg", "trm-max"), 1e-3
)  # nats
LENGTHS, ADVANTAGES = (21, 9, 30, 14, 1), (1.0, -0.5, -1.5, 0.7, 0.0)


def learner_on(
    folder: str, algorithm: str = "dppo-binary-tv", dtype: str = "float32", **changes: Any
) -> Learner:
    trainer = Trainer.load(folder, sampling=PLAIN, dtype=dtype)
    return Learner(trainer, parse_algorithm(algorithm), PLAIN, replace_settings(CONFIG, **changes))


def requests_of(samples: list[LearnedResponse]) -> list[ScoreRequest]:
    return [ScoreRequest.of(sample.rollout) for sample in samples]


def rollout_of(
    ids: list[int], logp_T: np.ndarray | None = None, finish_reason: str = "stop"
) -> Rollout:
    """A response of these tokens, all of them rank 1."""
    logp_T = np.zeros(len(ids), dtype=np.float32) if logp_T is None else logp_T
    return Rollout([0], ids, logp_T, np.ones(len(ids), np.int32), None, None, finish_reason)


def make_samples(
    learner: Learner,
    gap: float = 0.4,
    lengths: tuple[int, ...] = LENGTHS,
    advantages: tuple[float, ...] = ADVANTAGES,
    group: int = 3,
) -> list[LearnedResponse]:
    """Responses of random tokens, `group` of each prompt, with log-probs near the trainer's
    own.
    """
    rng = np.random.default_rng(0)
    requests = []
    for i, length in enumerate(lengths):
        ids = rng.integers(0, VOCABULARY, length).tolist()
        topk_ids = rng.integers(0, VOCABULARY, (length, TOP_K)).astype(np.int32)
        requests.append(ScoreRequest([5, 7 + i], ids, topk_ids))
    samples = []
    for i, score in enumerate(learner.trainer.score(requests, token_budget=500)):
        noise_2T = gap * rng.normal(size=(2, lengths[i]))
        recomputed_T = np.minimum(score.logp_T + noise_2T[0], -1e-3).astype(np.float32)
        rollout_T = np.minimum(recomputed_T + noise_2T[1] / 2, -1e-3).astype(np.float32)
        rank_T, topk_TK = np.ones(lengths[i], np.int32), score.logp_at_topk_TK + np.float32(0.1)
        request = requests[i]
        tokens = (request.prompt_ids, request.response_ids)
        rollout = Rollout(*tokens, rollout_T, rank_T, request.topk_ids_TK, topk_TK, "stop")
        key = (1, 0, 0, i // group, i % group)
        samples.append(LearnedResponse(rollout, advantages[i], recomputed_T, topk_TK, row_key=key))
    return samples


def gradients(learner: Learner) -> dict[str, Tensor]:
    weights = learner.model.named_parameters()
    return {name: p.grad.clone() for name, p in weights if p.grad is not None}


def by_hand(
    learner: Learner, samples: list[LearnedResponse], name: str, aggregation: str
) -> tuple[dict[str, Tensor], Tensor]:
    """The gradient of the published objective over only the model's tokens, in float64, and
    their log π.
    """
    model = deepcopy(learner.model).double()
    model.zero_grad(set_to_none=True)
    read = [sampled_tokens(model, sample) for sample in samples]
    logps, entropies, luck, recomputed, rollout = zip(*read, strict=True)
    logp_N, lengths = torch.cat(logps), list(map(len, logps))
    flat = [torch.from_numpy(np.concatenate(parts)).double() for parts in (recomputed, rollout)]
    advantage_N = torch.tensor(np.repeat([sample.advantage for sample in samples], lengths))
    luck_N = torch.from_numpy((np.concatenate(luck) >> np.uint64(11)) * 2.0**-53)
    no_top_k = (torch.zeros(len(logp_N), 0),) * 3
    groups = [sample.row_key[3] for sample in samples]
    context = (no_top_k, torch.cat(entropies), groups, luck_N)
    terms_N = OF_TABLE[name](published.Sample(logp_N, *flat, advantage_N, lengths, *context))
    (-published.aggregated(terms_N, lengths, aggregation, CONFIG.sampler.max_tokens)).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return expected, logp_N.detach()


def sampled_tokens(
    model: Any, sample: LearnedResponse
) -> tuple[Tensor, Tensor, np.ndarray, np.ndarray, np.ndarray]:
    """Of the tokens that the model sampled: its log π, the entropy, their draws, and what was
    recorded at the sampling weights and by the engine.
    """
    said, sampled_T = sample.rollout, sample.rollout.sampled_T
    place_N = np.arange(len(said.response_ids)) if sampled_T is None else sampled_T.nonzero()[0]
    ids = torch.tensor([said.prompt_ids + said.response_ids])
    logits_TV = model(input_ids=ids).logits[0, len(said.prompt_ids) - 1 : -1]
    logp_NV = logits_TV.log_softmax(-1)[place_N]
    logp_N = logp_NV.gather(1, torch.tensor(said.response_ids)[place_N][:, None])[:, 0]
    entropy_N = -(logp_NV.detach().exp() * logp_NV.detach()).sum(-1)
    # The draw of a token follows from the key of its row and its place
    key = hash_keys(*np.array(sample.row_key)[:, None])
    luck_N = mix(key + place_N.astype(np.uint64))
    recomputed_N = said.of_sampled(sample.logp_recomputed_T)
    return logp_N, entropy_N, luck_N, recomputed_N, said.of_sampled(said.logp_rollout_T)


def assert_same_gradients(
    gradients: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5
) -> None:
    """`tolerance`: relative to the largest gradient of all."""
    assert set(gradients) == set(expected)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 0, "nothing is learnt: nothing is compared"
    for name, gradient in expected.items():
        limits = {"atol": tolerance * largest, "rtol": 1e-4}
        torch.testing.assert_close(gradients[name].double(), gradient.double(), **limits)
