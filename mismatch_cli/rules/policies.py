"""The policies on the same sampled tokens, and everything that compares two of them, computed
once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, log
from typing import Literal

import numpy as np

from mismatch_cli.base.arrays import (
    Array,
    as_numpy,
    convert_like,
    copied,
    fill_where,
    namespace,
    silent,
)
from mismatch_cli.base.hashing import hash_keys
from mismatch_cli.rules import divergences
from mismatch_cli.rules.joint_batches import Batches, token_hashes
from mismatch_cli.rules.response_layout import ResponseLayout

Policy = Literal["rollout", "trainer", "recomputed", "average"]
Level = Literal["token", "product", "mean"]
_SYMBOLS = {
    ("trainer", "rollout"): ("r", "p", "q"),
    ("trainer", "recomputed"): ("r′", "p", "p′"),
    ("recomputed", "rollout"): ("ρ", "p′", "q"),
    ("trainer", "average"): ("r̄", "p", "p̄"),
}


@dataclass(frozen=True)
class Ratio:
    """Which two policies are compared, and at which level.

    `token`: current / anchor of each token. `product`: the product over the response, exp(Σd).
    `mean`: the geometric mean over the response, exp(Σd / |y|). Each token has the value of its
    response.

    Below infinity, `gap_cap` bounds the engine gap inside a trainer/rollout ratio: it is r′ ·
    min(ρ, gap_cap), that of the trainer to max(q, p′ / gap_cap).
    """

    current: Policy = "trainer"
    anchor: Policy = "rollout"
    level: Level = "token"
    gap_cap: float = inf

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies whose log-probabilities it needs."""
        if self.gap_cap == inf:
            return (self.current, self.anchor)
        return (self.current, self.anchor, "recomputed")

    @property
    def symbols(self) -> dict[str, str]:
        """The symbols in formulas: `r` for the token's ratio, `p` for the current probability,
        `q` for the anchor's.
        """
        symbols = dict(zip("rpq", _SYMBOLS[self.current, self.anchor], strict=True))
        if self.gap_cap < inf:
            cap = f"{self.gap_cap:g}"
            symbols |= {"r": f"(r′ min(ρ, {cap}))", "q": f"max(q, p′/{cap})"}
        return symbols

    def __str__(self) -> str:
        ratio = self.symbols["r"]
        if self.level == "token":
            return ratio
        return f"Π{ratio}" if self.level == "product" else f"(Π{ratio})^(1/|y|)"


TRAINER_ROLLOUT = Ratio("trainer", "rollout")  # r
ENGINE_GAP = Ratio("recomputed", "rollout")  # ρ


@dataclass(frozen=True)
class TopKLogProbs:
    """Log-probabilities in nats at the engine's K most probable ids, which are the same for
    every policy.
    """

    response_ids_T: Array
    ids_TK: Array
    rollout: Array  # _TK
    trainer: Array  # _TK
    recomputed: Array | None = None  # _TK

    def copied(self) -> TopKLogProbs:
        """A copy in its own memory."""
        return TopKLogProbs(
            copied(self.response_ids_T),
            copied(self.ids_TK),
            copied(self.rollout),
            copied(self.trainer),
            _copied_if_scored(self.recomputed),
        )

    def sampled_in(self, k: int) -> Array:
        """Whether the sampled token is among the first k ids."""
        return self._rank_T < k

    @cached_property
    def _rank_T(self) -> Array:
        """The rank of the sampled token among the ids, from 0; K if it is not among them."""
        k, xp = self.ids_TK.shape[1], namespace(self.ids_TK)
        # The maximum of K − rank over the ids that are the sampled token's is at its first one.
        # Over no id it is 0, and K − 0 is the K of a token outside.
        from_end_K = xp.arange(k, 0, -1, device=self.ids_TK.device, dtype=xp.int32)
        return k - xp.max((self.ids_TK == self.response_ids_T[:, None]) * from_end_K, axis=-1)


@dataclass(frozen=True, eq=False)
class Policies:
    """Log-probabilities of the sampled tokens in nats, laid flat; response `s` owns `offset_S1[s] :
    offset_S1[s + 1]`.

    `recomputed` is the trainer at the weights that sampled, `average` at an average of its weights;
    None if they were not scored separately.
    """

    rollout: Array  # _T
    trainer: Array  # _T
    recomputed: Array | None  # _T
    offset_S1: Array  # int64
    topk: TopKLogProbs | None = None
    entropy_T: Array | None = None  # of the trainer, nats
    batches: Batches | None = None  # None: rules on whole batches cannot decide
    average: Array | None = None  # _T
    _compared: dict[tuple[Policy, Policy, float], Compared] = field(
        default_factory=dict, init=False, repr=False
    )

    def compare(self, ratio: Ratio) -> Compared:
        """The two policies of a ratio; always the same object, so that nothing is computed
        twice.
        """
        for policy in ratio.policies:
            if getattr(self, policy) is None:
                raise ValueError(f"{ratio} needs the log-probabilities of the {policy} policy")
        key = (ratio.current, ratio.anchor, ratio.gap_cap)
        if key not in self._compared:
            # Averaged weights have no top-K columns, and some traces have none at all
            self._compared[key] = Compared(
                getattr(self, ratio.current),
                self._anchor_T(ratio),
                self.responses,
                self.topk,
                getattr(self.topk, ratio.current, None),
                getattr(self.topk, ratio.anchor, None),
                self.entropy_T,
                self.hash_T,
            )
        return self._compared[key]

    def _anchor_T(self, ratio: Ratio) -> Array:
        """Log-probabilities of the anchor, which keep p′ / q at most at a ratio's `gap_cap`."""
        anchor_T: Array = getattr(self, ratio.anchor)
        if ratio.gap_cap == inf or self.recomputed is None:
            return anchor_T
        return namespace(anchor_T).maximum(anchor_T, self.recomputed - log(ratio.gap_cap))

    def copied(self, *, topk: bool) -> Policies:
        """A copy for code that may modify its input; it includes the top-K only if `topk`."""
        return Policies(
            copied(self.rollout),
            copied(self.trainer),
            _copied_if_scored(self.recomputed),
            copied(self.offset_S1),
            self.topk.copied() if topk and self.topk is not None else None,
            _copied_if_scored(self.entropy_T),
            self.batches,
            _copied_if_scored(self.average),
        )

    @cached_property
    def responses(self) -> ResponseLayout:
        return ResponseLayout(self.offset_S1)

    def hash_T(self) -> np.ndarray:
        """A uint64 per token, from its row key and position, for random draws."""
        if self.batches is not None:
            return self.batches.hash_T()
        response_hash_T = hash_keys(as_numpy(self.responses.response_T))
        return token_hashes(response_hash_T, as_numpy(self.responses.position_T))


def _copied_if_scored(column: Array | None) -> Array | None:
    return None if column is None else copied(column)


class Compared:
    """The current policy p against its anchor q, token by token; d = log p − log q in nats.

    If the current policy excludes the token (log p = −inf), d is −inf, the ratio 0 and the
    difference −q. A token that both exclude has not moved: d is 0, the ratio 1 and the difference
    0.

    It does not refer to its `Policies`: a reference cycle would keep whole batches in memory.
    """

    def __init__(
        self,
        logp_current_T: Array,
        logp_anchor_T: Array,
        responses: ResponseLayout,
        topk: TopKLogProbs | None,
        topk_current_TK: Array | None,
        topk_anchor_TK: Array | None,
        entropy_T: Array | None,
        hash_T: Callable[[], np.ndarray],
    ) -> None:
        self.logp_current_T, self.logp_anchor_T = _without_shared_infinity(
            logp_current_T, logp_anchor_T
        )
        self.responses = responses
        self._topk = topk
        self._topk_current_TK, self._topk_anchor_TK = topk_current_TK, topk_anchor_TK
        self._entropy_T = entropy_T
        self._hash_T = hash_T
        self._divergences: dict[tuple[int, bool], tuple[Array, Array]] = {}
        self._ratios_less_1: dict[Level, Array] = {}

    @cached_property
    @silent
    def log_ratio_T(self) -> Array:
        """d, nats."""
        return self.logp_current_T - self.logp_anchor_T

    @cached_property
    @silent
    def ratio_T(self) -> Array:
        """p / q."""
        return namespace(self.log_ratio_T).exp(self.log_ratio_T)

    @cached_property
    @silent
    def ratio_less_1_T(self) -> Array:
        """p / q − 1 without cancellation: what a ratio clip compares with its ε."""
        return namespace(self.log_ratio_T).expm1(self.log_ratio_T)

    @property
    def difference_T(self) -> Array:
        """p − q; its absolute value is the binary TV."""
        return self._sampled.difference_T

    @property
    def binary_kl_T(self) -> Array:
        """Binary KL(q‖p), nats."""
        return self._sampled.binary_kl_T

    @cached_property
    def reverse_binary_kl_T(self) -> Array:
        """Binary KL(p‖q), nats."""
        return divergences.compare_sampled_token(
            self.logp_current_T, self.logp_anchor_T
        ).binary_kl_T

    @property
    def rest_T(self) -> tuple[Array, Array]:
        """1 − p and 1 − q."""
        return self._sampled.rest_trainer_T, self._sampled.rest_rollout_T

    @cached_property
    def _sampled(self) -> divergences.SampledToken:
        return divergences.compare_sampled_token(self.logp_anchor_T, self.logp_current_T)

    def topk(self, k: int, replace_last: bool = False) -> tuple[Array, Array]:
        """TV and KL(q‖p) over the engine's first `k` ranks, the sampled token and all others:
        `topk_divergences`.
        """
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

    @property
    def entropy_T(self) -> Array:
        """The trainer's entropy at each token, nats."""
        if self._entropy_T is None:
            raise ValueError("this rule needs the trainer's entropy")
        return self._entropy_T

    @cached_property
    def draw_T(self) -> Array:
        """A number from 0 to 1 per token, from a hash of its row key and position: the same for
        every caller.
        """
        # A float64 has 53 bits: the upper ones of the hash, as an integer times 2⁻⁵³, are exact
        return convert_like(self.logp_anchor_T, (self._hash_T() >> np.uint64(11)) * 2.0**-53)

    def level_log_ratio_T(self, level: Level) -> Array:
        """log of the ratio at a level, nats; sums over a response are float64."""
        if level == "token":
            return self.log_ratio_T
        return self.responses.per_token(self._sum_S if level == "product" else self._mean_S)

    @silent
    def level_ratio_T(self, level: Level) -> Array:
        """The ratio at a level."""
        if level == "token":
            return self.ratio_T
        return namespace(self.log_ratio_T).exp(self.level_log_ratio_T(level))

    @silent
    def level_ratio_less_1_T(self, level: Level) -> Array:
        """The ratio at a level, less 1, without cancellation."""
        if level == "token":
            return self.ratio_less_1_T
        if level not in self._ratios_less_1:
            log_ratio_T = self.level_log_ratio_T(level)
            self._ratios_less_1[level] = namespace(log_ratio_T).expm1(log_ratio_T)
        return self._ratios_less_1[level]

    @cached_property
    @silent
    def _sum_S(self) -> Array:
        return self.responses.sum(self.log_ratio_T)

    @cached_property
    @silent
    def _mean_S(self) -> Array:
        return self.responses.mean(self.log_ratio_T)


_EXCLUDED = -1000.0  # nats; also in float64 the exponential is 0


def _without_shared_infinity(logp_current_T: Array, logp_anchor_T: Array) -> tuple[Array, Array]:
    """Both columns, with a finite value whose exponential is 0 where both are −inf, and their
    difference would be NaN.
    """
    excluded_T = (logp_anchor_T == -inf) & (logp_current_T == -inf)
    if not namespace(excluded_T).any(excluded_T):
        return logp_current_T, logp_anchor_T
    current_T = fill_where(logp_current_T, excluded_T, _EXCLUDED)
    return current_T, fill_where(logp_anchor_T, excluded_T, _EXCLUDED)
