"""A micro-batch as its algorithm sees it: the log-probs of its policies in, coefficients out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    """One response to learn from; without recomputed columns, the trainer still has the weights
    that sampled it.
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
    """The coefficients of the tokens that the engine sampled, computed as soon as log π is known.

    An environment's tokens have no coefficient, and rules on responses ignore them. A rule on
    single tokens needs log π of a tile only. A rule on whole responses, or on other tokens, needs a
    log-prob pass over the micro-batch before: set `logp_pass`, and call `compute`. A rule on whole
    batches also needs `batch_values`, its result for the log-prob passes over all micro-batches.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        samples: Sequence[LearnedResponse],
        scale_S: np.ndarray,
        device: torch.device,
    ):
        self._algorithm = algorithm
        self._samples = samples
        self._device = device
        self._length_S = np.array([s.rollout.num_sampled for s in samples], dtype=np.int64)
        offset_S1 = np.concatenate([[0], np.cumsum(self._length_S)])
        self._offset_S1 = torch.from_numpy(offset_S1).to(device)
        self._sampled_N = self._sampled_indices()
        self._logp_rollout_N = self._column([s.rollout.logp_rollout_T for s in samples])
        self._logp_recomputed_N = self._column_of_all([s.logp_recomputed_T for s in samples])
        self._logp_average_N = self._column_of_all([s.logp_average_T for s in samples])
        self.advantage_N = self._at_tokens([s.advantage for s in samples])
        self._scale_N = self._at_tokens(scale_S)
        self.query_ids_NK = self._query_ids()
        self.logp_pass: LogpPass | None = None
        self.batch_values: Mapping[Rule, BatchValues] = {}
        self._coefficient_N: Tensor | None = None

    def select_sampled(self, column_T: Tensor) -> Tensor:
        """The rows of a column that belong to sampled tokens."""
        # An environment's tokens are dropped before the head, so columns from here on are `_N`.
        # Reduce a rollout's own column through `rollout.of_sampled`, or their NaN spreads.
        return column_T if self._sampled_N is None else column_T[self._sampled_N]

    @property
    def logp_at_topk_NK(self) -> Tensor | None:
        """log π of the engine's top K; None before the log-prob pass, or if no rule needs it."""
        if self.logp_pass is None or not self._algorithm.needs_top_k:
            return None
        return self.logp_pass.logp_at_ids_NK

    def policies(self) -> Policies:
        """The policies at the log-prob pass, with its entropy, and each response's batch and
        group.
        """
        assert self.logp_pass is not None
        policies = self._policies_of(
            self.logp_pass.logp_N, slice(None), self._offset_S1, self._top_k()
        )
        return replace(policies, entropy_T=self.logp_pass.entropy_N, batches=self._batches())

    def compute(self) -> None:
        """Compute every coefficient from the log-prob pass."""
        self._coefficient_N = self._scaled_coefficients(self.policies(), slice(None))

    def of_tile(self, tile: slice, logp_N: Tensor) -> Tensor:
        """The coefficients of a tile of tokens, times their response's factor in the aggregation.

        Without a log-prob pass they follow from this log π of the tile alone.
        """
        if self._coefficient_N is not None:
            return self._coefficient_N[tile]
        # A rule on single tokens does not look where responses end.
        one_response_S1 = torch.tensor([0, len(logp_N)], device=self._device)
        return self._scaled_coefficients(self._policies_of(logp_N, tile, one_response_S1), tile)

    def split_by_response(self, column_N: Tensor) -> list[np.ndarray]:
        """A column of the sampled tokens as one array `_T` per response; NaN (not measured) at an
        environment's tokens.
        """
        columns = []
        parts_N = column_N.detach().cpu().split(self._length_S.tolist())
        for sample, part_N in zip(self._samples, parts_N, strict=True):
            columns.append(_expand(sample.rollout, part_N.numpy()))
        return columns

    def _scaled_coefficients(self, policies: Policies, tile: slice) -> Tensor:
        coefficient_N: Tensor = coefficient_T(self._algorithm, policies, self.advantage_N[tile])
        return coefficient_N * self._scale_N[tile]

    def _policies_of(
        self, logp_N: Tensor, tile: slice, offset_S1: Tensor, top_k: TopKLogProbs | None = None
    ) -> Policies:
        # At the weights that sampled, log π is also the recomputed one.
        recomputed_N = logp_N
        if self._logp_recomputed_N is not None:
            recomputed_N = self._logp_recomputed_N[tile]
        average_N = None
        if self._logp_average_N is not None:
            average_N = self._logp_average_N[tile]
        return Policies(
            self._logp_rollout_N[tile], logp_N, recomputed_N, offset_S1, top_k, average=average_N
        )

    def _top_k(self) -> TopKLogProbs | None:
        """The log-probs of all policies at the engine's top K, if a rule needs them."""
        logp_trainer_NK = self.logp_at_topk_NK
        if logp_trainer_NK is None:
            return None
        k = self._algorithm.needs_top_k
        ids_N = self._column(
            [np.array(s.rollout.response_ids, dtype=np.int64) for s in self._samples]
        )
        rollout_NK = self._column(
            [_first_columns(s.rollout.topk_logp_rollout_TK, k) for s in self._samples]
        )
        recomputed = [s.topk_logp_recomputed_TK for s in self._samples]
        recomputed_NK = logp_trainer_NK
        if all(logp_TK is not None for logp_TK in recomputed):
            recomputed_NK = self._column([_first_columns(logp_TK, k) for logp_TK in recomputed])
        return TopKLogProbs(ids_N, self.query_ids_NK, rollout_NK, logp_trainer_NK, recomputed_NK)

    def _query_ids(self) -> Tensor:
        """The engine's top ids at each token, as many as the algorithm needs."""
        k = self._algorithm.needs_top_k
        if not k:
            shape = (len(self._logp_rollout_N), 0)
            return torch.zeros(shape, dtype=torch.int64, device=self._device)
        topk_ids = []
        for sample in self._samples:
            ids_TK = sample.rollout.topk_ids_TK
            if ids_TK is None or ids_TK.shape[1] < k:
                raise MismatchError(
                    f"{self._algorithm.name} needs the engine's top {k} log-probs. Sample with "
                    f"top_logprobs = {k}."
                )
            topk_ids.append(ids_TK[:, :k])
        return self._column(topk_ids).long()

    def _batches(self) -> Batches:
        """The batch and the group of each response, with what rules computed for them."""

        def token_places() -> tuple[np.ndarray, np.ndarray]:
            response_N = np.repeat(np.arange(len(self._length_S)), self._length_S)
            position_N = np.concatenate([_sampled_positions(s.rollout) for s in self._samples])
            return response_N, position_N

        keys = np.array([s.row_key for s in self._samples], dtype=np.int64)
        return Batches.of_rows(RowKey(*keys.T), token_places).with_values(self.batch_values)

    def _sampled_indices(self) -> Tensor | None:
        """The indices of the sampled tokens among all tokens; None if all were sampled."""
        rollouts = [s.rollout for s in self._samples]
        if all(rollout.sampled_T is None for rollout in rollouts):
            return None
        indices = []
        start = 0
        for rollout in rollouts:
            indices.append(start + _sampled_positions(rollout))
            start += len(rollout.response_ids)
        return self._put(indices)

    def _column_of_all(self, parts: Sequence[np.ndarray | None]) -> Tensor | None:
        """A column of the sampled tokens, if every response has it."""
        if any(part_T is None for part_T in parts):
            return None
        return self._column(parts)  # type: ignore[arg-type]

    def _column(self, parts: Sequence[np.ndarray]) -> Tensor:
        """A column of the sampled tokens of all responses, from one of all tokens of each."""
        return self._put(
            [s.rollout.of_sampled(part_T) for s, part_T in zip(self._samples, parts, strict=True)]
        )

    def _at_tokens(self, values_S: Sequence[float] | np.ndarray) -> Tensor:
        """Numbers of responses, float32, at each of their sampled tokens."""
        return self._put([np.repeat(values_S, self._length_S).astype(np.float32)])

    def _put(self, parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._device)


def _first_columns(values_TK: np.ndarray | None, k: int) -> np.ndarray:
    assert values_TK is not None
    return values_TK[:, :k]


def _sampled_positions(rollout: Rollout) -> np.ndarray:
    """The positions in a response of the tokens that the engine sampled."""
    return rollout.of_sampled(np.arange(len(rollout.response_ids)))


def _expand(rollout: Rollout, values_N: np.ndarray) -> np.ndarray:
    """Values of the sampled tokens as values of every token, NaN at the others."""
    if rollout.sampled_T is None:
        return values_N
    shape = (len(rollout.response_ids), *values_N.shape[1:])
    values_T = np.full(shape, np.nan, dtype=values_N.dtype)
    values_T[rollout.sampled_T] = values_N
    return values_T
