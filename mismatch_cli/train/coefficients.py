"""The responses of a micro-batch as their algorithm sees them: their log-probs, and their
coefficients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.models.scoring.policy_gradient import LogpPass
from mismatch_cli.rules.algorithms.algorithm import Algorithm, coefficient_T
from mismatch_cli.rules.algorithms.masks_and_factors import Rule
from mismatch_cli.rules.batch import Rollout
from mismatch_cli.rules.joint_batches import Batches, BatchValues, RowKey
from mismatch_cli.rules.policies import Policies, TopKLogProbs
from mismatch_cli.train.bounds import FullReference


@dataclass(frozen=True)
class LearnedResponse:
    """One response to learn from; without `recomputed`, the trainer still has the weights that
    sampled it.
    """

    rollout: Rollout
    advantage: float
    logp_recomputed_T: np.ndarray | None = None
    topk_logp_recomputed_TK: np.ndarray | None = None
    row_key: tuple[int, ...] = (0, 0, 0, 0, 0)  # as in a trace: its batch and group
    logp_average_T: np.ndarray | None = None  # at the weight average, if there is one
    # Of few responses, once the weights have left those that sampled
    reference: FullReference | None = None


class MicroBatchCoefficients:
    """A micro-batch that gives coefficients as soon as log π is known, for the tokens that the
    engine sampled.

    An environment's tokens between them have no coefficient, and rules on responses ignore them. A
    rule on whole responses, or on other tokens, needs a pass before: `known` is what that measured.
    A rule on whole batches also needs `found`, the result of the passes over all of their
    micro-batches.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        samples: Sequence[LearnedResponse],
        scale_S: np.ndarray,
        device: torch.device,
    ):
        self._algorithm, self._samples, self._device = algorithm, samples, device
        self._length_S = np.array([s.rollout.num_sampled for s in samples], dtype=np.int64)
        self._offset_S1 = torch.from_numpy(np.concatenate([[0], np.cumsum(self._length_S)])).to(
            device
        )
        self._at_N = self._places()
        self._rollout_T = self._flat([s.rollout.logp_rollout_T for s in samples])
        advantage_S = np.array([s.advantage for s in samples], dtype=np.float32)
        self.advantage_T = self._put([np.repeat(advantage_S, self._length_S)])
        self._scale_T = self._put([np.repeat(scale_S, self._length_S).astype(np.float32)])
        self._recomputed_T = self._flat_where_all([s.logp_recomputed_T for s in samples])
        self._average_T = self._flat_where_all([s.logp_average_T for s in samples])
        self.query_ids_TK = self._query_ids()
        self.known: LogpPass | None = None
        self.found: Mapping[Rule, BatchValues] = {}
        self._ready_T: Tensor | None = None

    @property
    def topk_logp_TK(self) -> Tensor | None:
        """log π of the engine's top K, if the algorithm needs it and a pass has measured it."""
        return (
            self.known.logp_at_ids_NK
            if self.known is not None and self._algorithm.needs_top_k
            else None
        )

    def seen(self) -> Policies:
        """The policies as the pass before measured them, with the batch and group of each
        response.
        """
        assert self.known is not None
        topk = None if self.topk_logp_TK is None else self._topk(self.topk_logp_TK)
        policies = self._policies(self.known.logp_N, slice(None), self._offset_S1, topk)
        return replace(policies, entropy_T=self.known.entropy_N, batches=self._batches())

    def form(self) -> None:
        """Compute every coefficient from the pass before."""
        self._ready_T = self._coefficients(self.seen(), slice(None))

    def coefficient(self, rows: slice, logp_T: Tensor) -> Tensor:
        """The coefficients of some tokens, times their response's factor in the aggregation."""
        if self._ready_T is not None:
            return self._ready_T[rows]
        offset_S1 = torch.tensor([0, len(logp_T)], device=self._device)
        return self._coefficients(self._policies(logp_T, rows, offset_S1, None), rows)

    def _coefficients(self, policies: Policies, rows: slice) -> Tensor:
        coefficient: Tensor = coefficient_T(self._algorithm, policies, self.advantage_T[rows])
        return coefficient * self._scale_T[rows]

    def _policies(
        self, logp_T: Tensor, rows: slice, offset_S1: Tensor, topk: TopKLogProbs | None
    ) -> Policies:
        recomputed_T = logp_T if self._recomputed_T is None else self._recomputed_T[rows]
        average_T = None if self._average_T is None else self._average_T[rows]
        return Policies(
            self._rollout_T[rows], logp_T, recomputed_T, offset_S1, topk, average=average_T
        )

    def _batches(self) -> Batches:
        def places() -> tuple[np.ndarray, np.ndarray]:
            response_T = np.repeat(np.arange(len(self._length_S)), self._length_S)
            return response_T, np.concatenate([_sampled_at(s.rollout) for s in self._samples])

        keys = np.array([s.row_key for s in self._samples], dtype=np.int64).reshape(
            -1, len(RowKey._fields)
        )
        return Batches.of_rows(RowKey(*keys.T), places).with_values(self.found)

    def _query_ids(self) -> Tensor:
        """The engine's top ids at each token, as many as the algorithm needs."""
        k, ids = self._algorithm.needs_top_k, [s.rollout.topk_ids_TK for s in self._samples]
        if k and any(ids_TK is None or ids_TK.shape[1] < k for ids_TK in ids):
            raise MismatchError(
                f"{self._algorithm.name} needs the engine's top {k} log-probs. Sample with "
                f"top_logprobs = {k}."
            )
        given = [ids_TK[:, :k] for ids_TK in ids if ids_TK is not None] if k else []
        none = torch.zeros((len(self._rollout_T), 0), dtype=torch.int64, device=self._device)
        return self._flat(given).long() if given else none

    def _topk(self, trainer_TK: Tensor) -> TopKLogProbs:
        k = self._algorithm.needs_top_k
        ids_T = self._flat(
            [np.array(s.rollout.response_ids, dtype=np.int64) for s in self._samples]
        )
        rollout_TK = self._flat([s.rollout.topk_logp_rollout_TK[:, :k] for s in self._samples])  # type: ignore[index]
        recomputed = [s.topk_logp_recomputed_TK for s in self._samples]
        known = all(x is not None for x in recomputed)
        recomputed_TK = self._flat([x[:, :k] for x in recomputed]) if known else trainer_TK  # type: ignore[index]
        return TopKLogProbs(ids_T, self.query_ids_TK, rollout_TK, trainer_TK, recomputed_TK)

    def _flat_where_all(self, parts: Sequence[np.ndarray | None]) -> Tensor | None:
        return None if any(x is None for x in parts) else self._flat(parts)  # type: ignore[arg-type]

    def _flat(self, parts: Sequence[np.ndarray]) -> Tensor:
        """A column of the sampled tokens of all responses."""
        return self._put(
            [s.rollout.of_sampled(part) for s, part in zip(self._samples, parts, strict=True)]
        )

    def _put(self, parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._device)

    def _places(self) -> Tensor | None:
        """The indices of the sampled tokens among all tokens; None if all were sampled."""
        rollouts = [s.rollout for s in self._samples]
        if all(rollout.sampled_T is None for rollout in rollouts):
            return None
        before = accumulate((len(r.response_ids) for r in rollouts), initial=0)
        return self._put(
            [start + _sampled_at(rollout) for start, rollout in zip(before, rollouts, strict=False)]
        )

    def chosen(self, column_T: Tensor) -> Tensor:
        """The rows of a column that belong to sampled tokens."""
        # An environment's tokens are dropped before the head, so columns from here on are `_N`.
        # Reduce a rollout's own column through `rollout.of_sampled`, or their NaN spreads.
        return column_T if self._at_N is None else column_T[self._at_N]

    def by_response(self, column_N: Tensor) -> list[np.ndarray]:
        """A column of the sampled tokens, split by response; NaN (not measured) at the other
        tokens.
        """
        parts = (part.numpy() for part in column_N.detach().cpu().split(self._length_S.tolist()))
        return [_spread(s.rollout, part) for s, part in zip(self._samples, parts, strict=True)]


def _sampled_at(rollout: Rollout) -> np.ndarray:
    """The indices of the tokens that the engine sampled."""
    return rollout.of_sampled(np.arange(len(rollout.response_ids)))


def _spread(rollout: Rollout, values_N: np.ndarray) -> np.ndarray:
    if rollout.sampled_T is None:
        return values_N
    # A trace has a value for every token: NaN, not measured, at those of an environment
    values_T = np.full(
        (len(rollout.response_ids), *values_N.shape[1:]), np.nan, dtype=values_N.dtype
    )
    values_T[rollout.sampled_T] = values_N
    return values_T
