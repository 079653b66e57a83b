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

# Of the responses are read at the weights that sampled: one more forward pass of 1.25 to sample and
# 3 to learn from each response (see sync.py) is 1.5 % of a step.
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
    """Of no token."""
    return np.zeros((0, 3))


def references(
    rollouts: Sequence[Rollout],
    hash_S: np.ndarray,
    trainer: Trainer,
    sampling: SamplingSettings,
    config: TrainConfig,
    world: World,
) -> dict[int, FullReference]:
    """The reference of some responses, by their rows; the model has the weights that sampled.

    `hash_S` decides which responses and tokens: the same for any number of ranks.
    """
    at = chosen(rollouts, hash_S, _MOST // trainer.head.vocabulary, config.bounds_share, world)
    rows = list(at)
    requests = [ScoreRequest.of(rollouts[row]) for row in rows]
    by_row: dict[int, FullReference] = {}
    for batch in pad_for_all_ranks(
        micro_batches(requests, config.scorer.token_budget, trainer.packed), world
    ):
        members = [requests[i] for i in batch] or [DUMMY_REQUEST]
        places = [at[rows[i]] for i in batch]
        for i, reference in zip(batch, _read(trainer, sampling, members, places), strict=True):
            by_row[rows[i]] = reference
    return by_row


def _read(
    trainer: Trainer,
    sampling: SamplingSettings,
    members: Sequence[ScoreRequest],
    places: Sequence[np.ndarray],
) -> list[FullReference]:
    """One pass without gradients over responses, or over nothing, which has no places."""

    def look(hidden_TH: Tensor, _: Tensor, head: Head) -> list[FullReference]:
        read, start = [], 0
        for request, at_U in zip(members, places, strict=False):
            hidden_UH = hidden_TH[torch.from_numpy(start + at_U).to(hidden_TH.device)]
            read.append(FullReference(at_U, _log_probs(hidden_UH, head, sampling)))
            start += len(request.response_ids)
        return read

    with without_gradients(trainer.model):
        return trainer.forward_pass(members, look)


def _log_probs(hidden_UH: Tensor, head: Head, sampling: SamplingSettings) -> np.ndarray:
    """log π over the vocabulary, in nats; it leaves the device in small parts."""
    parts = []
    for part_RH in hidden_UH.split(_ROWS):
        logits_RV = sampling.process(head.logits(part_RH))
        parts.append(logits_RV.log_softmax(dim=-1).cpu().numpy())
    return np.concatenate(parts)


def compared(
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
    logp_U = before_UV[np.arange(len(sampled_U)), sampled_U], now.logp_T.cpu().numpy()
    logp_UK = top_UK.values.numpy(), now.logp_at_ids_TK.cpu().numpy()
    in_top_U = sampled_in_topk(sampled_U, top_UK.indices.numpy())
    top_k_U, _ = topk_divergences(*logp_U, *logp_UK, in_top_U)
    binary_U = np.abs(compare_sampled_token(*logp_U).difference_T)
    return np.stack([now.tv_full_T.cpu().numpy(), binary_U, top_k_U], axis=1).astype(np.float64)


def in_line(bounds: Bounds) -> dict[str, Any]:
    """What the line of a step says: means over the tokens, whose order does not change a bit."""
    sums = map(fsum, bounds.T)
    means = {name: total / len(bounds) for name, total in zip(_NAMES, sums, strict=True)}
    return means | {"tokens": len(bounds)}


_NAMES = ("tv_full", "tv_binary", "tv_topk")
_NO_HASHES = np.zeros(0, dtype=np.uint64)


def chosen(
    rollouts: Sequence[Rollout], hash_S: np.ndarray, most: int, share: float, world: World
) -> dict[int, np.ndarray]:
    """The places of the chosen tokens by row: sampled tokens of few responses, at most so many."""
    of_responses = max(_RESPONSES, share)
    rows = np.flatnonzero(hash_S < _limit(hash_S, of_responses, len(hash_S) * world.size, world))
    places, hashes = {}, {}
    for row in rows.tolist():
        rollout = rollouts[row]
        places[row] = rollout.of_sampled(np.arange(len(rollout.response_ids)))
        hashes[row] = token_hashes(hash_S[row], places[row])
    every_T = np.concatenate([_NO_HASHES, *hashes.values()])
    limit = _limit(every_T, share / of_responses, most, world)
    return {
        row: at_T[hashes[row] < limit] for row, at_T in places.items() if hashes[row].min() < limit
    }


def _limit(hash_N: np.ndarray, share: float, most: int, world: World) -> float:
    """Below which the lowest hashes of all ranks are: a share of them, at most so many."""
    every = np.sort(np.concatenate(world.gather(hash_N)))
    count = min(ceil(share * len(every)), most)
    return every[count] if count < len(every) else inf
