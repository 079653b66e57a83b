"""How tight the lower bounds on total variation are while training: the TV of a few tokens over the
full vocabulary, beside what their binary and top-K parts show of it.

Both policies are the trainer's: π_θ′, at the weights that sampled, and π_θ, at those of an update.
The engine's μ over the vocabulary would cost a pass that returns every log-prob, and a server has
none. Some responses are read once at θ′, before the first update; π_θ comes from the pass of the
update itself. An update at θ′ compares nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, fsum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mismatch_cli.batch import Rollout
from mismatch_cli.batches import token_hashes
from mismatch_cli.divergences import sampled_in_topk, sampled_token, topk_divergences
from mismatch_cli.ranks import World
from mismatch_cli.rl.train_config import TrainConfig
from mismatch_cli.sampling import SamplingSettings
from mismatch_cli.scoring.head import Head, RolloutRows, score_hidden
from mismatch_cli.scoring.layout import micro_batches
from mismatch_cli.scoring.trainer import NOTHING, ScoreRequest, Trainer
from mismatch_cli.sharding import padded, without_gradients

# Of the responses are read at the weights that sampled: one more forward pass of 1.25 to sample and
# 3 to learn from each response (see sync.py) is 1.5 % of a step.
_RESPONSES = 1 / 16
_MOST = 2**26  # log-probs held at once, over all ranks: 256 MiB
_K = 20  # as the paper's top-K divergences
_ROWS = 64  # tokens whose logits exist at once


@dataclass(frozen=True)
class Reference:
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
) -> dict[int, Reference]:
    """The reference of some responses, by their rows; the model has the weights that sampled.

    `hash_S` decides which responses and tokens: the same for any number of ranks.
    """
    at = _chosen(rollouts, hash_S, _MOST // trainer.head.vocabulary, config.bounds_share, world)
    rows = list(at)
    requests = [ScoreRequest.of(rollouts[row]) for row in rows]
    by_row: dict[int, Reference] = {}
    batches = micro_batches(requests, config.token_budget, trainer.packed)
    for batch in padded(batches, world):
        places = [at[rows[i]] for i in batch]
        members = [requests[i] for i in batch] or [NOTHING]
        for i, reference in zip(batch, _read(trainer, sampling, members, places), strict=True):
            by_row[rows[i]] = reference
    return by_row


def _read(
    trainer: Trainer,
    sampling: SamplingSettings,
    members: Sequence[ScoreRequest],
    places: Sequence[np.ndarray],
) -> list[Reference]:
    """One pass without gradients; log π over the vocabulary leaves the device in small parts."""

    lengths = [len(request.response_ids) for request in members]

    def look(hidden_TH: Tensor, _: Tensor, head: Head) -> np.ndarray:
        chosen_UH = hidden_TH[_rows(lengths, places, hidden_TH.device)]
        parts = [
            sampling.process(head.logits(part_UH)).log_softmax(dim=-1).cpu().numpy()
            for part_UH in chosen_UH.split(_ROWS)
        ]
        return np.concatenate(parts)

    with without_gradients(trainer.model):
        logp_UV = trainer.look_at(members, look)
    ends = np.cumsum([len(at_U) for at_U in places])[:-1]
    pairs = zip(places, np.split(logp_UV, ends), strict=True) if places else ()
    return [Reference(at_U, part_UV) for at_U, part_UV in pairs]


def compared(
    lengths: Sequence[int],
    references: Sequence[Reference | None],
    hidden_TH: Tensor,
    ids_T: Tensor,
    head: Head,
    sampling: SamplingSettings,
) -> Bounds:
    """π_θ′ and π_θ at the chosen tokens of responses of these lengths, given the hidden states that
    predict all of their tokens.
    """
    before = [_NONE if reference is None else reference for reference in references]
    rows_U = _rows(lengths, [reference.at_U for reference in before], hidden_TH.device)
    if not len(rows_U):
        return no_bounds()
    before_UV = np.concatenate([reference.logp_UV for reference in before if len(reference.at_U)])
    ids_U = ids_T[rows_U]
    top_UK = torch.from_numpy(before_UV).topk(min(_K, before_UV.shape[1]))
    now = score_hidden(
        hidden_TH[rows_U].detach(),
        head,
        ids_U,
        top_UK.indices.to(ids_U.device),
        sampling,
        rollout=RolloutRows(dict(enumerate(before_UV))),
    )
    sampled_U = ids_U.cpu().numpy()
    logp_U = before_UV[np.arange(len(sampled_U)), sampled_U], now.logp_T.cpu().numpy()
    logp_UK = top_UK.values.numpy(), now.logp_at_ids_TK.cpu().numpy()
    in_top_U = sampled_in_topk(sampled_U, top_UK.indices.numpy())
    top_k_U, _ = topk_divergences(*logp_U, *logp_UK, in_top_U)
    binary_U = np.abs(sampled_token(*logp_U).difference_T)
    return np.stack([now.tv_full_T.cpu().numpy(), binary_U, top_k_U], axis=1).astype(np.float64)


def in_line(bounds: Bounds) -> dict[str, Any]:
    """What the line of a step says: means over the tokens, whose order does not change a bit."""
    means = [fsum(column) / len(bounds) for column in bounds.T]
    names = ("tv_full", "tv_binary", "tv_topk")
    return dict(zip(names, means, strict=True)) | {"tokens": len(bounds)}


_NO_HASHES = np.zeros(0, dtype=np.uint64)
_NONE = Reference(np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.float32))


def _rows(lengths: Sequence[int], places: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """The places among the tokens of all responses."""
    starts = np.cumsum([0, *lengths])
    parts = [start + at_U for start, at_U in zip(starts, places, strict=False)]
    return torch.from_numpy(np.concatenate([_NONE.at_U, *parts])).to(device)


def _chosen(
    rollouts: Sequence[Rollout], hash_S: np.ndarray, most: int, share: float, world: World
) -> Mapping[int, np.ndarray]:
    """The places of the chosen tokens by row: sampled tokens of few responses, at most so many."""
    of_responses = max(_RESPONSES, share)
    rows = np.flatnonzero(_lowest(hash_S, of_responses, len(hash_S) * world.size, world)).tolist()
    places = [_sampled_places(rollouts[row]) for row in rows]
    hashes = [token_hashes(hash_S[row], at_T) for row, at_T in zip(rows, places, strict=True)]
    every_T = np.concatenate([_NO_HASHES, *hashes])
    parts = np.split(
        _lowest(every_T, share / of_responses, most, world), np.cumsum(list(map(len, places)))[:-1]
    )
    kept = {row: at_T[part] for row, at_T, part in zip(rows, places, parts, strict=False)}
    return {row: at_U for row, at_U in kept.items() if len(at_U)}


def _sampled_places(rollout: Rollout) -> np.ndarray:
    """The places of the tokens that the engine sampled among those of the response."""
    return rollout.of_sampled(np.arange(len(rollout.response_ids)))


def _lowest(hash_N: np.ndarray, share: float, most: int, world: World) -> np.ndarray:
    """Which are among the lowest hashes of all ranks: a share of them, at most so many; bool."""
    every = np.sort(np.concatenate(world.gather(hash_N)))
    count = min(ceil(share * len(every)), most)
    return hash_N < every[count] if count < len(every) else np.ones(len(hash_N), dtype=bool)
