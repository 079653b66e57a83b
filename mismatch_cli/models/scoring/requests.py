"""What is asked of the trainer: a response to score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.rules.batch import Rollout


@dataclass(frozen=True)
class ScoreRequest:
    """One response to score, with more ids whose log π is wanted (none, or K per response token).

    With the rollout's full-vocabulary log μ, the result has divergences too; with its routes, it
    compares them with what the trainer's routers choose at `counted_T` (default: all response
    tokens).
    """

    prompt_ids: list[int]
    response_ids: list[int]
    topk_ids_TK: np.ndarray | None = None
    logp_rollout_TV: np.ndarray | None = None  # float32
    routes_FMK: np.ndarray | None = None  # uint16, the experts of every token that the model reads
    counted_T: np.ndarray | None = None  # bool

    @classmethod
    def of(cls, rollout: Rollout) -> ScoreRequest:
        """A response as its engine reports it."""
        ids = rollout.prompt_ids, rollout.response_ids
        return cls(
            *ids, rollout.topk_ids_TK, routes_FMK=rollout.routes_FMK, counted_T=rollout.sampled_T
        )

    @property
    def num_fed(self) -> int:
        """The number of tokens that the model reads: all but the last, from which nothing is
        predicted.
        """
        return len(self.prompt_ids) + len(self.response_ids) - 1

    @property
    def num_queries(self) -> int:
        return 0 if self.topk_ids_TK is None else self.topk_ids_TK.shape[1]
