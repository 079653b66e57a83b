"""Whether one side's columns agree with each other: the sampled token's log-probability with that side's top-K."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mismatch_cli.batch import TokenBatch

_COLUMNS = {
    "rollout": ("logp_rollout_T", "topk_logp_rollout_TK"),
    "trainer": ("logp_trainer_T", "topk_logp_trainer_TK"),
    "recomputed": ("logp_recomputed_T", "topk_logp_recomputed_TK"),
}
_ABSOLUTE, _RELATIVE = 1e-3, 2.0**-7  # nats: beyond what storing one of the columns in bfloat16 makes


@dataclass
class SideAgreement:
    """Of one side: sampled tokens that stand in its top-K, those at odds with it, and by how much."""

    compared: int = 0
    at_odds: int = 0
    difference: float = 0.0  # Σ|sampled − top-K| over them, nats


@dataclass
class OwnColumns:
    """Counts over every token of a trace, exact; empty without top-K columns."""

    sides: dict[str, SideAgreement] = field(default_factory=dict)

    def update(self, batch: TokenBatch) -> None:
        """Take in one table."""
        if batch.topk_ids_TK is None:
            return
        here_TK = batch.topk_ids_TK.numpy() == batch.response_ids_T.numpy()[:, None]
        for side, (sampled, topk) in _COLUMNS.items():
            logp_T, logp_TK = getattr(batch, sampled), getattr(batch, topk)
            if logp_T is not None and logp_TK is not None:
                self._update_side(side, logp_T.numpy(), logp_TK.numpy(), here_TK)

    def _update_side(self, side: str, logp_T: np.ndarray, logp_TK: np.ndarray, here_TK: np.ndarray) -> None:
        agreement = self.sides.setdefault(side, SideAgreement())
        known_TK = np.isfinite(logp_TK)
        in_topk_T = (here_TK & known_TK).any(axis=1) & np.isfinite(logp_T)
        own_T = np.where(here_TK & known_TK, logp_TK, 0).sum(axis=1)
        with np.errstate(invalid="ignore"):
            difference_T = np.where(in_topk_T, np.abs(own_T - logp_T), 0)
            odd_T = difference_T > _ABSOLUTE + _RELATIVE * np.abs(logp_T)
        agreement.compared += int(in_topk_T.sum())
        agreement.at_odds += int(odd_T.sum())
        agreement.difference += float(difference_T[odd_T].sum(dtype=np.float64))
