"""Policies made by hand or drawn at random, shared by the tests of masks and of algorithms."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mismatch_cli import registry, trust_regions
from mismatch_cli.arrays import Array
from mismatch_cli.policies import TRAINER_ROLLOUT, Policies, TopKLogProbs
from mismatch_cli.trust_regions import Decision, Threshold

REGIONS = registry.names(trust_regions.PACKAGE)
ONE_SIDED = [name for name in REGIONS if trust_regions.find(name).NOT_ONE_SIDED == ""]
F64 = torch.float64
INF = float("inf")
K = 20


def policies(
    rollout: Tensor, trainer: Tensor, recomputed: Tensor | None = None, lengths: list[int] | None = None
) -> Policies:
    """Policies of given log-probabilities, one response unless lengths are given, with a top-K that fits them."""
    offset_S1 = torch.tensor([0, *(lengths or [len(rollout)])]).cumsum(0)
    recomputed = trainer if recomputed is None else recomputed
    return Policies(rollout, trainer, recomputed, offset_S1, topk_around(rollout, trainer, recomputed))


def topk_around(rollout: Tensor, trainer: Tensor, recomputed: Tensor) -> TopKLogProbs:
    """A top-K where the sampled token is first if μ > 0.3, else absent; nine tenths of the rest is shared evenly."""
    ids_TK = torch.arange(1, K + 1).repeat(len(rollout), 1)
    first_T = rollout > -1.2
    ids_TK[first_T, 0] = 0

    def columns(logp_T: Tensor) -> Tensor:
        rest_T = -torch.expm1(logp_T)
        logp_TK = torch.where(first_T, 0.9 * rest_T / (K - 1), 0.9 * rest_T / K)[:, None].repeat(1, K).log()
        logp_TK[:, 0] = torch.where(first_T, logp_T, logp_TK[:, 0])
        return logp_TK

    sampled_ids_T = torch.zeros(len(rollout), dtype=torch.int64)
    return TopKLogProbs(sampled_ids_T, ids_TK, columns(rollout), columns(trainer), columns(recomputed))


def random_policies(seed: int, responses: int = 60, longest: int = 40, vocabulary: int = 26) -> Policies:
    """Softmaxes in float64, from almost deterministic to flat, whose gap differs by orders of magnitude by response."""
    generator = torch.Generator().manual_seed(seed)
    length_S = torch.randint(1, longest + 1, (responses,), generator=generator)
    tokens = int(length_S.sum())

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    def per_response(low: float, high: float) -> Tensor:
        return 10 ** (low + (high - low) * torch.rand(responses, 1, generator=generator, dtype=F64))

    sharpness_T1 = 0.5 + 5 * torch.rand(tokens, 1, generator=generator, dtype=F64)
    logits_TV = sharpness_T1 * normal(tokens, vocabulary)
    engine_T1, step_T1 = (per_response(-3.5, 0.6).repeat_interleave(length_S, 0) for _ in range(2))
    recomputed_TV = logits_TV + engine_T1 * normal(tokens, vocabulary)
    trainer_TV = recomputed_TV + step_T1 * normal(tokens, vocabulary)
    logp_TV = [x_TV.log_softmax(-1) for x_TV in (logits_TV, trainer_TV, recomputed_TV)]
    ids_T = torch.multinomial(logp_TV[0].exp(), 1, generator=generator).squeeze(1)
    top_TK = logp_TV[0].topk(K, dim=-1).indices
    rollout, trainer, recomputed = (x_TV[torch.arange(tokens), ids_T] for x_TV in logp_TV)
    topk = TopKLogProbs(ids_T, top_TK, *(x_TV.gather(1, top_TK) for x_TV in logp_TV))
    return Policies(rollout, trainer, recomputed, torch.cat([torch.zeros(1).long(), length_S.cumsum(0)]), topk)


def cast(given: Policies, dtype: torch.dtype) -> Policies:
    """The same policies in another precision."""
    topk = given.topk
    assert topk is not None and topk.recomputed is not None and given.recomputed is not None
    columns = (topk.rollout, topk.trainer, topk.recomputed)
    converted = TopKLogProbs(topk.response_ids_T, topk.ids_TK, *(x.to(dtype) for x in columns))
    rollout, trainer, recomputed = (x.to(dtype) for x in (given.rollout, given.trainer, given.recomputed))
    return Policies(rollout, trainer, recomputed, given.offset_S1, converted)


def in_numpy(given: Policies) -> Policies:
    """The same policies as numpy arrays."""
    topk = given.topk
    return Policies(
        *(None if x is None else x.numpy() for x in (given.rollout, given.trainer, given.recomputed)),
        given.offset_S1.numpy(),
        None if topk is None else TopKLogProbs(*(None if x is None else x.numpy() for x in vars(topk).values())),
    )


def like(given: Policies, column_T: Tensor) -> Array:
    """A column in the world of the policies."""
    return column_T.numpy() if isinstance(given.rollout, np.ndarray) else column_T


def columns(given: Policies) -> list[Array]:
    """What policies are made of, their top-K included."""
    topk = given.topk
    assert topk is not None and given.recomputed is not None
    return [given.rollout, given.trainer, given.recomputed, given.offset_S1, topk.ids_TK, topk.rollout, topk.trainer]


def same(x: Array, y: Array) -> bool:
    return type(x) is type(y) and np.array_equal(np.asarray(x), np.asarray(y))


def signs(tokens: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    """Advantages of both signs and of any size, none zero."""
    return torch.randn(tokens, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def ask(name: str, given: Policies, advantage_T: Tensor, **chosen: Threshold) -> Decision:
    """What a trust region itself says of the trainer against the rollout."""
    return trust_regions.find(name).trust_region(given.compare(TRAINER_ROLLOUT), advantage_T, **chosen)


def kept(name: str, given: Policies, advantage_T: Tensor, **chosen: Threshold) -> list[bool]:
    return ask(name, given, advantage_T, **chosen).keep_T.tolist()
