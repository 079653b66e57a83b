"""Part of the responses have a far larger gap than the others, and no other check says why."""

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.far_responses import FEWEST, SHORTEST, TIMES
from mismatch_cli.diagnosis.power import clear, no_power, percent
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE, OF_SHAPE = "uneven-responses", 6, True
TITLE = "Part of the responses is far off"
CAUSE = (
    "One of several engines, workers or stages had other weights or settings than the rest: a "
    "replica that missed an update, a worker with another configuration."
)
CHANGE = (
    "Look up what these responses share (engine, worker, step, file), and compare its weights and "
    "settings with those of another; --earlier-model MODEL tests stale weights."
)
SOURCE = "one of several engine replicas that missed a weight update"
_FEW = 0.2  # of the tokens: fewer are a tail


def check(evidence: Evidence) -> Finding:
    """Find two kinds of responses by their gaps: `far_responses.find_far_responses`."""
    sample, far = evidence.sample, evidence.far_responses
    measure = "times the gap of the others"
    if far is None:
        return clear(NAME, 1.0, measure, _power(sample))
    if evidence.weights_differ:
        reason = "the trainer's weights are newer, perhaps by different numbers of steps"
        return untested(NAME, reason)
    far_N = far.inside_S[sample.response_N]
    abs_d_N = np.abs(sample.d_N)
    gap, others = float(abs_d_N[far_N].mean()), float(abs_d_N[~far_N].mean())
    rows = (
        ("responses in it", int(far.inside_S.sum())),
        ("mean |Δlog p| in it, nats", gap),
        ("in the others, nats", others),
        ("share of the tokens", float(far_N.mean())),
    )
    times = gap / others if others else np.inf
    if far_N.mean() <= _FEW or gap <= evidence.expected.low:
        return clear(NAME, times, measure, _power(sample), rows)
    sentence = (
        f"The gap is {gap:.2g} nats {far.where}, and {others:.2g} in the others: {times:.2g} times."
    )
    left_N = np.where(far_N, sample.d_N / times, sample.d_N)
    return Finding(
        NAME, "found", times, measure, sentence, rows, left_N=left_N, beyond_expected=True
    )


def _power(sample: Sample) -> str:
    """The gap that tells two kinds apart, if enough responses are long enough for a mean."""
    count_S = np.bincount(sample.response_N, minlength=sample.num_responses)
    long = int((count_S >= SHORTEST).sum())
    if long < 2 * FEWEST:
        return no_power(f"{long:,} of {sample.num_responses:,} responses have {SHORTEST} tokens")
    return f"{TIMES:g} times the others’ gap in > {percent(_FEW)} of the tokens"
