"""Placeholders: one exact value, such as 0.0 or −100, where a log-probability should be."""

from collections.abc import Collection

import numpy as np

from mismatch_cli.diagnosis.counts import ZeroCounts
from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row
from mismatch_cli.diagnosis.far_responses import Subset, responses_with
from mismatch_cli.diagnosis.power import clear, percent, too_certain
from mismatch_cli.diagnosis.sample import Sample
from mismatch_cli.trace.foreign_values import UNCERTAIN

NAME, STAGE = "placeholders", 1
TITLE = "Placeholders instead of log-probabilities"
CAUSE = (
    "A default value was written where the engine returned nothing; the ratio of such a token is "
    "meaningless."
)
CHANGE = (
    "Request log-probabilities from the engine on every path, even after tool calls, and fail if "
    "one is missing."
)
SOURCE = "NeMo-RL PR 4218 (0.0 by default: ratio 4.8e4), verl-recipe dynamo (12 of 6,944 real)"
_FEWEST, _SHARE = 16, 1e-3
_APART = 0.5  # nats between a placeholder and the other side's value
_CERTAIN = -0.05  # nats: values above this repeat by chance
_ALIKE = 0.25  # of the times that a value occurs: a placeholder occurs on one side only
_NEIGHBOURS = 100  # tokens with the next smaller and larger values, on either side
_TIMES_NEIGHBOURS = 3.0  # their gap
OF_A_CLAMP = "Record log-probabilities before they are clamped, or lower the clamp."
OF_DRAFTS = (
    "These tokens were sampled: do not mask them. If the engine decodes speculatively, they are "
    "accepted tokens of the draft: request the target's log-probabilities, or switch it off. "
    "Otherwise request log-probabilities on every path, and fail if one is missing."
)


def check(evidence: Evidence) -> Finding:
    """Find exact zeros over every token; else, in the sample, a value that repeats while the
    other side varies.
    """
    zeros = zeros_finding(evidence, NAME)
    if zeros is not None:
        return zeros
    sample = evidence.sample
    logq_N, logp_N = sample.logq_N, sample.logp_N
    for side, own_N, other_N in (
        ("logp_rollout", logq_N, logp_N),
        ("logp_trainer", logp_N, logq_N),
    ):
        value, count = _most_suspicious(own_N, other_N)
        if count:
            return _value_finding(sample, side, own_N, value, count)
    return clear(NAME, 0.0, "share of tokens", _power(sample))


def _value_finding(
    sample: Sample, side: str, own_N: np.ndarray, value: float, count: int
) -> Finding:
    """Found: so many tokens of a side have this value exactly."""
    is_clamp = value == float(own_N.min())
    clamp = ", and none is below: the column is clamped" if is_clamp else ""
    sentence = (
        f"{count:,} sampled tokens have {side} = {value:g} exactly, whatever the other side's "
        f"value{clamp}."
    )
    return Finding(
        NAME,
        "found",
        count / len(own_N),
        "share of tokens",
        sentence,
        ((f"{side}: the value, nats", value), ("tokens of the sample with it", count)),
        change=OF_A_CLAMP if is_clamp else "",
        left_N=np.where(own_N == value, np.nan, sample.d_N),
        part=responses_with(sample.index_N[own_N == value], sample.counts_T, sample),
    )


def _power(sample: Sample) -> str:
    """A placeholder shows where the other side is uncertain."""
    logp_2N = np.stack([sample.logq_N, sample.logp_N])
    share = float((logp_2N.min(axis=0) < UNCERTAIN).mean())
    if not share:
        return too_certain(sample)
    return f"one 0.0 in the {percent(share)} of the tokens that are uncertain"


def spoiled_T(evidence: Evidence) -> np.ndarray:
    return zeros_T(evidence.sample)


def _most_suspicious(own_N: np.ndarray, other_N: np.ndarray) -> tuple[float, int]:
    """A value that many tokens share exactly but the other side does not confirm, with their
    number.
    """
    value_V, index_N, count_V = np.unique(own_N, return_inverse=True, return_counts=True)
    gap_V = np.bincount(index_N, weights=np.abs(own_N - other_N), minlength=len(value_V))
    often_V = (count_V >= max(_FEWEST, _SHARE * len(own_N))) & (value_V < _CERTAIN)
    # A choice between two tokens on a grid of logits has few values, on either side
    alike_V = _times_V(value_V, other_N) >= _ALIKE * count_V
    suspicious_V = often_V & ~alike_V & (gap_V > _APART * count_V)
    for v in np.flatnonzero(suspicious_V).tolist():
        typical = _gap_of_neighbours(own_N, other_N, value_V[v])
        suspicious_V[v] = gap_V[v] > _TIMES_NEIGHBOURS * typical * count_V[v]
    if not suspicious_V.any():
        return 0.0, 0
    worst = int(np.argmax(np.where(suspicious_V, gap_V, 0)))
    return float(value_V[worst]), int(count_V[worst])


def _gap_of_neighbours(own_N: np.ndarray, other_N: np.ndarray, value: float) -> float:
    """The mean |d| of tokens with nearly this value, nats; 0 for a value that is alone.

    On a grid of logits values repeat, too, and other weights move them all alike.
    """
    by_value = np.argsort(own_N, kind="stable")
    sorted_N = own_N[by_value]
    first = int(np.searchsorted(sorted_N, value, "left"))
    last = int(np.searchsorted(sorted_N, value, "right"))
    below = by_value[max(0, first - _NEIGHBOURS) : first]
    above = by_value[last : last + _NEIGHBOURS]
    near = np.concatenate([below, above])
    near = near[np.abs(own_N[near] - value) < _APART]
    if not len(near):
        return 0.0
    return float(np.abs(own_N[near] - other_N[near]).mean())


def _times_V(value_V: np.ndarray, other_N: np.ndarray) -> np.ndarray:
    """How often each value occurs on the other side."""
    sorted_N = np.sort(other_N)
    first_V = np.searchsorted(sorted_N, value_V, "left")
    return np.asarray(np.searchsorted(sorted_N, value_V, "right") - first_V)


_MOSTLY = 0.7  # of the placeholders that must be last tokens, or in runs, to be named so


def zeros_finding(evidence: Evidence, check: str) -> Finding | None:
    """The finding of `check` if the exact zeros are of its kind, else None."""
    sides = _placeholders(evidence)
    if not sides or _kind(sides.values()) != check:
        return None
    tokens = sum(zeros.tokens for zeros in sides.values())
    all_tokens = max((counts.tokens for counts in evidence.counts.sides.values()), default=tokens)
    rows: list[Row] = []
    for side, zeros in sides.items():
        rows.append((f"{side}: exactly 0.0, the other side uncertain", zeros.tokens))
        rows.append((f"{side}: mean |Δlog p| there, nats", zeros.gap / zeros.tokens))
    sentence = (
        f"{tokens:,} tokens have a log-probability of exactly 0.0 where the other side is far "
        "from certain."
    )
    measure = "share of tokens, where the other side is uncertain"
    sample = evidence.sample
    placeholder_T = zeros_T(sample)
    are_sampled = check == NAME and all(zeros.are_sampled for zeros in sides.values())
    return Finding(
        check,
        "found",
        tokens / all_tokens,
        measure,
        sentence,
        tuple(rows),
        change=OF_DRAFTS if are_sampled else "",
        left_N=sample.left_without(placeholder_T),
        part=_part_with(placeholder_T, sample, at_the_end=check == "end-of-sequence"),
    )


def _part_with(placeholder_T: np.ndarray, sample: Sample, *, at_the_end: bool) -> Subset:
    """The responses with a placeholder where the other side is not certain, among those with a
    token that could show it.
    """
    could_T = sample.counts_T & (np.minimum(sample.logq_T, sample.logp_T) < _CERTAIN)
    if at_the_end:
        could_T &= sample.last_T
    return responses_with(could_T & placeholder_T, could_T, sample)


def _placeholders(evidence: Evidence) -> dict[str, ZeroCounts]:
    """The sides with exact zeros that no other weights explain."""
    # The counts of the whole trace still have what was undone in the sample
    if "forced-tokens" in evidence.undone:
        return {}
    sides = evidence.counts.zeros.items()
    return {side: zeros for side, zeros in sides if zeros.tokens and not zeros.are_legitimate}


def _kind(sides: Collection[ZeroCounts]) -> str:
    """The check that exact zeros belong to, by where they are; runs of sampled tokens are
    not the output of a tool.
    """
    tokens = sum(zeros.tokens for zeros in sides)
    if sum(zeros.last for zeros in sides) >= _MOSTLY * tokens:
        return "end-of-sequence"
    in_runs = sum(zeros.in_runs for zeros in sides) >= _MOSTLY * tokens
    if in_runs and not all(zeros.are_sampled for zeros in sides):
        return "masked-tokens"
    return NAME


def zeros_T(sample: Sample) -> np.ndarray:
    """Exact zeros of the sample, on a side where some are far from the other side's value."""
    far_T = sample.abs_d_T > -UNCERTAIN
    placeholder_T = np.zeros(len(sample.logq_T), dtype=bool)
    for logp_T in (sample.logq_T, sample.logp_T):
        zero_T = logp_T == 0
        if (zero_T & far_T).any():
            placeholder_T |= zero_T
    return placeholder_T
