"""One number of a framework's dashboard: its name there, what it is computed from, and the source
file.

Frameworks average columns over tokens, means over responses, and functions of these. Every column
is computed from `TokenGaps`: here π stands for the current policy of a line's pair and μ for its
reference. A token that π excludes (log π = −inf) has ratio 0 and Δp = −μ; it has no d, and is left
out of everything computed from d.

A response without a trained token enters means over responses as in most frameworks, with means and
sums of 0; one that was not scored does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isinf, log, nan, sqrt
from operator import attrgetter

import numpy as np

from mismatch_cli.base.arrays import Segments, silent
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.sums import TOKEN_SUMS
from mismatch_cli.rules import divergences
from mismatch_cli.rules.algorithms.algorithm import keep_T
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.policies import Policies

Quantity = Callable[[TokenGaps], np.ndarray]
Reduce = Callable[..., float]
# Where PPO's clip of 0.2 blocks.
FALLS = "A < 0 and r < 0.8"
RISES = "A > 0 and r > 1.2"
BLOCKED = f"blocked: {RISES}, or {FALLS}"
BOUND = 20.0  # nats: verl's SAFETY_BOUND, which slime's mis.py and ms-swift took over


@dataclass(frozen=True)
class Tokens:
    """A column over the counted tokens; one computed from `logs` has no value out of support.

    `trained` leaves out responses whose advantages are all 0, if the trace has advantages.
    """

    column: Quantity
    logs: bool = True
    trained: bool = False

    def __call__(self, gaps: TokenGaps) -> np.ndarray:
        values_N = self.column(gaps)
        masks = []
        outside_N = self._outside_N(gaps)
        if outside_N is not None:
            masks.append(~outside_N)
        trained_S = self.trained_S(gaps)
        if trained_S is not None:
            masks.append(gaps.per_token(trained_S))
        if not masks:
            return values_N
        return values_N[np.logical_and.reduce(masks)]

    def trained_S(self, gaps: TokenGaps) -> np.ndarray | None:
        """Which responses have a nonzero advantage; None if `trained` is off or there are no
        advantages.
        """
        if not self.trained:
            return None
        advantage_N = gaps.column("advantage_T")
        if advantage_N is None:
            return None
        return gaps.responses.sum(np.nan_to_num(advantage_N) != 0) > 0

    def response_sums(self, gaps: TokenGaps) -> np.ndarray:
        """The sum over each response; 0 without tokens."""
        values_N = self.column(gaps)
        outside_N = self._outside_N(gaps)
        if outside_N is not None:
            values_N = np.where(outside_N, 0, values_N)
        return gaps.responses.sum(values_N)

    def response_means(self, gaps: TokenGaps) -> np.ndarray:
        """The mean over each response; 0 without tokens."""
        length_S = gaps.responses.length_S
        if self._outside_N(gaps) is not None:
            length_S = gaps.length_and_d_sum[0]  # of the tokens that have a d
        return self.response_sums(gaps) / np.maximum(length_S, 1)

    def _outside_N(self, gaps: TokenGaps) -> np.ndarray | None:
        return gaps.out_of_support_N if self.logs else None


@dataclass(frozen=True)
class ResponseMeans:
    """The mean of a column over each response's counted tokens; 0 for a response without any, if
    it is included.
    """

    tokens: Tokens
    include_empty: bool = True

    def __call__(self, gaps: TokenGaps) -> np.ndarray:
        means_S = self.tokens.response_means(gaps)
        averaged_S = self.tokens.trained_S(gaps)
        if averaged_S is None:
            averaged_S = included(gaps, self.include_empty)
        return means_S[averaged_S]


@dataclass(frozen=True)
class ResponseSums:
    """The sum of a column over each response's counted tokens; 0 for a response without any, if
    it is included.
    """

    tokens: Tokens
    include_empty: bool = True

    def __call__(self, gaps: TokenGaps) -> np.ndarray:
        return self.tokens.response_sums(gaps)[included(gaps, self.include_empty)]


@dataclass(frozen=True)
class OfResponses:
    """A function of a mean or sum over each response; `empty` replaces its value at 0 if there
    are no tokens.
    """

    function: Callable[[np.ndarray], np.ndarray]
    values: Quantity
    empty: float | None = None

    def __call__(self, gaps: TokenGaps) -> np.ndarray:
        with np.errstate(over="ignore"):
            values_S = self.function(self.values(gaps))
        if self.empty is not None:
            values_S[gaps.responses.length_S[included(gaps)] == 0] = self.empty
        return values_S


@dataclass(frozen=True)
class AtTokens:
    """A value per response with tokens, repeated at each of them."""

    values: Quantity

    def __call__(self, gaps: TokenGaps) -> np.ndarray:
        length_S = gaps.responses.length_S
        return np.repeat(self.values(gaps), length_S[length_S > 0])


def included(gaps: TokenGaps, empty: bool = True) -> np.ndarray:
    """Which responses have a counted token, or (`empty`) nothing to train; never those without
    log-probabilities.
    """
    has_counted_S = gaps.responses.length_S > 0
    if not empty:
        return has_counted_S
    # A response without counted tokens has either no trained token, or no log-probabilities.
    # The loss mask of the whole batch tells these apart, since `gaps` holds counted tokens only.
    first, last = gaps.batch.offset_S1[[gaps.first, gaps.last]].tolist()
    responses = Segments(gaps.response_offset_S1)
    trained_tokens_S = responses.sum(gaps.batch.loss_mask_T[first:last])
    return has_counted_S | (trained_tokens_S == 0)


def leaves_out_untrained(quantity: Quantity) -> bool:
    """Whether responses whose advantages are all 0 are left out."""
    tokens = quantity.tokens if isinstance(quantity, ResponseMeans) else quantity
    return isinstance(tokens, Tokens) and tokens.trained


def count_trained(gaps: TokenGaps) -> int:
    """How many responses have a nonzero advantage; all of them, if there are no advantages."""
    trained_S = Tokens(_log_ratio_N, trained=True).trained_S(gaps)
    return len(gaps.responses.length_S) if trained_S is None else int(trained_S.sum())


def _log_ratio_N(gaps: TokenGaps) -> np.ndarray:
    """d; −inf out of support."""
    if gaps.out_of_support_N is None:
        return gaps.d_N
    return np.where(gaps.out_of_support_N, -np.inf, gaps.d_N)


def _zeroed_ratio_N(gaps: TokenGaps) -> np.ndarray:
    """r, but 1 out of support."""
    with np.errstate(over="ignore"):
        return np.exp(gaps.d_N)


def _squared_less_1(log_ratio: np.ndarray) -> np.ndarray:
    """r² − 1 without cancellation, with log r clamped to ±`BOUND`."""
    return np.expm1(2 * np.clip(log_ratio, -BOUND, BOUND).astype(np.float64))


def _jensen_shannon_N(gaps: TokenGaps) -> np.ndarray:
    """½ φ(log p/m) + ½ φ(log q/m) with m = (p + q)/2 and φ(u) = e^u − 1 − u."""
    # log q/m = −log((1 + r)/2), and log p/m the same of 1/r.
    # Here (1 + r)/2 is 1 + (r − 1)/2, whose logarithm keeps its digits where r is nearly 1.
    d_N = gaps.d_N.astype(np.float64)
    log_p_share_N = -np.log1p(np.expm1(-d_N) / 2)
    log_q_share_N = -np.log1p(np.expm1(d_N) / 2)
    return (divergences.phi(log_p_share_N) + divergences.phi(log_q_share_N)) / 2


# Lines that reduce equal quantities compute them once, if they are the same object.
# `cache` makes them so: two functions made by the same lambda are never equal.
@cache
def clamped_d(bound: float = BOUND) -> Tokens:
    """d clamped to ±bound, also if π excludes the token."""
    return Tokens(lambda gaps: np.clip(_log_ratio_N(gaps), -bound, bound), logs=False)


@cache
def weight(cap: float = inf, floor: float = 0.0, bound: float = BOUND) -> Tokens:
    """min(max(r, floor), cap) of each token, with d clamped to ±`bound`."""
    return Tokens(
        lambda gaps: np.clip(np.exp(clamped_d(bound).column(gaps)), floor, cap), logs=False
    )


@cache
def zeroed(tokens: Tokens) -> Tokens:
    """A column of d for frameworks that set an infinite d to 0: the token counts, as if it had
    not moved.
    """
    return replace(tokens, logs=False)


@cache
def ratio_above(threshold: float) -> Tokens:
    """Whether r is above a threshold."""
    return Tokens(lambda gaps: gaps.ratio_N > np.float32(threshold), logs=False)


@cache
def ratio_below(threshold: float) -> Tokens:
    """Whether r is below a threshold."""
    return Tokens(lambda gaps: gaps.ratio_N < np.float32(threshold), logs=False)


@cache
def ratio_outside(low: float, high: float) -> Tokens:
    """Whether r is outside an interval."""
    return Tokens(
        lambda gaps: (gaps.ratio_N < np.float32(low)) | (gaps.ratio_N > np.float32(high)),
        logs=False,
    )


@cache
def masked_product(cap: float) -> Quantity:
    """The ratio of a complete response, exp(Σd), or 0 above the cap."""

    def ratio_S(gaps: TokenGaps) -> np.ndarray:
        log_S = LOG_PRODUCT(gaps)
        return np.where(log_S > log(cap), 0.0, np.exp(np.minimum(log_S, log(cap))))

    return ratio_S


@cache
def blocked(algorithm: str) -> Tokens:
    """Whether the masks of an algorithm, `name` or `name:parameter=value,…`, block a token.

    The reference of the line's pair stands in for the policy that the masks are anchored to.
    """

    rule = parse_algorithm(algorithm)

    def column(gaps: TokenGaps) -> np.ndarray:
        policies = Policies(gaps.logq_N, gaps.logp_N, gaps.logq_N, gaps.offset_S1)
        blocked_N: np.ndarray = ~keep_T(rule, policies, advantages(gaps))
        return blocked_N

    return Tokens(column, logs=False)


@cache
def where_advantage(flags: Tokens, sign: int) -> Tokens:
    """Whether a flag holds at a token whose advantage has this sign, 1 or −1."""

    def column(gaps: TokenGaps) -> np.ndarray:
        flagged_N: np.ndarray = flags.column(gaps) & (np.sign(advantages(gaps)) == sign)
        return flagged_N

    return replace(flags, column=column)


def advantages(gaps: TokenGaps) -> np.ndarray:
    """The advantage of each counted token, in a line that needs them."""
    advantage_N = gaps.column("advantage_T")
    assert advantage_N is not None
    return advantage_N


def _entropy_N(gaps: TokenGaps) -> np.ndarray:
    entropy_N = gaps.column("entropy_trainer_T")
    assert entropy_N is not None  # the line needs it
    return entropy_N


D = Tokens(lambda gaps: gaps.d_N)
ABS_D = Tokens(lambda gaps: gaps.abs_d_N)
MINUS_D = Tokens(lambda gaps: -gaps.d_N)
K3 = Tokens(lambda gaps: gaps.k3_N)
REVERSED_K3 = Tokens(lambda gaps: divergences.phi(-gaps.d_N))
CLAMPED_K3 = Tokens(lambda gaps: divergences.phi(clamped_d().column(gaps)), logs=False)
CAPPED_K3 = Tokens(lambda gaps: np.clip(CLAMPED_K3.column(gaps), -10, 10), logs=False)
JENSEN_SHANNON = Tokens(_jensen_shannon_N)
TWICE_WEIGHTED = Tokens(lambda gaps: gaps.q_N * -gaps.d_N)
MULT_ERROR = Tokens(silent(TOKEN_SUMS["mult_error"]))
MINUS_LOG_P = Tokens(lambda gaps: -gaps.logp_N)
MINUS_LOG_Q = Tokens(lambda gaps: -gaps.logq_N, logs=False)
ABS_DP = Tokens(lambda gaps: gaps.abs_dp_N, logs=False)
MINUS_DP = Tokens(lambda gaps: -gaps.dp_N, logs=False)
DP = Tokens(lambda gaps: gaps.dp_N, logs=False)
LOG_RATIO = Tokens(_log_ratio_N, logs=False)
RATIO = Tokens(lambda gaps: gaps.ratio_N, logs=False)
FINITE_RATIO = Tokens(lambda gaps: np.nan_to_num(gaps.ratio_N, posinf=0), logs=False)
ZEROED_RATIO = Tokens(_zeroed_ratio_N, logs=False)
ABS_RATIO_LESS_1 = Tokens(lambda gaps: np.abs(gaps.ratio_less_1_N), logs=False)
SQUARED_RATIO_LESS_1 = Tokens(lambda gaps: _squared_less_1(_log_ratio_N(gaps)), logs=False)
ENTROPY = Tokens(_entropy_N)

MEAN_GAP = ResponseMeans(MINUS_D)  # log ppl of π − log ppl of μ
LOG_PRODUCT = ResponseSums(LOG_RATIO)
PRODUCT_LESS_1 = OfResponses(_squared_less_1, LOG_PRODUCT)
GEOMETRIC_LESS_1 = OfResponses(_squared_less_1, ResponseMeans(LOG_RATIO))


class Moments(Accumulator):
    """Count, mean, Σ(x − mean)², smallest and largest value, in float64; batches are merged by
    Chan's update.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.squares = 0.0
        self.least, self.largest = inf, -inf

    def update(self, values: np.ndarray) -> None:
        if not len(values):
            return
        batch = Moments()
        batch.count = len(values)
        batch.mean = float(values.mean(dtype=np.float64))
        if isinf(batch.mean):  # so is the spread
            batch.squares = inf
        else:
            with np.errstate(over="ignore"):
                batch.squares = float(np.square(values - np.float64(batch.mean)).sum())
        batch.least = float(values.min())
        batch.largest = float(values.max())
        self.merge(batch)

    def merge(self, other: Moments) -> None:
        if not other.count:
            return
        total = self.count + other.count
        # Chan's update would subtract infinities, which is NaN.
        if isinf(self.mean) or isinf(other.mean):
            self.mean += other.mean
            self.squares = inf
        else:
            with np.errstate(over="ignore"):
                step = np.float64(other.mean) - self.mean
                self.squares += float(
                    other.squares + step * step * self.count * other.count / total
                )
                self.mean += float(step * other.count / total)
        self.count = total
        self.least = min(self.least, other.least)
        self.largest = max(self.largest, other.largest)


mean, least, largest = attrgetter("mean"), attrgetter("least"), attrgetter("largest")


def sample_sd(moments: Moments) -> float:
    """The standard deviation with n − 1 in the denominator, as in torch.std."""
    return sqrt(moments.squares / (moments.count - 1)) if moments.count > 1 else nan


def sample_sd_or_0(moments: Moments) -> float:
    """The standard deviation with n − 1 in the denominator, and 0 for a single value."""
    return sample_sd(moments) if moments.count > 1 else 0.0


def population_sd(moments: Moments) -> float:
    """The standard deviation with n in the denominator: √(E x² − (E x)²)."""
    return sqrt(moments.squares / moments.count)


def effective_share(moments: Moments) -> float:
    """The effective sample size of weights as a share of their number: 1 / E[(w / E w)²]."""
    return moments.mean**2 / (moments.mean**2 + moments.squares / moments.count)


def total(moments: Moments) -> float:
    """The sum of the values, which is a count if they are flags."""
    return moments.mean * moments.count


def ratio_of_means(over: Moments, under: Moments) -> float:
    """The mean of one quantity over that of another; NaN if the latter is 0."""
    return over.mean / under.mean if under.mean else nan


_TRAINER_LOG_PPL = ResponseMeans(MINUS_LOG_P)
_ROLLOUT_LOG_PPL = ResponseMeans(MINUS_LOG_Q)
_PERPLEXITIES: tuple[tuple[str, str, Quantity, Callable[[Moments], float]], ...] = (
    ("training_ppl", "E_y exp(−mean log π)", OfResponses(np.exp, _TRAINER_LOG_PPL), mean),
    ("training_log_ppl", "E_y (−mean log π)", _TRAINER_LOG_PPL, mean),
    ("rollout_ppl", "E_y exp(−mean log μ)", OfResponses(np.exp, _ROLLOUT_LOG_PPL), mean),
    ("rollout_log_ppl", "E_y (−mean log μ)", _ROLLOUT_LOG_PPL, mean),
    ("log_ppl_diff", "E_y (−mean d)", MEAN_GAP, mean),
    ("log_ppl_abs_diff", "E_y |mean d|", OfResponses(np.abs, MEAN_GAP), mean),
    ("log_ppl_diff_max", "max_y (−mean d)", MEAN_GAP, largest),
    ("log_ppl_diff_min", "min_y (−mean d)", MEAN_GAP, least),
    ("ppl_ratio", "E_y exp(−mean d)", OfResponses(np.exp, MEAN_GAP), mean),
)


def perplexity_lines(prefix: str, source: str) -> tuple[FrameworkMetric, ...]:
    """What verl and its relatives log of perplexities, under a framework's own prefix."""
    return tuple(
        FrameworkMetric(f"{prefix}{name}", ENGINE_GAP, formula, source, quantity, reduce)
        for name, formula, quantity, reduce in _PERPLEXITIES
    )


ENGINE_GAP, CURRENT, UPDATE = "mismatch", "total", "staleness"  # pairs of metrics/pairs.py
COMPARES = {
    ENGINE_GAP: ("recomputed", "rollout"),
    CURRENT: ("trainer", "rollout"),
    UPDATE: ("trainer", "recomputed"),
}


@dataclass(frozen=True)
class FrameworkMetric:
    """A metric of a framework: `reduce` of the quantities `measured`, or a metric of
    `metrics/gap_table.py`.

    `pair` names the two policies that the framework compares; in the formula π is the first of them
    and μ the second. `needs` are columns of the batch besides the log-probabilities; `lacks` is an
    input that no trace has, so the number cannot be measured. `of_nothing` is what the framework
    shows if nothing is left to reduce. Lines with the same `word` share a name across frameworks
    but are different numbers. Lines of a `topic`, an option with many numbers, have their own
    table.
    """

    name: str
    pair: str
    formula: str
    source: str  # the framework's file that computes it
    measured: Quantity | tuple[Quantity, ...] = ()
    reduce: Reduce = mean
    metric: str = ""
    note: str = ""
    word: str = ""
    needs: tuple[str, ...] = ()
    lacks: str = ""
    topic: str = ""
    of_nothing: float = nan

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        return self.measured if isinstance(self.measured, tuple) else (self.measured,)

    @property
    def compares(self) -> str:
        return " / ".join(COMPARES[self.pair])
