"""The two forms of responses: one `Rollout` from an engine, or many flattened into a
`TokenBatch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Rollout:
    """One sampled response as its engine reports it.

    `logp_rollout_T` is log μ of each sampled token in nats, under the distribution that was sampled
    (after temperature and truncation). The top-K columns are the engine's ranks 1…K, most probable
    first; the sampled token is not inserted. A rank beyond the support is -inf. `_F` is prompt and
    response without the last token, `_M` the layers with a router.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    logp_rollout_T: np.ndarray  # float32
    rank_rollout_T: np.ndarray  # int32, 1 = the engine's most probable token
    topk_ids_TK: np.ndarray | None  # int32
    topk_logp_rollout_TK: np.ndarray | None  # float32
    finish_reason: str  # "stop" or "length"
    routes_FMK: np.ndarray | None = None  # uint16, the experts of every input token, layer by layer

    @property
    def sampled_T(self) -> np.ndarray | None:
        """Which of the tokens the engine sampled, bool; None if it sampled all of them."""
        return None

    @property
    def num_sampled(self) -> int:
        """How many of the tokens the engine sampled; the trainer learns only from these."""
        return len(self.response_ids) if self.sampled_T is None else int(self.sampled_T.sum())

    @property
    def num_turns(self) -> int:
        """How many turns the model took."""
        return 1

    def of_sampled(self, values_T: np.ndarray) -> np.ndarray:
        """The values of the tokens that the engine sampled."""
        # The environment's tokens were not sampled, and are NaN in the engine's columns.
        # A sum or a maximum over all tokens of an episode would be NaN.
        return values_T if self.sampled_T is None else values_T[self.sampled_T]


@dataclass(frozen=True)
class Episode(Rollout):
    """The turns of the model and the environment's output between them, as one response.

    The engine sampled only the model's turns: elsewhere `logp_rollout_T` and the top-K log-probs
    are NaN, ranks −1, ids 0.
    """

    reward: float = 0.0  # sum over its turns
    turns: int = 1
    loss_mask_T: np.ndarray | None = None  # bool, False for the environment's tokens

    @property
    def sampled_T(self) -> np.ndarray | None:
        return self.loss_mask_T

    @property
    def num_turns(self) -> int:
        return self.turns


@dataclass(frozen=True)
class TokenBatch:
    """Many responses laid flat, as numpy arrays; where possible these are read-only views of
    Arrow's buffers.

    Response `s` owns the tokens `offset_S1[s] : offset_S1[s + 1]`; `_S1` has one entry more than
    there are responses. A column that was not measured is None; in a column measured for some
    responses only, the others hold NaN (-1 for ranks). A NaN is never a measurement:
    log-probabilities are checked when they are recorded.
    """

    offset_S1: np.ndarray  # int64
    prompt_id_S: np.ndarray  # int64, the unit of resampling for intervals
    sample_index_S: np.ndarray  # int32
    step_S: np.ndarray  # int32
    epoch_S: np.ndarray  # int32
    minibatch_S: np.ndarray  # int32
    prompt_length_S: np.ndarray | None  # int64, tokens; None if the prompts are unknown
    truncated_S: np.ndarray  # bool, the response hit the length limit
    reward_S: np.ndarray | None  # float32

    response_ids_T: np.ndarray | None  # int32; None for log-probabilities without token ids
    loss_mask_T: np.ndarray  # bool, False = the trainer learns nothing from this token
    logp_rollout_T: np.ndarray  # float32, nats, ≤ 0
    logp_trainer_T: np.ndarray | None
    logp_recomputed_T: np.ndarray | None
    logp_average_T: np.ndarray | None
    logp_trainer_repeat_T: np.ndarray | None
    entropy_trainer_T: np.ndarray | None
    rank_rollout_T: np.ndarray | None  # int32
    rank_trainer_T: np.ndarray | None
    advantage_T: np.ndarray | None
    tv_full_T: np.ndarray | None
    kl_full_T: np.ndarray | None
    # uint8, layers where the trainer chose different experts; 255 = not measured
    route_flips_T: np.ndarray | None
    # uint8, the first of them among the layers with a router; 255 = none
    route_first_T: np.ndarray | None

    topk_ids_TK: np.ndarray | None  # int32
    topk_logp_rollout_TK: np.ndarray | None
    topk_logp_trainer_TK: np.ndarray | None
    topk_logp_recomputed_TK: np.ndarray | None

    @property
    def num_tokens(self) -> int:
        return len(self.logp_rollout_T)

    @property
    def num_responses(self) -> int:
        return len(self.offset_S1) - 1
