"""The two shapes in which responses travel: one `Rollout` from an engine, many laid flat in a `TokenBatch`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class Rollout:
    """One sampled response as its engine reports it.

    `logp_rollout_T` is log μ of each sampled token in nats, under the distribution that was sampled (after temperature
    and truncation). The top-K columns are the engine's ranks 1…K, most probable first; the sampled token is not
    inserted. A rank the support does not reach holds -inf.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    logp_rollout_T: np.ndarray  # float32
    rank_rollout_T: np.ndarray  # int32, 1 = the engine's most probable token
    topk_ids_TK: np.ndarray | None  # int32
    topk_logp_rollout_TK: np.ndarray | None  # float32
    finish_reason: str  # "stop" or "length"


@dataclass(frozen=True)
class TokenBatch:
    """Many responses laid flat, as torch tensors that share the memory of the Parquet buffers where they can.

    Response `s` owns the tokens `offset_S1[s] : offset_S1[s + 1]`; `_S1` has one entry more than there are responses.
    A column that was not measured is None; in a column that was measured for some responses only, the others hold NaN
    (-1 for ranks). A NaN is never a measurement: log-probabilities are checked when they are recorded.
    """

    offset_S1: torch.Tensor  # int64
    prompt_id_S: torch.Tensor  # int64, what intervals are over
    sample_index_S: torch.Tensor  # int32
    step_S: torch.Tensor  # int32
    prompt_length_S: torch.Tensor  # int64, tokens
    truncated_S: torch.Tensor  # bool, the response ran into the length limit
    reward_S: torch.Tensor | None  # float32

    response_ids_T: torch.Tensor  # int32
    loss_mask_T: torch.Tensor  # bool, False = the trainer learns nothing from this token
    logp_rollout_T: torch.Tensor  # float32, nats, ≤ 0
    logp_trainer_T: torch.Tensor | None
    logp_recomputed_T: torch.Tensor | None
    logp_trainer_repeat_T: torch.Tensor | None
    entropy_trainer_T: torch.Tensor | None
    rank_rollout_T: torch.Tensor | None  # int32
    rank_trainer_T: torch.Tensor | None
    advantage_T: torch.Tensor | None
    tv_full_T: torch.Tensor | None
    kl_full_T: torch.Tensor | None

    topk_ids_TK: torch.Tensor | None  # int32
    topk_logp_rollout_TK: torch.Tensor | None
    topk_logp_trainer_TK: torch.Tensor | None
    topk_logp_recomputed_TK: torch.Tensor | None

    @property
    def num_tokens(self) -> int:
        return len(self.response_ids_T)

    @property
    def num_responses(self) -> int:
        return len(self.offset_S1) - 1
