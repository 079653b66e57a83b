"""How tight the lower bounds on total variation are while training: the TV of a few tokens over the
full vocabulary, beside what their binary and top-K parts show of it.

Both policies are the trainer's: π_θ′, at the weights that sampled, and π_θ, at those of an update.
The engine's μ over the vocabulary would cost a pass that returns every log-prob, and a server has
none. Some responses are read once at θ′, before the first update; π_θ comes from the pass of the
update itself. An update at θ′ compares nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, fsum, inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.head import Head, RolloutRows, score_hidden
from mismatch_cli.models.scoring.layout import micro_batches
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import DUMMY_REQUEST, Trainer
from mismatch_cli.models.sharding import pad_for_all_ranks, without_gradients
from mismatch_cli.processes.ranks import World
from mismatch_cli.rules.batch import Rollout
from mismatch_cli.rules.divergences import compare_sampled_token, sampled_in_topk, topk_divergences
from mismatch_cli.rules.joint_batches import token_hashes
from mismatch_cli.train.train_config import TrainConfig

# The share of the responses that are read at the weights that sampled. Sampling and learning take
# 4.25 forward passes of every response (see sync.py), so one more of these is 1.5 % of a step.
_RESPONSES = 1 / 16
_MOST = 2**26  # log-probs held at once, over all ranks: 256 MiB
_K = 20  # as the paper's top-K divergences
_ROWS = 64  # tokens whose logits exist at once


@dataclass(frozen=True)
class FullReference:
    """log π_θ′ over the vocabulary at some tokens of a response, in nats."""

    at_U: np.ndarray  # their places in the response
    logp_UV: np.ndarray  # float32


Bounds = np.ndarray  # _U3 float64, of each token: full TV, binary TV, top-K TV


def no_bounds() -> Bounds:
    """The bounds of no token."""
    return np.zeros((0, 3))


def references(
    rollouts: Sequence[Rollout],
    hash_S: np.ndarray,
    trainer: Trainer,
    sampling: SamplingSettings,
    config: TrainConfig,
    world: World,
) -> dict[int, FullReference]:
    """The reference of each chosen response, by its row; the model has the weights that sampled.

    `hash_S` decides which responses and tokens: the same for any number of ranks.
    """
    most = _MOST // trainer.head.vocabulary
    places_of = choose_tokens(rollouts, hash_S, most, config.bounds_share, world)
    rows = list(places_of)
    requests = [ScoreRequest.of(rollouts[row]) for row in rows]
    by_row: dict[int, FullReference] = {}
    batches = micro_batches(requests, config.scorer.token_budget, trainer.packed)
    for batch in pad_for_all_ranks(batches, world):
        members = [requests[i] for i in batch] or [DUMMY_REQUEST]
        places = [places_of[rows[i]] for i in batch]
        read = _read_references(trainer, sampling, members, places)
        for i, reference in zip(batch, read, strict=True):
            by_row[rows[i]] = reference
    return by_row


def _read_references(
    trainer: Trainer,
    sampling: SamplingSettings,
    members: Sequence[ScoreRequest],
    places: Sequence[np.ndarray],
) -> list[FullReference]:
    """One pass without gradients over the responses of a micro-batch; an empty one has a dummy
    request and no places.
    """

    def read_at_head(hidden_TH: Tensor, _: Tensor, head: Head) -> list[FullReference]:
        read = []
        start = 0
        for request, at_U in zip(members, places, strict=False):
            hidden_UH = hidden_TH[torch.from_numpy(start + at_U).to(hidden_TH.device)]
            read.append(FullReference(at_U, _log_probs(hidden_UH, head, sampling)))
            start += len(request.response_ids)
        return read

    with without_gradients(trainer.model):
        return trainer.forward_pass(members, read_at_head)


def _log_probs(hidden_UH: Tensor, head: Head, sampling: SamplingSettings) -> np.ndarray:
    """log π over the vocabulary, in nats; it leaves the device a few rows at a time."""
    logps = []
    for hidden_RH in hidden_UH.split(_ROWS):
        logits_RV = sampling.process(head.logits(hidden_RH))
        logps.append(logits_RV.log_softmax(dim=-1).cpu().numpy())
    return np.concatenate(logps)


def compare_with(
    reference: FullReference,
    hidden_UH: Tensor,
    ids_U: Tensor,
    head: Head,
    sampling: SamplingSettings,
) -> Bounds:
    """π_θ′ and π_θ at the tokens of a reference, given their ids and the hidden states that predict
    them now.
    """
    before_UV = reference.logp_UV
    top_UK = torch.from_numpy(before_UV).topk(min(_K, before_UV.shape[1]))
    query_UK = top_UK.indices.to(ids_U.device)
    rows = RolloutRows(dict(enumerate(before_UV)))
    now = score_hidden(hidden_UH.detach(), head, ids_U, query_UK, sampling, rollout=rows)
    sampled_U = ids_U.cpu().numpy()
    # Pairs (θ′, θ): of the sampled tokens, and of the K most probable ones at θ′.
    logp_U = before_UV[np.arange(len(sampled_U)), sampled_U], now.logp_T.cpu().numpy()
    logp_UK = top_UK.values.numpy(), now.logp_at_ids_TK.cpu().numpy()
    in_top_U = sampled_in_topk(sampled_U, top_UK.indices.numpy())
    top_k_U, _ = topk_divergences(*logp_U, *logp_UK, in_top_U)
    binary_U = np.abs(compare_sampled_token(*logp_U).difference_T)
    return np.stack([now.tv_full_T.cpu().numpy(), binary_U, top_k_U], axis=1).astype(np.float64)


_NAMES = ("tv_full", "tv_binary", "tv_topk")


def mean_bounds(bounds: Bounds) -> dict[str, Any]:
    """The means over the tokens as the line of a step has them, and their number."""
    # fsum is exact, so the order in which ranks and micro-batches deliver tokens changes no bit.
    sums = map(fsum, bounds.T)
    means = {name: total / len(bounds) for name, total in zip(_NAMES, sums, strict=True)}
    return means | {"tokens": len(bounds)}


_NO_HASHES = np.zeros(0, dtype=np.uint64)


def choose_tokens(
    rollouts: Sequence[Rollout], hash_S: np.ndarray, most: int, share: float, world: World
) -> dict[int, np.ndarray]:
    """The places of the chosen tokens by row: a share of all sampled tokens, in few responses, and
    at most so many over all ranks.
    """
    # A response costs a pass however many of its tokens are read, so few responses have them all.
    of_responses = max(_RESPONSES, share)
    rows = np.flatnonzero(hash_S < _limit(hash_S, of_responses, len(hash_S) * world.size, world))
    places, hashes = {}, {}
    for row in rows.tolist():
        rollout = rollouts[row]
        places[row] = rollout.of_sampled(np.arange(len(rollout.response_ids)))
        hashes[row] = token_hashes(hash_S[row], places[row])
    every_T = np.concatenate([_NO_HASHES, *hashes.values()])
    limit = _limit(every_T, share / of_responses, most, world)
    chosen = {}
    for row, at_T in places.items():
        below_T = hashes[row] < limit
        if below_T.any():
            chosen[row] = at_T[below_T]
    return chosen


def _limit(hash_N: np.ndarray, share: float, most: int, world: World) -> float:
    """The hash below which the lowest hashes of all ranks are: a share of them, at most so many."""
    every = np.sort(np.concatenate(world.gather(hash_N)))
    count = min(ceil(share * len(every)), most)
    if count >= len(every):
        return inf
    return every[count]
