"""Which two policies are compared: the reference in the place of μ, the current one in the place of π."""

from __future__ import annotations

from dataclasses import dataclass

from mismatch_cli.batch import TokenBatch


@dataclass(frozen=True)
class Pair:
    """Two log-probability columns of a `TokenBatch`, and the top-K columns that go with them where there are any."""

    name: str
    label: str
    reference: str
    current: str
    topk_reference: str | None = None
    topk_current: str | None = None

    def measured_in(self, batch: TokenBatch) -> bool:
        return getattr(batch, self.reference) is not None and getattr(batch, self.current) is not None

    def topk_measured_in(self, batch: TokenBatch) -> bool:
        names = (self.topk_reference, self.topk_current)
        return batch.topk_ids_TK is not None and all(n and getattr(batch, n) is not None for n in names)


_ROLLOUT, _TRAINER, _RECOMPUTED = "logp_rollout_T", "logp_trainer_T", "logp_recomputed_T"
_TOPK_ROLLOUT, _TOPK_TRAINER = "topk_logp_rollout_TK", "topk_logp_trainer_TK"
_TOPK_RECOMPUTED = "topk_logp_recomputed_TK"

PAIRS = {
    pair.name: pair
    for pair in (
        Pair("mismatch", "recomputed / rollout, equal weights", _ROLLOUT, _RECOMPUTED, _TOPK_ROLLOUT, _TOPK_RECOMPUTED),
        Pair("total", "trainer / rollout", _ROLLOUT, _TRAINER, _TOPK_ROLLOUT, _TOPK_TRAINER),
        # the tokens were sampled by the rollout, not by the reference: its KL estimators say what a step changed on
        # them; the top-K ids are the rollout's
        Pair(
            "staleness", "trainer / recomputed, optimiser steps", _RECOMPUTED, _TRAINER, _TOPK_RECOMPUTED, _TOPK_TRAINER
        ),
        Pair("floor", "trainer repeated / trainer, equal weights", _TRAINER, "logp_trainer_repeat_T"),
    )
}
