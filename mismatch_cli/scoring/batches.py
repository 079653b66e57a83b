"""Which responses share a micro-batch: by token budget, sorted by length, the same for the same set of responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class ScoreRequest:
    """One response to score, with the ids at which log π is wanted besides (none, or K per response token).

    Where the rollout's log μ over the whole vocabulary is given, its divergences are wanted too.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    topk_ids_TK: np.ndarray | None = None
    logp_rollout_TV: np.ndarray | None = None  # float32

    @property
    def num_fed(self) -> int:
        """How many tokens the model reads: nothing is predicted from the last one."""
        return len(self.prompt_ids) + len(self.response_ids) - 1


def micro_batches(requests: Sequence[ScoreRequest], token_budget: int) -> list[list[int]]:
    """Indices of the requests in micro-batches of at most `token_budget` padded tokens, longest first.

    A response longer than the budget stands alone; empty responses are left out. Ties in length are broken by the
    tokens, so the composition depends on the set of requests and not on their order.
    """
    indices = [i for i, r in enumerate(requests) if r.response_ids]
    indices.sort(key=lambda i: (-requests[i].num_fed, requests[i].prompt_ids, requests[i].response_ids))
    batches: list[list[int]] = []
    for i in indices:
        if not batches or (len(batches[-1]) + 1) * requests[batches[-1][0]].num_fed > token_budget:
            batches.append([])
        batches[-1].append(i)
    return batches


def other_shape(batches: Sequence[Sequence[int]]) -> list[list[int]]:
    """The same responses in other micro-batches: alone if they were batched, two together if they were alone.

    The last of an odd number of lonely responses is batched with itself.
    """
    alone = [i for batch in batches if len(batch) > 1 for i in batch]
    lonely = [batch[0] for batch in batches if len(batch) == 1]
    pairs = [[*lonely[i : i + 2]] if i + 1 < len(lonely) else [lonely[i]] * 2 for i in range(0, len(lonely), 2)]
    return [[i] for i in alone] + pairs


def pad_right(requests: Sequence[ScoreRequest], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both `[B, longest]`, of what the model reads."""
    longest = max(r.num_fed for r in requests)
    ids_BL = torch.zeros(len(requests), longest, dtype=torch.long)
    mask_BL = torch.zeros_like(ids_BL)
    for row, request in enumerate(requests):
        ids_BL[row, : request.num_fed] = torch.tensor((request.prompt_ids + request.response_ids)[:-1])
        mask_BL[row, : request.num_fed] = 1
    return ids_BL.to(device), mask_BL.to(device)
