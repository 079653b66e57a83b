"""A column that holds another quantity of the response than the sampled token's log-probability."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mismatch_cli.diagnosis.alignment import real_gap
from mismatch_cli.diagnosis.checks.index_shift import too_few
from mismatch_cli.diagnosis.evidence import Evidence, Finding
from mismatch_cli.diagnosis.far_responses import Subset
from mismatch_cli.diagnosis.power import clear, of_responses
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE = "another-quantity", 1
TITLE = "Another quantity in place of a log-probability"
CAUSE = (
    "A field of the model's output was taken for the sampled token's log-probability: an entropy, "
    "the most probable token's value, or a mean or sum over the response."
)
CHANGE = (
    "Store log_softmax(logits) gathered at the sampled id, one value per token, before anything "
    "is averaged or summed."
)
SOURCE = "planted: minus entropy, greedy log-probs, a response's mean and running sums in a dump"
_FEWEST = 6  # tokens of a response at which the quantity and a log-probability differ
_DIFFER = 0.1  # nats from the quantity to the other side's log-probability, and to 0: that tells
_FITS = 0.15  # of the gap between both sides, and of the quantity, that may be left to the quantity
_NEVER = 1e-9  # tokens: keeps a mean over none at 0


class _Quantity(NamedTuple):
    """What a column may hold: its name, and its value at every token, nats; NaN = not measured."""

    name: str
    value_T: np.ndarray


@dataclass(frozen=True)
class _Match:
    """The responses in which one side is a quantity, and what is left of the gap to it."""

    side: str
    quantity: str
    inside_S: np.ndarray  # bool
    left_T: np.ndarray  # the side minus the quantity, nats


def check(evidence: Evidence) -> Finding:
    """Compare each side, response by response, with quantities made of the other side's columns.

    Only tokens count at which the quantity is neither the other side's log-probability nor 0,
    which most values are near. The column is the quantity where it leaves 15 % of both.
    """
    sample = evidence.sample
    match = _largest(sample)
    if match is None:
        return clear(NAME, 0.0, "share of responses", of_responses(_testable_S(sample)))
    count, share = int(match.inside_S.sum()), float(match.inside_S.mean())
    sentence = (
        f"In {count:,} of {sample.num_responses:,} responses {match.side} is {match.quantity}, and "
        "not the sampled token's log-probability."
    )
    rows = (("column", match.side), ("is", match.quantity), ("responses", count))
    inside_N = match.inside_S[sample.response_N]
    return Finding(
        NAME,
        "found",
        share,
        "share of responses",
        sentence,
        rows,
        left_N=np.where(inside_N, match.left_T[sample.index_N], sample.d_N),
        part=Subset(match.inside_S, match.inside_S | _testable_S(sample)),
    )


def spoiled_T(evidence: Evidence) -> np.ndarray:
    """Every token of these responses: one side says nothing of its log-probability."""
    sample = evidence.sample
    match = _largest(sample)
    if match is None:
        return np.zeros(len(sample.logq_T), dtype=bool)
    return np.asarray(match.inside_S[sample.response_T])


def _largest(sample: Sample) -> _Match | None:
    """The quantity that most responses hold; None if too few hold any."""
    matches = [*_matches(sample, "logp_trainer"), *_matches(sample, "logp_rollout")]
    return max(matches, key=lambda match: int(match.inside_S.sum()), default=None)


def _matches(sample: Sample, side: str) -> Iterator[_Match]:
    own_T, other_T = sample.logp_T, sample.logq_T
    if side == "logp_rollout":
        own_T, other_T = other_T, own_T
    gap_T = np.abs(own_T - other_T)
    for name, value_T in _quantities(sample, other_T, side):
        left_T = own_T - value_T
        telling_T = sample.counts_T & _tells_T(value_T, other_T)
        count_S, gap_S = _mean_S(sample, np.minimum(gap_T, np.abs(value_T)), telling_T)
        _, left_S = _mean_S(sample, np.abs(left_T), telling_T)
        large_S = (count_S >= _FEWEST) & (gap_S >= real_gap(sample))
        inside_S = large_S & (left_S <= _FITS * gap_S)
        if not too_few(inside_S):
            # A response with few tokens that tell is one of them, too, if all its tokens fit
            every_T = sample.counts_T & np.isfinite(value_T)
            _, all_gap_S = _mean_S(sample, gap_T, every_T)
            _, all_left_S = _mean_S(sample, np.abs(left_T), every_T)
            as_well_S = all_left_S < _FITS * all_gap_S
            yield _Match(side, name, inside_S | as_well_S, left_T)


def _tells_T(value_T: np.ndarray, other_T: np.ndarray) -> np.ndarray:
    """Whether a quantity differs from the other side's log-probability and from 0."""
    return (np.abs(other_T - value_T) > _DIFFER) & (np.abs(value_T) > _DIFFER)


def _quantities(sample: Sample, other_T: np.ndarray, side: str) -> Iterator[_Quantity]:
    """The quantities of the other side's columns: with its own, a gap between both sides would fit
    by chance.
    """
    if sample.entropy_T is not None:
        yield _Quantity("minus the entropy", -sample.entropy_T.astype(np.float64))
    ranks_TK = sample.topk_logq_TK if side == "logp_trainer" else sample.topk_logp_TK
    if ranks_TK is not None:
        best_T = np.max(ranks_TK, axis=1, initial=-np.inf, where=np.isfinite(ranks_TK))
        is_measured_T = np.isfinite(best_T) & (best_T < 0)
        best_T = np.where(is_measured_T, best_T, np.nan)
        yield _Quantity("that of the most probable token", best_T)
    yield from _sums(sample, other_T)


def _sums(sample: Sample, other_T: np.ndarray) -> Iterator[_Quantity]:
    """Means and sums over the response of the other side's log-probabilities."""
    response_T = sample.response_T
    counted_T = np.where(sample.counts_T, other_T, 0.0)
    total_S = np.bincount(response_T, weights=counted_T, minlength=sample.num_responses)
    count_S = np.bincount(response_T, weights=sample.counts_T, minlength=sample.num_responses)
    mean_S = total_S / np.maximum(count_S, 1)
    before_S = np.concatenate([[0.0], np.cumsum(total_S)])[:-1]
    up_to_T = np.cumsum(counted_T) - before_S[response_T]
    total_T = total_S[response_T]
    yield _Quantity("the mean over its response", mean_S[response_T])
    yield _Quantity("the sum over its response", total_T)
    yield _Quantity("a running sum", up_to_T)
    yield _Quantity("a running sum from the end", total_T - up_to_T + counted_T)


def _mean_S(
    sample: Sample, value_T: np.ndarray, chosen_T: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The number of chosen tokens of each response, and the mean of a value over them."""
    response_M, value_M = sample.response_T[chosen_T], value_T[chosen_T]
    count_S = np.bincount(response_M, minlength=sample.num_responses)
    sum_S = np.bincount(response_M, weights=value_M, minlength=sample.num_responses)
    return count_S, sum_S / np.maximum(count_S, _NEVER)


def _testable_S(sample: Sample) -> np.ndarray:
    """The responses with enough tokens that are not alike: their mean differs from them."""
    mean = next(_sums(sample, sample.logq_T))
    telling_T = sample.counts_T & _tells_T(mean.value_T, sample.logq_T)
    count_S, _ = _mean_S(sample, telling_T, telling_T)
    return np.asarray(count_S >= _FEWEST)
