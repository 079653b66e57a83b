"""The gap between two policies, token by token: computed once for a slice of a batch, read by every
accumulator.

Suffixes: `_N` are the counted tokens of the slice, laid flat; `_S` its responses. A token counts if
it is in the loss mask and both policies were measured (NaN = not measured). A counted token that
the current policy excludes (log π = −inf) is out of support: it enters Δp as −μ and the ratio as 0,
and is left out of everything computed from d = log π − log μ, where its columns hold the neutral 0.

The ratio is float32, exp of the float32 difference, as a trust region sees it: it decides shares
and thresholds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from mismatch_cli.base.arrays import Segments
from mismatch_cli.base.hashing import hash_keys, mix, prompt_groups
from mismatch_cli.metrics.pairs import Pair
from mismatch_cli.rules import divergences
from mismatch_cli.rules.batch import TokenBatch

# Long enough to hide the cost of hundreds of calls; costly formulas use blocks that fit the cache
CHUNK_TOKENS = 2**17


def token_gaps(
    batch: TokenBatch, pair: Pair, max_tokens: int = CHUNK_TOKENS, required: Sequence[str] = ()
) -> Iterator[TokenGaps]:
    """Slices of complete responses with about `max_tokens` measured tokens (more if one response is
    longer).

    A token that lacks one of the `required` columns of the batch does not count.
    """
    measured_S1 = _measured_before(batch, pair)
    measured = int(measured_S1[-1])
    # Equal lengths: a short slice costs as much
    max_tokens = -(-measured // max(1, round(measured / max_tokens)))
    first = 0
    while first < batch.num_responses:
        last = int(np.searchsorted(measured_S1, measured_S1[first] + max_tokens, side="right")) - 1
        last = max(last, first + 1)
        yield TokenGaps(batch, pair, first, last, required)
        first = last


def turns_begin(mask_T: np.ndarray, offset_S1: np.ndarray) -> np.ndarray:
    """Whether a turn, a run of a response's tokens in the loss mask, begins at each token: bool."""
    begins_T = mask_T.copy()
    begins_T[1:] &= ~mask_T[:-1]
    first = offset_S1[:-1][np.diff(offset_S1) > 0]
    begins_T[first] = mask_T[first]
    return begins_T


def _measured_before(batch: TokenBatch, pair: Pair) -> np.ndarray:
    """How many tokens with a measured current policy precede each response."""
    offset_S1, current_T = batch.offset_S1, getattr(batch, pair.current)
    if not np.isnan(np.sum(current_T)):  # a single NaN makes the sum NaN
        return offset_S1
    measured_S = Segments(offset_S1).sum(~np.isnan(current_T))
    return np.concatenate([[0], np.cumsum(measured_S)])


class TokenGaps:
    """Responses `first : last` of a batch, as the gap between the two policies of `pair`."""

    def __init__(
        self, batch: TokenBatch, pair: Pair, first: int, last: int, required: Sequence[str] = ()
    ) -> None:
        self.batch, self.pair, self.first, self.last = batch, pair, first, last
        response_offset_S1 = batch.offset_S1[first : last + 1]
        self._tokens = slice(int(response_offset_S1[0]), int(response_offset_S1[-1]))
        self.response_offset_S1 = response_offset_S1 - response_offset_S1[0]
        logq_T, logp_T = (
            getattr(batch, name)[self._tokens] for name in (pair.reference, pair.current)
        )
        mask_T, lacking_T = batch.loss_mask_T[self._tokens], self._lacking(required)
        self.num_masked, self.num_not_measured = 0, 0
        # Indices of the counted tokens within the slice; None = all
        self.kept: np.ndarray | None = None
        self.out_of_support_N: np.ndarray | None = None  # bool; None = none
        with np.errstate(invalid="ignore"):  # −inf − (−inf)
            simple = mask_T.all() and np.isfinite(logp_T - logq_T).all() and lacking_T is None
        if not simple:
            measured_T = np.isfinite(logq_T) & ~np.isnan(logp_T)
            if lacking_T is not None:
                measured_T &= ~lacking_T
            self.kept = np.flatnonzero(mask_T & measured_T)
            self.num_masked = int(len(mask_T) - np.count_nonzero(mask_T))
            self.num_not_measured = int(len(mask_T) - self.num_masked - len(self.kept))
        self.logq_N, self.logp_N = self._take(logq_T), self._take(logp_T)
        if not simple and (outside_N := self.logp_N == -np.inf).any():
            self.out_of_support_N = outside_N

    def _lacking(self, required: Sequence[str]) -> np.ndarray | None:
        """Whether a token lacks a value in one of these columns; None if no token does."""
        lacking_T = None
        for name in required:
            column_T = getattr(self.batch, name)[self._tokens]
            missing_T = np.isnan(column_T if column_T.ndim == 1 else column_T[:, 0])
            if missing_T.any():
                lacking_T = missing_T if lacking_T is None else lacking_T | missing_T
        return lacking_T

    def _take(self, column_T: np.ndarray) -> np.ndarray:
        # Never `x * mask` before a minimum, a maximum or a standard deviation:
        # tokens that do not count would enter as 0. They are left out instead.
        return column_T if self.kept is None else column_T.take(self.kept, axis=0)

    def counted_before(self, position: np.ndarray) -> np.ndarray:
        """How many counted tokens precede each position of the slice."""
        return position if self.kept is None else np.searchsorted(self.kept, position)

    @property
    def index_N(self) -> np.ndarray:
        """The indices of the counted tokens in the batch."""
        return self._tokens.start + (
            np.arange(len(self.logq_N)) if self.kept is None else self.kept
        )

    @cached_property
    def offset_S1(self) -> np.ndarray:
        """Where each response's counted tokens begin and end."""
        return self.counted_before(self.response_offset_S1)

    @cached_property
    def group_S(self) -> np.ndarray:
        """The prompt group of each response, one of `GROUPS`."""
        return prompt_groups(self.batch.prompt_id_S[self.first : self.last])

    @cached_property
    def responses(self) -> Segments:
        """The counted tokens, cut by response."""
        return Segments(self.offset_S1)

    @cached_property
    def later_turns(self) -> np.ndarray:
        """Where in the slice turns (runs in the loss mask) begin, except for the first of each
        response.
        """
        if not self.num_masked:
            return np.zeros(0, dtype=np.int64)
        offset_S1 = self.response_offset_S1
        begin = np.flatnonzero(turns_begin(self.batch.loss_mask_T[self._tokens], offset_S1))
        response = np.searchsorted(offset_S1, begin, side="right")
        return begin[1:][response[1:] == response[:-1]]

    def column(self, name: str) -> np.ndarray | None:
        """Another column of the batch at the counted tokens; None if it was not measured."""
        column = getattr(self.batch, name)
        return None if column is None else self._take(column[self._tokens])

    def token_ids_at(self, index: np.ndarray) -> np.ndarray | None:
        """The token ids at positions within the slice; None if the trace has none."""
        ids_T = self.batch.response_ids_T
        return None if ids_T is None else ids_T[self._tokens][index]

    def per_token(self, values_S: np.ndarray) -> np.ndarray:
        """A value per response, repeated for its counted tokens."""
        return np.repeat(values_S, self.responses.length_S)

    @cached_property
    def response_hash_S(self) -> np.ndarray:
        """hash(prompt_id, sample_index, step) of each response of the slice, uint64."""
        keys = (self.batch.prompt_id_S, self.batch.sample_index_S, self.batch.step_S)
        return hash_keys(*(key[self.first : self.last] for key in keys))

    @cached_property
    def token_hash_N(self) -> np.ndarray:
        """A hash of response and position, uint64: splitmix64 at counter `position`, one mixing
        round per token.
        """
        position_N = (
            np.arange(self.response_offset_S1[-1], dtype=np.uint64)
            if self.kept is None
            else self.kept
        )
        start_N = self.per_token(
            self.response_hash_S - self.response_offset_S1[:-1].astype(np.uint64)
        )
        return mix(start_N + position_N.astype(np.uint64))

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Each counted token's response within the slice, and its position among all tokens of
        that response.
        """
        response_N = self.per_token(np.arange(self.last - self.first))
        place_N = np.arange(self.response_offset_S1[-1]) if self.kept is None else self.kept
        return response_N, place_N - self.response_offset_S1[:-1][response_N]

    def place_of(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same of the counted tokens at `index`."""
        response = np.searchsorted(self.offset_S1, index, side="right") - 1
        in_slice = index if self.kept is None else self.kept[index]
        return response, in_slice - self.response_offset_S1[response]

    @cached_property
    def d_N(self) -> np.ndarray:
        """d = log π − log μ, in nats; 0 out of support."""
        d_N = self.logp_N - self.logq_N
        if self.out_of_support_N is not None:
            d_N[self.out_of_support_N] = 0
        return d_N

    @cached_property
    def abs_d_N(self) -> np.ndarray:
        return np.abs(self.d_N)

    @cached_property
    def q_N(self) -> np.ndarray:
        """μ."""
        return np.exp(self.logq_N)

    @cached_property
    def dp_N(self) -> np.ndarray:
        """π − μ; −μ out of support."""
        dp_N = self._sampled.difference_T
        if self.out_of_support_N is not None:
            dp_N[self.out_of_support_N] = -self.q_N[self.out_of_support_N]
        return dp_N

    @cached_property
    def abs_dp_N(self) -> np.ndarray:
        """Binary TV."""
        return np.abs(self.dp_N)

    @cached_property
    def ratio_N(self) -> np.ndarray:
        """r = π / μ in float32; 0 out of support, infinite where d > 88."""
        with np.errstate(over="ignore"):
            ratio_N = np.exp(self.d_N)
        if self.out_of_support_N is not None:
            ratio_N[self.out_of_support_N] = 0
        return ratio_N

    @cached_property
    def ratio_less_1_N(self) -> np.ndarray:
        """r − 1 without cancellation; −1 out of support."""
        with np.errstate(over="ignore"):
            less_1_N = np.expm1(self.d_N)
        if self.out_of_support_N is not None:
            less_1_N[self.out_of_support_N] = -1
        return less_1_N

    @property
    def k3_N(self) -> np.ndarray:
        """φ(d) = r − 1 − d; 0 out of support."""
        return self._sampled.k3_T

    @property
    def binary_kl_N(self) -> np.ndarray:
        """Binary KL(μ‖π), in nats; 0 out of support."""
        return self._sampled.binary_kl_T

    @property
    def log_odds_gap_N(self) -> np.ndarray:
        """log(π/(1 − π)) − log(μ/(1 − μ)), in nats; 0 out of support."""
        return self._sampled.log_odds_gap_T

    @cached_property
    def _sampled(self) -> divergences.SampledToken:
        logp_N = self.logp_N
        if self.out_of_support_N is not None:
            logp_N = np.where(self.out_of_support_N, self.logq_N, logp_N)
        return divergences.compare_sampled_token(self.logq_N, logp_N)

    @cached_property
    def length_and_d_sum(self) -> tuple[np.ndarray, np.ndarray]:
        """Per response: the counted tokens in support, and Σd over them in float64."""
        length_S = self.responses.length_S
        if self.out_of_support_N is not None:
            length_S = length_S - self.responses.sum(self.out_of_support_N).astype(np.int64)
        return length_S, self.responses.sum(self.d_N)

    @cached_property
    def topk(self) -> TopK | None:
        """TV and KL over the top-K partition; None if it was not measured."""
        if not self.pair.topk_measured_in(self.batch):
            return None
        names = ("topk_ids_TK", self.pair.topk_reference, self.pair.topk_current)
        ids_NK, logq_NK, logp_NK = (self.column(name) for name in names)  # type: ignore[arg-type]
        in_topk_N = divergences.sampled_in_topk(self.column("response_ids_T"), ids_NK)
        found = divergences.topk_divergences(self.logq_N, self.logp_N, logq_NK, logp_NK, in_topk_N)
        return TopK(*found, logq_NK, logp_NK)  # type: ignore[arg-type]


class TopK:
    """Top-K divergences of the counted tokens, and the mass of the K; missing values hold 0 and
    do not count.
    """

    def __init__(
        self, tv_N: np.ndarray, kl_N: np.ndarray, logq_NK: np.ndarray, logp_NK: np.ndarray
    ) -> None:
        self.tv_counts_N = _unless_all(~np.isnan(tv_N))
        self.kl_counts_N = _unless_all(np.isfinite(kl_N))  # infinite if π excludes a top-K token
        self.tv_N = (
            tv_N if self.tv_counts_N is None else np.where(self.tv_counts_N, tv_N, np.float32(0))
        )
        self.kl_N = (
            kl_N if self.kl_counts_N is None else np.where(self.kl_counts_N, kl_N, np.float32(0))
        )
        # Rounding may exceed 1
        masses = (np.minimum(np.exp(logp_NK).sum(axis=1), 1) for logp_NK in (logq_NK, logp_NK))
        # Counted if TV is: both sides have the K, so their masses are of the same tokens.
        self.mass_reference_N, self.mass_current_N = (
            mass_N
            if self.tv_counts_N is None
            else np.where(self.tv_counts_N, mass_N, np.float32(0))
            for mass_N in masses
        )


def _unless_all(flags_N: np.ndarray) -> np.ndarray | None:
    return None if flags_N.all() else flags_N
