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

# Long enough to hide the cost of hundreds of calls.
# Costly formulas cut a slice once more, into blocks that fit the cache.
CHUNK_TOKENS = 2**17


def token_gaps(
    batch: TokenBatch, pair: Pair, max_tokens: int = CHUNK_TOKENS, required: Sequence[str] = ()
) -> Iterator[TokenGaps]:
    """Slices of complete responses with about `max_tokens` measured tokens (more if one response is
    longer).

    A token that lacks one of the `required` columns of the batch does not count.
    """
    measured_S1 = _measured_before(batch, pair)
    total = int(measured_S1[-1])
    # A short slice costs as much as a long one, so all have nearly the same length.
    slices = max(1, round(total / max_tokens))
    max_tokens = -(-total // slices)
    first = 0
    while first < batch.num_responses:
        end = measured_S1[first] + max_tokens
        last = max(int(np.searchsorted(measured_S1, end, side="right")) - 1, first + 1)
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
    logp_T = getattr(batch, pair.current)
    # A single NaN makes the sum NaN, and the sum needs no array of flags.
    if not np.isnan(np.sum(logp_T)):
        return batch.offset_S1
    measured_S = Segments(batch.offset_S1).sum(~np.isnan(logp_T))
    return np.concatenate([[0], np.cumsum(measured_S)])


class TokenGaps:
    """Responses `first : last` of a batch, as the gap between the two policies of `pair`."""

    def __init__(
        self, batch: TokenBatch, pair: Pair, first: int, last: int, required: Sequence[str] = ()
    ) -> None:
        self.batch, self.pair = batch, pair
        self.first, self.last = first, last
        offset_S1 = batch.offset_S1[first : last + 1]
        self.response_offset_S1 = offset_S1 - offset_S1[0]
        self._tokens = slice(int(offset_S1[0]), int(offset_S1[-1]))
        self.num_masked = 0
        self.num_not_measured = 0
        self.counted: np.ndarray | None = None  # indices within the slice; None = all
        self.out_of_support_N: np.ndarray | None = None  # bool; None = none
        self.logq_N = getattr(batch, pair.reference)[self._tokens]
        self.logp_N = getattr(batch, pair.current)[self._tokens]
        mask_T = batch.loss_mask_T[self._tokens]
        lacking_T = self._lacking(required)
        # Mostly every token counts and is in support: then d is finite, and nothing is copied.
        with np.errstate(invalid="ignore"):  # −inf − (−inf)
            all_finite = mask_T.all() and np.isfinite(self.logp_N - self.logq_N).all()
        if not all_finite or lacking_T is not None:
            self._leave_out(mask_T, lacking_T)

    def _leave_out(self, mask_T: np.ndarray, lacking_T: np.ndarray | None) -> None:
        """Reduce the columns of all tokens to those of the counted ones."""
        measured_T = np.isfinite(self.logq_N) & ~np.isnan(self.logp_N)
        if lacking_T is not None:
            measured_T &= ~lacking_T
        self.counted = np.flatnonzero(mask_T & measured_T)
        self.num_masked = int(len(mask_T) - np.count_nonzero(mask_T))
        self.num_not_measured = int(len(mask_T) - self.num_masked - len(self.counted))
        self.logq_N = self._take(self.logq_N)
        self.logp_N = self._take(self.logp_N)
        out_of_support_N = self.logp_N == -np.inf
        if out_of_support_N.any():
            self.out_of_support_N = out_of_support_N

    def _lacking(self, required: Sequence[str]) -> np.ndarray | None:
        """Whether a token lacks a value in one of these columns; None if no token does."""
        lacking_T = None
        for name in required:
            column_T = getattr(self.batch, name)[self._tokens]
            if column_T.ndim > 1:
                column_T = column_T[:, 0]  # all K are measured, or none
            missing_T = np.isnan(column_T)
            if missing_T.any():
                lacking_T = missing_T if lacking_T is None else lacking_T | missing_T
        return lacking_T

    def _take(self, column_T: np.ndarray) -> np.ndarray:
        # Never `x * mask` before a minimum, a maximum or a standard deviation:
        # tokens that do not count would enter as 0. They are left out instead.
        return column_T if self.counted is None else column_T.take(self.counted, axis=0)

    def counted_before(self, position: np.ndarray) -> np.ndarray:
        """How many counted tokens precede each position of the slice."""
        return position if self.counted is None else np.searchsorted(self.counted, position)

    @property
    def _in_slice_N(self) -> np.ndarray:
        """The indices of the counted tokens in the slice."""
        return np.arange(len(self.logq_N)) if self.counted is None else self.counted

    @property
    def index_N(self) -> np.ndarray:
        """The indices of the counted tokens in the batch."""
        return self._tokens.start + self._in_slice_N

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
        follows_a_turn = response[1:] == response[:-1]
        return begin[1:][follows_a_turn]

    def column(self, name: str) -> np.ndarray | None:
        """Another column of the batch at the counted tokens; None if it was not measured."""
        column = getattr(self.batch, name)
        return None if column is None else self._take(column[self._tokens])

    def token_ids_at(self, index: np.ndarray) -> np.ndarray | None:
        """The ids of the counted tokens at `index`; None if the trace has none."""
        ids_T = self.batch.response_ids_T
        return None if ids_T is None else ids_T[self._tokens][self._in_slice(index)]

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
        first_S = self.response_offset_S1[:-1].astype(np.uint64)
        start_N = self.per_token(self.response_hash_S - first_S)
        return mix(start_N + self._in_slice_N.astype(np.uint64))

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Each counted token's response within the slice, and its position among all tokens of
        that response.
        """
        response_N = self.per_token(np.arange(self.last - self.first))
        return response_N, self._in_slice_N - self.response_offset_S1[:-1][response_N]

    def place_of(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The responses of the counted tokens at `index` within the slice, and their positions
        among all tokens of the response.
        """
        response = self.response_of(index)
        return response, self._in_slice(index) - self.response_offset_S1[response]

    def response_of(self, index: np.ndarray) -> np.ndarray:
        """The response within the slice of the counted tokens at `index`."""
        return np.searchsorted(self.offset_S1, index, side="right") - 1

    def _in_slice(self, index: np.ndarray) -> np.ndarray:
        return index if self.counted is None else self.counted[index]

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
        tv_N, kl_N = divergences.topk_divergences(
            self.logq_N, self.logp_N, logq_NK, logp_NK, in_topk_N
        )
        return TopK(tv_N, kl_N, logq_NK, logp_NK)  # type: ignore[arg-type]


class TopK:
    """Top-K divergences of the counted tokens, and the mass of the K; missing values hold 0 and
    do not count.
    """

    def __init__(
        self, tv_N: np.ndarray, kl_N: np.ndarray, logq_NK: np.ndarray, logp_NK: np.ndarray
    ) -> None:
        self.tv_counts_N = _unless_all(~np.isnan(tv_N))
        self.kl_counts_N = _unless_all(np.isfinite(kl_N))  # infinite if π excludes a top-K token
        self.tv_N = _zero_unless(self.tv_counts_N, tv_N)
        self.kl_N = _zero_unless(self.kl_counts_N, kl_N)
        # A mass counts where TV does: there both policies have the K.
        # So the two means are over the same tokens, and can be compared.
        self.mass_reference_N = _zero_unless(self.tv_counts_N, _mass(logq_NK))
        self.mass_current_N = _zero_unless(self.tv_counts_N, _mass(logp_NK))


def flagged(values_N: np.ndarray, flags_N: np.ndarray | None) -> np.ndarray:
    """The values with a flag; None flags all of them."""
    return values_N if flags_N is None else values_N[flags_N]


def _mass(logp_NK: np.ndarray) -> np.ndarray:
    return np.minimum(np.exp(logp_NK).sum(axis=1), 1)  # rounding may exceed 1


def _unless_all(flags_N: np.ndarray) -> np.ndarray | None:
    return None if flags_N.all() else flags_N


def _zero_unless(flags_N: np.ndarray | None, values_N: np.ndarray) -> np.ndarray:
    return values_N if flags_N is None else np.where(flags_N, values_N, np.float32(0))
