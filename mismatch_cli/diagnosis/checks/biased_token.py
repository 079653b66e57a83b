"""One token id whose log-odds differ by the same number wherever it was sampled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.diagnosis.checks.temperature import beyond, log_odds
from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row, untested
from mismatch_cli.diagnosis.power import clear, no_power
from mismatch_cli.diagnosis.sample import WITHOUT_IDS, Sample

NAME, STAGE = "biased-token", 3
TITLE = "One token's logit is biased"
CAUSE = (
    "One side adds a number to the logit of a single token: a logit_bias, a suppressed or boosted "
    "token of the engine's request, or a row of the head that was resized or not synchronised."
)
CHANGE = (
    "Remove the bias from the engine's request, or add it to the trainer's logits; compare that "
    "row of both heads."
)
SOURCE = "the logit_bias of an engine's request; no known public report"
# Occurrences, and prompts that have them: in one context, or in one response that is used twice, a
# token has the gap of that context, which training moves too
_FEWEST, _FEWEST_PROMPTS = 8, 4
_NEAR, _NEARLY_ALL = 0.3, 0.9  # of the bias: an occurrence this close to it; of the occurrences
_TIMES_OTHERS = 4.0  # the 80 % quantile of the other tokens' log-odds gaps
_LEAST = 0.05  # nats


@dataclass(frozen=True)
class _Bias:
    """A token id, and by how much log π's log-odds are above log μ's in its occurrences."""

    token: int
    nats: float
    occurrences: int
    near: float  # share of the occurrences within 30 % of it


def check(evidence: Evidence) -> Finding:
    """Compare the log-odds gap of each id's occurrences with that of the other tokens.

    A logit that is `b` higher raises the log-odds of its token by exactly b, and lowers every other
    token by at most what that takes from it.
    """
    sample = evidence.sample
    if sample.response_ids_T is None:
        return untested(NAME, WITHOUT_IDS)
    id_N = sample.response_ids_T[sample.index_N]
    x_N, y_N, usable_N = log_odds(sample)
    gap_M, id_M = (y_N - x_N)[usable_N], id_N[usable_N]
    frequent_I = frequent_ids(id_M, sample.group_N[usable_N])
    bias = largest_bias(gap_M, id_M, frequent_I)
    measure = "nats on one token's logit"
    if bias is None:
        return clear(NAME, 0.0, measure, _power(gap_M, len(frequent_I)))
    left_N = _left(sample, bias, id_N == bias.token)
    others = _typical(gap_M[id_M != bias.token])
    rows: tuple[Row, ...] = (
        ("token id", bias.token),
        ("its occurrences, neither certain nor impossible", bias.occurrences),
        ("share of them within 30 % of the bias", bias.near),
        ("typical log-odds gap of the others, nats", others),
    )
    of_all = "all its" if bias.near == 1 else f"{100 * bias.near:.0f} % of its"
    direction = "higher" if bias.nats > 0 else "lower"
    sentence = (
        f"In {of_all} {bias.occurrences:,} occurrences the log-odds of token {bias.token} are "
        f"{abs(bias.nats):.2g} nats {direction} in the trainer than in the engine, and those of "
        "other tokens are not."
    )
    return Finding(
        NAME, "found", abs(bias.nats), measure, sentence, rows, left_N=left_N, at_most=True
    )


def frequent_ids(id_M: np.ndarray, group_M: np.ndarray) -> np.ndarray:
    """The ids that occur often enough, and under enough prompts."""
    id_I, index_M, count_I = np.unique(id_M, return_inverse=True, return_counts=True)
    index_of_pair, _ = np.unique(np.stack([index_M, group_M]), axis=1)
    prompts_I = np.bincount(index_of_pair, minlength=len(id_I))
    return id_I[(count_I >= _FEWEST) & (prompts_I >= _FEWEST_PROMPTS)]


def largest_bias(gap_M: np.ndarray, id_M: np.ndarray, frequent_I: np.ndarray) -> _Bias | None:
    """The frequent id with the largest bias that nearly all its occurrences have, and other tokens
    do not; None if there is none.
    """
    biases = []
    for token in frequent_I.tolist():
        own_M = id_M == token
        nats = float(np.median(gap_M[own_M]))
        if abs(nats) < _LEAST:
            continue
        near = float((np.abs(gap_M[own_M] - nats) <= _NEAR * abs(nats)).mean())
        if near >= _NEARLY_ALL and abs(nats) > _TIMES_OTHERS * _typical(gap_M[~own_M]):
            biases.append(_Bias(token, nats, int(own_M.sum()), near))
    return max(biases, key=lambda bias: abs(bias.nats), default=None)


def _typical(gap_M: np.ndarray) -> float:
    """The gap that 80 % of the tokens stay below, nats."""
    return float(np.quantile(np.abs(gap_M), 0.8)) if len(gap_M) else np.inf


def _left(sample: Sample, bias: _Bias, own_N: np.ndarray) -> np.ndarray:
    """log π − log μ, nats, beyond what the bias makes: of its own token exactly, of others at most
    what it could take if all the rest were the biased token.
    """
    logq_N, factor = sample.logq_N, np.exp(bias.nats)
    p_N = np.exp(np.minimum(logq_N, 0.0))
    biased_N = logq_N + bias.nats - np.log1p(p_N * (factor - 1))
    least_N = logq_N - np.log1p((1 - p_N) * (factor - 1))
    bounds = (np.where(own_N, biased_N, least_N), np.where(own_N, biased_N, logq_N))
    return beyond(sample, bounds)


def _power(gap_M: np.ndarray, frequent: int) -> str:
    """The bias that would have been found, on one of so many frequent ids."""
    if not frequent:
        return no_power(
            f"no token occurs {_FEWEST} times, under {_FEWEST_PROMPTS} prompts, between certain "
            "and impossible"
        )
    nats = max(_LEAST, _TIMES_OTHERS * _typical(gap_M))
    return f"a bias of ≥ {nats:.2g} nats on one of {frequent:,} ids"
