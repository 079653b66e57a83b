"""The layout of responses in a pass of the trainer: which go together, padded as rows or packed
into one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch

from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.sharding import pass_through, without_gradients

_LENGTHS = (7, 3, 12)  # of the test rows that show whether a model can be packed
_SAME = 0.01  # of the hidden states' norm: rounding causes less, another sequence's tokens more


def micro_batches(
    requests: Sequence[ScoreRequest], token_budget: int, packed: bool = False
) -> list[list[int]]:
    """Indices of the requests in micro-batches of at most `token_budget` tokens, padding included,
    longest first.

    A response longer than the budget gets its own; empty responses are left out. Ties in length are
    broken by the tokens, so the composition depends on the set of requests and not on their order.
    """
    indices = [i for i, r in enumerate(requests) if r.response_ids]
    indices.sort(
        key=lambda i: (-requests[i].num_fed, requests[i].prompt_ids, requests[i].response_ids)
    )
    batches: list[list[int]] = []
    for i in indices:
        fed = requests[i].num_fed
        if batches and packed:
            tokens = sum(requests[member].num_fed for member in batches[-1]) + fed
        elif batches:
            tokens = (len(batches[-1]) + 1) * requests[batches[-1][0]].num_fed
        if not batches or tokens > token_budget:
            batches.append([])
        batches[-1].append(i)
    return batches


def other_shape(batches: Sequence[Sequence[int]]) -> list[list[int]]:
    """The same responses in other micro-batches: alone if they were batched, in pairs if they were
    alone.

    The last of an odd number of single responses is paired with itself.
    """
    alone = []
    single: list[int] = []
    for batch in batches:
        if len(batch) > 1:
            alone += [[i] for i in batch]
        else:
            single += batch
    pairs = []
    for first in range(0, len(single), 2):
        pair = single[first : first + 2]
        pairs.append(pair if len(pair) == 2 else pair * 2)
    return alone + pairs


def pad_right(
    requests: Sequence[ScoreRequest], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both `[B, longest]`, of what the model reads."""
    longest = max(r.num_fed for r in requests)
    ids_BL = torch.zeros(len(requests), longest, dtype=torch.long)
    mask_BL = torch.zeros_like(ids_BL)
    for row, request in enumerate(requests):
        ids_BL[row, : request.num_fed] = torch.tensor(_fed(request))
        mask_BL[row, : request.num_fed] = 1
    return ids_BL.to(device), mask_BL.to(device)


def pack(
    requests: Sequence[ScoreRequest], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions, both `[1, tokens]`: where positions restart, attention starts a
    new sequence.
    """
    ids_1L = torch.tensor([list(chain.from_iterable(map(_fed, requests)))])
    positions_1L = torch.cat([torch.arange(request.num_fed) for request in requests])[None]
    return ids_1L.to(device), positions_1L.to(device)


def fed_rows(requests: Sequence[ScoreRequest], packed: bool) -> tuple[list[slice], int]:
    """The slice of each request's tokens among all rows of a pass, and the number of rows,
    padding included.
    """
    fed = [request.num_fed for request in requests]
    starts = [row * max(fed) for row in range(len(fed) + 1)]
    if packed:
        starts = list(accumulate(fed, initial=0))
    spans = [slice(start, start + count) for start, count in zip(starts, fed, strict=False)]
    return spans, starts[-1]


def _fed(request: ScoreRequest) -> list[int]:
    """The tokens that the model reads: nothing is predicted from the last."""
    return (request.prompt_ids + request.response_ids)[:-1]


def can_pack(model: Any) -> bool:
    """Whether attention keeps the sequences of one row apart without comparing them: flash
    attention.

    Other kernels would compare every token with every other and then mask most of it. This is
    tested, not assumed: a layer other than attention, or a model that counts positions itself,
    would mix the sequences.
    """
    return "flash" in model.config._attn_implementation and keeps_apart(model)


def keeps_apart(model: Any) -> bool:
    """Whether packed sequences have the same hidden states as each alone."""
    device = input_device(model)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids_T = (torch.arange(sum(_LENGTHS)) * 7919 % vocabulary).to(device)
    positions_T = torch.cat([torch.arange(length) for length in _LENGTHS]).to(device)
    with without_gradients(model):
        try:
            inputs = {"input_ids": ids_T[None], "position_ids": positions_T[None]}
            packed_TH = hidden_states(model, inputs)
        except TypeError:  # it takes no positions
            return False
        rows = ids_T.split(_LENGTHS)
        alone_TH = torch.cat([hidden_states(model, {"input_ids": row_L[None]}) for row_L in rows])
    difference = (packed_TH - alone_TH).float().norm() / packed_TH.float().norm()
    return bool(difference < _SAME)  # False for NaN


def input_device(model: Any) -> torch.device:
    """Where token ids belong, also if the layers are on several devices."""
    device: torch.device = model.get_input_embeddings().weight.device
    return model.device if device.type == "meta" else device


def hidden_states(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The last hidden states `[L, H]` of the first row of these inputs."""
    return pass_through(model, inputs, lambda hidden_BLH, *_: hidden_BLH[0])
