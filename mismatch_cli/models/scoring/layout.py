"""The layout of responses in a pass of the trainer: which go together, padded as rows or packed
into one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
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
    batched = [i for batch in batches if len(batch) > 1 for i in batch]
    single = [batch[0] for batch in batches if len(batch) == 1]
    pairs = [
        [*single[i : i + 2]] if i + 1 < len(single) else [single[i]] * 2
        for i in range(0, len(single), 2)
    ]
    return [[i] for i in batched] + pairs


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
    ids_1L = torch.tensor([[token for request in requests for token in _fed(request)]])
    positions_1L = torch.cat([torch.arange(request.num_fed) for request in requests])[None]
    return ids_1L.to(device), positions_1L.to(device)


def fed_rows(requests: Sequence[ScoreRequest], packed: bool) -> tuple[list[slice], int]:
    """The slice of each request's tokens among all rows of a pass, and the number of rows,
    padding included.
    """
    fed = [request.num_fed for request in requests]
    starts = (
        list(accumulate(fed, initial=0))
        if packed
        else [row * max(fed) for row in range(len(fed) + 1)]
    )
    return [slice(start, start + count) for start, count in zip(starts, fed, strict=False)], starts[
        -1
    ]


def _fed(request: ScoreRequest) -> list[int]:
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
    embeddings = model.get_input_embeddings().weight
    device = embeddings.device if embeddings.device.type != "meta" else model.device
    ids_T = (torch.arange(sum(_LENGTHS)) * 7919 % embeddings.shape[0]).to(device)
    positions_T = torch.cat([torch.arange(length) for length in _LENGTHS]).to(device)
    with without_gradients(model):
        try:
            packed_TH = _hidden(
                model, {"input_ids": ids_T[None], "position_ids": positions_T[None]}
            )
        except TypeError:  # it takes no positions
            return False
        rows = [_hidden(model, {"input_ids": ids_L[None]}) for ids_L in ids_T.split(_LENGTHS)]
    difference = (packed_TH - torch.cat(rows)).float().norm() / packed_TH.float().norm()
    return bool(difference < _SAME)  # False for NaN


def _hidden(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return pass_through(model, inputs, lambda hidden_BLH, *_: hidden_BLH[0])
