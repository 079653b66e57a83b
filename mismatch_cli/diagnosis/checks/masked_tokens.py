"""Tokens that were never sampled, such as tool output, but are in the loss mask."""

from itertools import pairwise

import numpy as np

from mismatch_cli.diagnosis.checks.placeholders import zeros_finding, zeros_T
from mismatch_cli.diagnosis.counts import in_runs
from mismatch_cli.diagnosis.evidence import Evidence, Finding
from mismatch_cli.diagnosis.far_responses import responses_with
from mismatch_cli.diagnosis.power import clear
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE = "masked-tokens", 1
TITLE = "Tool or prompt tokens in the loss"
CAUSE = (
    "Tokens inserted between turns are in the loss mask, although the engine never sampled them."
)
CHANGE = (
    "Set the loss mask to 0 for every token that the engine did not sample (tool output, "
    "templates, user turns)."
)
SOURCE = "miles PR 2476, SkyRL PR 354 (masked tool tokens: tens of nats)"
_HUGE = 2.0  # nats
_TIMES_TYPICAL = 10.0
_RUN = 4
_FEWEST = 2  # responses
_SHARE_OF_HUGE, _MOST_HUGE = 0.6, 0.3  # of huge gaps in runs; of the tokens with huge gaps


def check(evidence: Evidence) -> Finding:
    """Find runs of exact zeros; else runs of huge gaps that end before their response does."""
    zeros = zeros_finding(evidence, NAME)
    if zeros is not None:
        return zeros
    sample = evidence.sample
    huge_T = _huge_T(sample)
    runs_T = in_runs(huge_T, sample.offset_S1, _RUN) & ~reaches_the_end(huge_T, sample.offset_S1)
    tokens, huge = int(runs_T.sum()), int(huge_T.sum())
    responses = len(np.unique(sample.response_T[runs_T]))
    share = tokens / max(1, sample.num_counted)
    are_few = responses < _FEWEST or tokens < _SHARE_OF_HUGE * huge
    # Where many tokens are far apart, runs are chance
    if are_few or huge > _MOST_HUGE * sample.num_counted:
        power = f"runs of {_RUN} tokens, {_HUGE:g} nats apart, in {_FEWEST} responses"
        return clear(NAME, share, "share of tokens", power)
    sentence = (
        f"{tokens:,} tokens in {responses:,} responses are in runs with gaps above {_HUGE:g} "
        "nats: the engine did not sample them."
    )
    rows = (("responses with such a run", responses), ("share of all huge gaps", tokens / huge))
    left_N = sample.left_without(runs_T)
    part = responses_with(runs_T, sample.counts_T, sample)
    measure = "share of tokens"
    return Finding(NAME, "found", share, measure, sentence, rows, left_N=left_N, part=part)


def _huge_T(sample: Sample) -> np.ndarray:
    """The tokens with a huge gap."""
    # Rare tokens may be far apart without a fault, but not by any number of nats
    limit_N = np.maximum(_HUGE, np.minimum(_TIMES_TYPICAL * sample.typical_N, 2 * _HUGE))
    huge_T = np.zeros(len(sample.logq_T), dtype=bool)
    huge_T[sample.index_N[np.abs(sample.d_N) > limit_N]] = True
    return huge_T


def spoiled_T(evidence: Evidence) -> np.ndarray:
    """The zeros, and every huge gap."""
    return zeros_T(evidence.sample) | (evidence.sample.abs_d_T > _HUGE)


def reaches_the_end(flag_T: np.ndarray, offset_S1: np.ndarray) -> np.ndarray:
    """Flags whose run reaches the last token of the response, which is another fault."""
    reaches_T = np.zeros(len(flag_T), dtype=bool)
    for start, stop in pairwise(offset_S1.tolist()):
        unflagged = np.flatnonzero(~flag_T[start:stop])
        if len(unflagged):
            start += int(unflagged[-1]) + 1
        reaches_T[start:stop] = True
    return reaches_T & flag_T
