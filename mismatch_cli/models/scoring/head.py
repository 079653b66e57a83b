"""The LM head in token × vocabulary tiles: log-probs, entropy and rank from hidden states, never
sequence × vocabulary.

Every value of a token comes from the logits of one matrix product in the head's own dtype, so a
bfloat16 head shows the grid of its rounded logits; everything after the logits is float32 in the
tile and float64 in the per-token sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.rules.divergences import full_kl, full_tv

# Tokens × vocabulary. On a CPU two float32 tiles of this size fit the shared cache
# (lab/scoring.py measures it); a GPU prefers fewer, larger products because every tile costs
# a dozen kernel launches.
_CPU_TILE = (1024, 2048)
_GPU_TILE = (2048, 16384)
_FULL_ROWS = 64  # tokens per product where full rows are needed
_PROCESSED_ROWS = 4  # rows per sort of the sampler, which needs a dozen copies of a row
_FEW_ROWS = 16  # up to here BLAS picks kernels that round differently from tile to tile


@dataclass(frozen=True)
class Head:
    """An LM head: `logits = softcap · tanh(multiplier · (h Wᵀ + b) / divisor / softcap)`, each step
    in the dtype of W.

    Granite divides, Cohere multiplies, Gemma caps; a step at its default is skipped.
    """

    weight_VH: Tensor
    bias_V: Tensor | None = None
    divisor: float = 1.0
    multiplier: float = 1.0
    softcap: float | None = None

    @property
    def vocabulary(self) -> int:
        return self.weight_VH.shape[0]

    def float32(self) -> Head:
        """The same head with a float32 copy of its weights."""
        return self._with(lambda weights: weights.float())

    def rows(self, ids: Tensor | slice) -> Head:
        """The head for only these vocabulary entries."""
        return self._with(lambda weights: weights[ids])

    def _with(self, changed: Callable[[Tensor], Tensor]) -> Head:
        bias_V = None if self.bias_V is None else changed(self.bias_V)
        return replace(self, weight_VH=changed(self.weight_VH), bias_V=bias_V)

    def logits(self, hidden_TH: Tensor, out: Tensor | None = None) -> Tensor:
        """The logits `[T, V]` in the head's dtype, as `nn.Linear` and the model's own transforms
        round them.
        """
        if self.bias_V is None:
            logits_TV = torch.mm(hidden_TH, self.weight_VH.T, out=out)
        else:
            logits_TV = torch.addmm(self.bias_V, hidden_TH, self.weight_VH.T, out=out)
        if self.divisor != 1:
            logits_TV.div_(self.divisor)
        if self.multiplier != 1:
            logits_TV.mul_(self.multiplier)
        if self.softcap is not None:
            logits_TV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_TV


class HeadScores(NamedTuple):
    """The head's results for T tokens, in nats.

    `rank_T` is 1 + the number of tokens with a strictly greater logit: 1 = most probable, and
    tokens that share a logit share the better rank.
    """

    logp_T: Tensor  # float32
    entropy_T: Tensor  # float32
    rank_T: Tensor  # int32
    logp_at_ids_TK: Tensor  # float32
    tv_full_T: Tensor  # float32, full-vocabulary TV from the rollout; NaN where that is unknown
    kl_full_T: Tensor  # float32, KL(μ‖π)


@torch.inference_mode()
def score_hidden(
    hidden_TH: Tensor,
    head: Head,
    target_ids_T: Tensor,
    query_ids_TK: Tensor,
    sampling: SamplingSettings,
    tile: tuple[int, int] | None = None,
    rollout: RolloutRows | None = None,
) -> HeadScores:
    """Score tokens from the hidden states that predict them: log π, entropy, rank, and log π at K
    given ids per token.

    Where `rollout` has the full log μ of a token, also the full TV and KL: once log Σ exp is known,
    the tiles are computed a second time, to the bit.

    log π = z_y − log Σ_v exp z_v with z the sampler's logits (temperature, then its support; -inf
    outside). The sum runs over all tokens but y, by an online log-sum-exp, and log π = −log(1 +
    exp(lse_rest − z_y)), which is precise even where π(y) is nearly 1. Ids must be in the head's
    vocabulary.
    """
    hidden_TH = hidden_TH.to(head.weight_VH)
    if tile is None:
        tile = _CPU_TILE if hidden_TH.device.type == "cpu" else _GPU_TILE
    rows, width = tile
    rollout = rollout or RolloutRows()
    ids_TQ = torch.cat([target_ids_T[:, None], query_ids_TK], dim=1)
    ids_TQ = ids_TQ.to(hidden_TH.device, torch.int64)
    parts = []
    blocks = zip(hidden_TH.split(rows), ids_TQ.split(rows), strict=True)
    for block, (rows_TH, rows_TQ) in enumerate(blocks):
        own_rollout = rollout.at(range(block * rows, (block + 1) * rows))
        parts.append(_score_rows(rows_TH, head, rows_TQ, sampling, width, own_rollout))
    return _concatenate(parts)


def _concatenate(parts: Sequence[HeadScores]) -> HeadScores:
    return HeadScores(*map(torch.cat, zip(*parts, strict=True)))


def _score_rows(
    hidden_TH: Tensor,
    head: Head,
    ids_TQ: Tensor,
    sampling: SamplingSettings,
    width: int,
    rollout: RolloutRows,
) -> HeadScores:
    if sampling.truncates or len(hidden_TH) <= _FEW_ROWS:
        return score_full_rows(hidden_TH, head, ids_TQ, sampling, rollout)
    scores, redo_T = _score_tiles(hidden_TH, head, ids_TQ, sampling, width, rollout)
    if redo_T.any():
        redo_rows = rollout.at(redo_T.nonzero()[:, 0].tolist())
        redone = score_full_rows(hidden_TH[redo_T], head, ids_TQ[redo_T], sampling, redo_rows)
        for column, values in zip(scores, redone, strict=True):
            column[redo_T] = values
    return scores


def _score_tiles(
    hidden_TH: Tensor,
    head: Head,
    ids_TQ: Tensor,
    sampling: SamplingSettings,
    width: int,
    rollout: RolloutRows,
) -> tuple[HeadScores, Tensor]:
    """Score without full rows; also returns which tokens need their full row after all.

    Ranks are counted tile by tile, so the target's logit is needed before its tile: a small product
    of the same tokens gives it, on a CPU almost always to the bit. If it differs, the caller
    computes the full row; if it differs for many, the tiles are first computed again, to the bit.
    """
    expected_T = sampler_logits(head.rows(ids_TQ[:, 0]).logits(hidden_TH).diagonal(), sampling)
    running = RunningRows(ids_TQ, expected_T)
    running.update_all(tiles_of(hidden_TH, head, sampling, width))
    if (running.target_T != expected_T).sum() > _FULL_ROWS:  # on a GPU these can be all tokens
        expected_T = running.target_T
        running = RunningRows(ids_TQ, expected_T)
        running.update_all(tiles_of(hidden_TH, head, sampling, width))
    full = FullDivergence(rollout, running.log_sum_exp_T)
    if rollout:
        for start, z_TN, _ in tiles_of(hidden_TH, head, sampling, width):
            full.update(z_TN, start)
    return _scores(running, full), running.target_T != expected_T


def tiles_of(
    hidden_TH: Tensor, head: Head, sampling: SamplingSettings, width: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """First column, the sampler's logits and scratch space of each tile, in buffers that the
    next tile overwrites.
    """
    size = len(hidden_TH) * min(width, head.vocabulary)
    product = hidden_TH.new_empty(size)
    scratch = hidden_TH.new_empty(size, dtype=torch.float32)
    z = product if product.dtype == torch.float32 else torch.empty_like(scratch)
    for start in range(0, head.vocabulary, width):
        columns = head.rows(slice(start, start + width))
        shape = len(hidden_TH), columns.vocabulary
        logits_TN = columns.logits(hidden_TH, out=_view(product, shape))
        z_TN = sampler_logits(logits_TN, sampling, out=_view(z, shape))
        yield start, z_TN, _view(scratch, shape)


def _scores(running: RunningRows, full: FullDivergence) -> HeadScores:
    return HeadScores(*running.finish(), full.tv_T.float(), full.kl_T.float())


def _view(buffer: Tensor, shape: tuple[int, int]) -> Tensor:
    return buffer[: shape[0] * shape[1]].view(shape)


def sampler_logits(logits: Tensor, sampling: SamplingSettings, out: Tensor | None = None) -> Tensor:
    """The logits in float32, divided by the temperature, in place or in `out`."""
    z = logits
    if logits.dtype != torch.float32:
        z = logits.float() if out is None else out.copy_(logits)
    return z if sampling.temperature == 1 else z.div_(sampling.temperature)


def score_full_rows(
    hidden_TH: Tensor, head: Head, ids_TQ: Tensor, sampling: SamplingSettings, rollout: RolloutRows
) -> HeadScores:
    """Score rows through all their logits, as truncation and few rows require."""
    parts = []
    first = 0
    for rows_TH, rows_TQ in zip(hidden_TH.split(_FULL_ROWS), ids_TQ.split(_FULL_ROWS), strict=True):
        logits_TV = head.logits(rows_TH)
        for some_TV, some_TQ in zip(
            logits_TV.split(_PROCESSED_ROWS), rows_TQ.split(_PROCESSED_ROWS), strict=True
        ):
            z_TV = sampling.process(some_TV)
            own_rollout = rollout.at(range(first, first + len(z_TV)))
            running = RunningRows(some_TQ, z_TV.gather(1, some_TQ[:, :1])[:, 0])
            # `update` overwrites the logits, which the divergences need afterwards.
            running.update(z_TV.clone() if own_rollout else z_TV, torch.empty_like(z_TV), 0)
            full = FullDivergence(own_rollout, running.log_sum_exp_T)
            if own_rollout:
                full.update(z_TV, 0)
            parts.append(_scores(running, full))
            first += len(z_TV)
    return _concatenate(parts)


# A logit of -inf: its probability is 0, and unlike with -inf their product is 0 as well
_NEVER = -1e30


class RunningRows:
    """Online statistics of T rows; column 0 of `ids_TQ` is the target, the others are the query
    ids.

    The sums run over every token but the target, relative to the largest logit so far: 1 − π of the
    target then has float32's *relative* precision, and log π near 0 does not vanish in 1 + ε.
    """

    def __init__(self, ids_TQ: Tensor, expected_target_T: Tensor) -> None:
        self._ids_TQ = ids_TQ
        self._expected_T1 = expected_target_T[:, None]  # ranks are counted against this
        self._z_TQ = torch.full(ids_TQ.shape, torch.nan, device=ids_TQ.device)
        self._max_T1 = torch.full_like(self._expected_T1, _NEVER)
        # Apple GPUs have no float64.
        sums = torch.float32 if ids_TQ.device.type == "mps" else torch.float64
        self._sum_T = torch.zeros(len(ids_TQ), dtype=sums, device=ids_TQ.device)  # Σ exp(z − max)
        self._weighted_T = torch.zeros_like(self._sum_T)  # Σ (z − max) exp(z − max)
        self._greater_T = torch.zeros_like(self._sum_T)

    @property
    def target_T(self) -> Tensor:
        """The target's logit as computed in its tile."""
        return self._z_TQ[:, 0]

    @property
    def log_sum_exp_T(self) -> Tensor:
        """log Σ exp z over all columns so far, including the target's."""
        z_T = self.target_T.to(self._sum_T.dtype)
        max_T = self._max_T1[:, 0].to(self._sum_T.dtype)
        return torch.logaddexp(z_T, max_T + self._sum_T.log())

    def update(self, z_TN: Tensor, scratch_TN: Tensor, start: int) -> None:
        """Add the columns `start … start + N` of the sampler's logits; overwrites both tensors."""
        # A float count: exact to 2^24
        self._greater_T += torch.gt(z_TN, self._expected_T1, out=scratch_TN).sum(dim=1)
        self._keep_ids(z_TN, start)
        self._rescale(z_TN.amax(dim=1, keepdim=True))
        z_TN.sub_(self._max_T1).clamp_(min=_NEVER)
        self._sum_T += torch.exp(z_TN, out=scratch_TN).sum(dim=1)
        self._weighted_T += scratch_TN.mul_(z_TN).sum(dim=1)

    def update_all(self, tiles: Iterable[tuple[int, Tensor, Tensor]]) -> None:
        """Add tile after tile: first column, logits and scratch space."""
        for start, z_TN, scratch_TN in tiles:
            self.update(z_TN, scratch_TN, start)

    def _keep_ids(self, z_TN: Tensor, start: int) -> None:
        """Keep the logits of the ids in this tile, and remove the target's from it."""
        width = z_TN.shape[1]
        local_TQ = self._ids_TQ - start
        inside_TQ = (local_TQ >= 0) & (local_TQ < width)
        local_TQ = local_TQ.clamp(0, width - 1)
        # Gathered from the tile: in bfloat16, a separate dot product rounds differently.
        # The log-prob would be that of a different logit, by up to 0.25 nats.
        logit_TQ = z_TN.gather(1, local_TQ)
        self._z_TQ = torch.where(inside_TQ, logit_TQ, self._z_TQ)
        z_TN.scatter_(1, local_TQ[:, :1], torch.where(inside_TQ[:, :1], _NEVER, logit_TQ[:, :1]))

    def _rescale(self, tile_max_T1: Tensor) -> None:
        max_T1 = torch.maximum(self._max_T1, tile_max_T1)
        shift_T = (self._max_T1 - max_T1)[:, 0].to(self._sum_T.dtype)
        factor_T = shift_T.exp()
        self._weighted_T = factor_T * (self._weighted_T + shift_T * self._sum_T)
        self._sum_T = factor_T * self._sum_T
        self._max_T1 = max_T1

    def finish(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """log π of the targets, entropy, rank, and log π at the query ids."""
        z_TQ = self._z_TQ.to(self._sum_T.dtype)
        z_T = z_TQ[:, 0]
        max_T = self._max_T1[:, 0].to(self._sum_T.dtype)
        logp_T = logsigmoid(z_T - max_T - self._sum_T.log())
        # The other numbers need the target in the sums again, relative to the largest logit of all.
        top_T = torch.maximum(max_T, z_T)
        others_T = (max_T - top_T).exp()
        target_T = (z_T - top_T).exp()
        sum_T = others_T * self._sum_T + target_T
        weighted_T = others_T * (self._weighted_T + (max_T - top_T) * self._sum_T)
        weighted_T += target_T * (z_T - top_T).clamp(min=_NEVER)
        entropy_T = sum_T.log() - weighted_T / sum_T
        logp_TQ = z_TQ - top_T[:, None] - sum_T.log()[:, None]
        logp_TQ = torch.where(self._ids_TQ == self._ids_TQ[:, :1], logp_T[:, None], logp_TQ)
        rank_T = self._greater_T + 1
        return logp_T.float(), entropy_T.float(), rank_T.int(), logp_TQ[:, 1:].float()


_ROWS = 64  # tokens of a tile at a time: the divergences need a dozen copies in float64


class RolloutRows:
    """log μ over the full vocabulary for some of T tokens: rows on disk, read tile by tile."""

    def __init__(self, rows: dict[int, np.ndarray] | None = None) -> None:
        self._rows = rows or {}  # token → log μ, float32 [V]

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def tokens(self) -> list[int]:
        return list(self._rows)

    def at(self, tokens: Iterable[int]) -> RolloutRows:
        """The rows of these tokens, renumbered from 0."""
        rows = {}
        for new, old in enumerate(tokens):
            if old in self._rows:
                rows[new] = self._rows[old]
        return RolloutRows(rows)

    def tile(self, tokens: list[int], start: int, width: int) -> Tensor:
        """log μ `[U, width]` of the columns from `start`; −inf beyond the engine's vocabulary."""
        columns = slice(start, start + width)
        tile_UN = torch.from_numpy(np.stack([self._rows[token][columns] for token in tokens]))
        return pad(tile_UN, (0, width - tile_UN.shape[1]), value=-torch.inf)


class FullDivergence:
    """Running TV and KL(μ‖π), in nats, of T tokens; NaN where the full μ is unknown."""

    def __init__(self, rollout: RolloutRows, log_sum_exp_T: Tensor) -> None:
        self._rollout = rollout
        self._log_sum_exp_T = log_sum_exp_T
        self.tv_T = torch.full_like(log_sum_exp_T, torch.nan)
        self.kl_T = self.tv_T.clone()
        for sums_T in (self.tv_T, self.kl_T):
            sums_T[rollout.tokens] = 0

    def update(self, z_TN: Tensor, start: int) -> None:
        """Add the columns `start … start + N` of the sampler's logits: log π is z − log Σ exp z."""
        tokens = self._rollout.tokens
        for first in range(0, len(tokens), _ROWS):
            rows = tokens[first : first + _ROWS]
            logp_UN = z_TN[rows].to(self.tv_T.dtype) - self._log_sum_exp_T[rows, None]
            mu_UN = self._rollout.tile(rows, start, z_TN.shape[1]).to(logp_UN)
            self.tv_T[rows] += full_tv(mu_UN, logp_UN)
            self.kl_T[rows] += full_kl(mu_UN, logp_UN)
