"""The three policies on the same sampled tokens, and what follows from any two of them, computed once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from mismatch_cli import divergences

Policy = Literal["rollout", "trainer", "recomputed"]
Level = Literal["token", "product", "mean"]
_SYMBOLS = {
    ("trainer", "rollout"): ("r", "p", "q"),
    ("trainer", "recomputed"): ("r′", "p", "p′"),
    ("recomputed", "rollout"): ("ρ", "p′", "q"),
}


@dataclass(frozen=True)
class Ratio:
    """Which two policies are compared, and at which level.

    `token`: current / anchor of each token. `product`: the product over the response, exp(Σd). `mean`: the geometric
    mean over the response, exp(Σd / |y|). A response's value stands at each of its tokens.
    """

    current: Policy = "trainer"
    anchor: Policy = "rollout"
    level: Level = "token"

    @property
    def symbols(self) -> dict[str, str]:
        """The letters of formulas: `r` the token's ratio, `p` the current probability, `q` the anchor's."""
        return dict(zip("rpq", _SYMBOLS[self.current, self.anchor], strict=True))

    def __str__(self) -> str:
        symbol = self.symbols["r"]
        return {"token": symbol, "product": f"Π{symbol}", "mean": f"(Π{symbol})^(1/|y|)"}[self.level]


TRAINER_ROLLOUT = Ratio("trainer", "rollout")  # r
TRAINER_RECOMPUTED = Ratio("trainer", "recomputed")  # r′
ENGINE_GAP = Ratio("recomputed", "rollout")  # ρ


@dataclass(frozen=True)
class TopKLogProbs:
    """Log-probabilities at the engine's K most probable ids, in nats: the ids are the same for every policy."""

    response_ids_T: Tensor
    ids_TK: Tensor
    rollout: Tensor  # _TK
    trainer: Tensor  # _TK
    recomputed: Tensor | None = None  # _TK

    def copied(self) -> TopKLogProbs:
        """The same in memory of its own."""
        recomputed = None if self.recomputed is None else self.recomputed.clone()
        ids_T, ids_TK = self.response_ids_T.clone(), self.ids_TK.clone()
        return TopKLogProbs(ids_T, ids_TK, self.rollout.clone(), self.trainer.clone(), recomputed)

    def sampled_in(self, k: int) -> Tensor:
        """Whether the sampled token is among the first k ids."""
        return self._place_T < k

    @cached_property
    def _place_T(self) -> Tensor:
        """The rank of the sampled token among the ids, from 0; K where it is not there."""
        k = self.ids_TK.shape[1]
        from_end_K = torch.arange(k, 0, -1, device=self.ids_TK.device, dtype=torch.int32)
        return k - ((self.ids_TK == self.response_ids_T[:, None]) * from_end_K).amax(dim=-1)


@dataclass(frozen=True, eq=False)
class Policies:
    """Log-probabilities of the sampled tokens in nats, laid flat; response `s` owns `offset_S1[s] : offset_S1[s + 1]`.

    `recomputed` is the trainer at the weights that sampled, None where nobody scored them apart from the trainer.
    """

    rollout: Tensor  # _T
    trainer: Tensor  # _T
    recomputed: Tensor | None  # _T
    offset_S1: Tensor  # int64
    topk: TopKLogProbs | None = None
    _compared: dict[tuple[Policy, Policy], Compared] = field(default_factory=dict, init=False, repr=False)

    def compare(self, ratio: Ratio) -> Compared:
        """The two policies of a ratio; the same object every time, so that nothing is computed twice."""
        pair = (ratio.current, ratio.anchor)
        if "recomputed" in pair and self.recomputed is None:
            raise ValueError(f"{ratio} needs the recomputed log-probabilities")
        if pair not in self._compared:
            current_T, anchor_T = (getattr(self, policy) for policy in pair)
            current_TK, anchor_TK = (None if self.topk is None else getattr(self.topk, policy) for policy in pair)
            self._compared[pair] = Compared(current_T, anchor_T, self.responses, self.topk, current_TK, anchor_TK)
        return self._compared[pair]

    def copied(self, *, topk: bool) -> Policies:
        """The same in memory of its own, for code that may change what it is given; the top-K only where asked for."""
        recomputed = None if self.recomputed is None else self.recomputed.clone()
        ranks = self.topk.copied() if topk and self.topk is not None else None
        return Policies(self.rollout.clone(), self.trainer.clone(), recomputed, self.offset_S1.clone(), ranks)

    @cached_property
    def responses(self) -> Responses:
        return Responses(self.offset_S1)


@dataclass(frozen=True, eq=False)
class Responses:
    """How tokens laid flat belong to responses."""

    offset_S1: Tensor

    @cached_property
    def length_S(self) -> Tensor:
        return self.offset_S1.diff()

    @cached_property
    def response_T(self) -> Tensor:
        """The response of each token."""
        return torch.repeat_interleave(torch.arange(len(self.length_S), device=self.offset_S1.device), self.length_S)


class Compared:
    """The current policy p against its anchor q, token by token; d = log p − log q in nats.

    Where the current policy excludes the token (log p = −inf) d is −inf, the ratio 0 and the difference −q. A token
    that both exclude has not moved: d is 0, the ratio 1 and the difference 0.

    It does not hold the `Policies` that made it: a cycle would keep whole batches in memory.
    """

    def __init__(
        self,
        logp_current_T: Tensor,
        logp_anchor_T: Tensor,
        responses: Responses,
        topk: TopKLogProbs | None,
        topk_current_TK: Tensor | None,
        topk_anchor_TK: Tensor | None,
    ) -> None:
        self.logp_current_T, self.logp_anchor_T = _apart(logp_current_T, logp_anchor_T)
        self._responses, self._topk = responses, topk
        self._topk_current_TK, self._topk_anchor_TK = topk_current_TK, topk_anchor_TK
        self._divergences: dict[tuple[int, bool], tuple[Tensor, Tensor]] = {}

    @cached_property
    def log_ratio_T(self) -> Tensor:
        """d, nats."""
        return self.logp_current_T - self.logp_anchor_T

    @cached_property
    def ratio_T(self) -> Tensor:
        """p / q."""
        return self.log_ratio_T.exp()

    @cached_property
    def ratio_less_1_T(self) -> Tensor:
        """p / q − 1 without cancellation: what a ratio clip compares with its ε."""
        return self.log_ratio_T.expm1()

    @property
    def difference_T(self) -> Tensor:
        """p − q; its absolute value is the binary TV."""
        return self._sampled.difference_T

    @property
    def binary_kl_T(self) -> Tensor:
        """Binary KL(q‖p), nats."""
        return self._sampled.binary_kl_T

    @property
    def rest_T(self) -> tuple[Tensor, Tensor]:
        """1 − p and 1 − q."""
        return self._sampled.rest_trainer_T, self._sampled.rest_rollout_T

    @cached_property
    def _sampled(self) -> divergences.SampledToken:
        return divergences.sampled_token(self.logp_anchor_T, self.logp_current_T)

    def topk(self, k: int, replace_last: bool = False) -> tuple[Tensor, Tensor]:
        """TV and KL(q‖p) over the engine's first `k` ranks, the sampled token and all others: `topk_divergences`."""
        key = (k, replace_last)
        if key not in self._divergences:
            topk, current_TK, anchor_TK = self._topk, self._topk_current_TK, self._topk_anchor_TK
            if topk is None or current_TK is None or anchor_TK is None or topk.ids_TK.shape[1] < k:
                raise ValueError(f"top-{k} divergences need {k} columns of top-K log-probabilities")
            self._divergences[key] = divergences.topk_divergences(
                self.logp_anchor_T,
                self.logp_current_T,
                anchor_TK[:, :k],
                current_TK[:, :k],
                topk.sampled_in(k),
                replace_last=replace_last,
            )
        return self._divergences[key]

    def level_log_ratio_T(self, level: Level) -> Tensor:
        """log of the ratio at a level, nats; sums over a response are float64."""
        if level == "token":
            return self.log_ratio_T
        return (self._sum_S if level == "product" else self._mean_S)[self._responses.response_T]

    @cached_property
    def _sum_S(self) -> Tensor:
        sum_S = torch.zeros(len(self._responses.length_S), dtype=torch.float64, device=self.log_ratio_T.device)
        return sum_S.index_add_(0, self._responses.response_T, self.log_ratio_T.double())

    @cached_property
    def _mean_S(self) -> Tensor:
        return self._sum_S / self._responses.length_S.clamp(min=1)


def _apart(logp_current_T: Tensor, logp_anchor_T: Tensor) -> tuple[Tensor, Tensor]:
    """The same, but where both are −inf, whose difference would be NaN, a finite value whose exponential is 0."""
    neither_T = logp_anchor_T.isneginf() & logp_current_T.isneginf()
    if not neither_T.any():
        return logp_current_T, logp_anchor_T
    return logp_current_T.masked_fill(neither_T, _NOTHING), logp_anchor_T.masked_fill(neither_T, _NOTHING)


_NOTHING = -1000.0  # nats; also in float64 the exponential is 0
