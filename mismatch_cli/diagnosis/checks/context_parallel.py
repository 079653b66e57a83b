"""Single tokens that are wrong where context parallelism cuts the sequence."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row, untested
from mismatch_cli.diagnosis.model import SkippedReading
from mismatch_cli.diagnosis.power import clear, of_tokens
from mismatch_cli.diagnosis.sample import WITHOUT_PROMPTS, Sample

NAME, STAGE = "context-parallel", 4
TITLE = "Wrong at the cuts of context parallelism"
CAUSE = (
    "The labels were shifted after the sequence was cut: the last position of each part has the "
    "wrong next token."
)
CHANGE = (
    "Shift the labels before the sequence is cut, or exchange the first label of each part; a run "
    "without context parallelism confirms it."
)
SOURCE = "verl PR 4250 (labels rolled after the split: one outlier at each cut)"
MEASURE = "of the outlying tokens at cuts"
PARTS = (2, 4, 8, 16, 32)  # equal parts of a sequence: CP, or 2 · CP for balanced halves
_BESIDE = (0, -1, 1)  # tokens
_OUTLYING = 10.0  # typical gaps
_FEWEST = 12  # outlying tokens
_AT_CUTS, _BY_CHANCE = 0.8, 0.2  # of the outlying tokens, of all


class Cuts(NamedTuple):
    """Where sequences may be cut."""

    parts: int
    whole: str  # what is cut into these parts
    at_N: np.ndarray  # bool


def check(evidence: Evidence) -> Finding:
    """Where in their sequences, prompt and response together, tokens have ten times the typical
    gap: at the bounds of equal parts?
    """
    sample = evidence.sample
    if sample.prompt_length_S is None:
        return untested(NAME, WITHOUT_PROMPTS)
    outlying_N = np.asarray(sample.u_N >= _OUTLYING)
    if outlying_N.sum() < _FEWEST:
        return clear(NAME, 0.0, MEASURE, of_tokens(_FEWEST, sample))
    length_S = sample.prompt_length_S + sample.length_S
    cuts = max(_cuts(sample, length_S), key=lambda cuts: _score(cuts, outlying_N))
    share, chance = float(cuts.at_N[outlying_N].mean()), float(cuts.at_N.mean())
    rows: tuple[Row, ...] = (
        ("tokens with ten times the typical gap", int(outlying_N.sum())),
        (f"of them at k/{cuts.parts} of {cuts.whole}", share),
        ("of all tokens there", chance),
    )
    if share < _AT_CUTS or chance > _BY_CHANCE:
        return clear(NAME, share, MEASURE, of_tokens(_FEWEST, sample), rows)
    left_N, side = left_of_cuts(evidence, cuts.at_N & outlying_N)
    sentence = (
        f"{100 * share:.0f} % of the tokens with a huge gap are at k/{cuts.parts} of "
        f"{cuts.whole}, where {100 * chance:.1f} % of all tokens are{side}."
    )
    return Finding(NAME, "found", share, MEASURE, sentence, rows, left_N=left_N)


def _score(cuts: Cuts, outlying_N: np.ndarray) -> tuple[bool, float]:
    """A key that puts the fewest parts whose cuts have the outlying tokens above those that have
    fewer of them.
    """
    share = float(cuts.at_N[outlying_N].mean())
    if share < _AT_CUTS:
        return False, share
    return True, -float(cuts.at_N.mean())


def _cuts(sample: Sample, length_S: np.ndarray) -> Iterator[Cuts]:
    """The cuts of the sequences' own lengths and of the longest, in tokens, padded to multiples of
    the number of parts.
    """
    position_N = sample.axis_N("context")
    own_N = length_S[sample.response_N]
    longest_N = np.full_like(own_N, length_S.max())
    for parts in PARTS:
        for whole, length_N in (("the sequence", own_N), ("the longest sequence", longest_N)):
            part_N = -(-length_N // parts)
            for beside in _BESIDE:
                yield Cuts(parts, whole, (position_N - beside) % part_N == 0)


def left_of_cuts(evidence: Evidence, wrong_N: np.ndarray) -> tuple[np.ndarray, str]:
    """The gap with the model's own numbers in these tokens, or without them; and the side that
    the model names.
    """
    d_N = evidence.sample.d_N
    off_N = _off_the_model(evidence)
    if off_N is not None and not np.isnan(off_N[wrong_N]).all():
        left_N = np.where(wrong_N, d_N - off_N, d_N)
        if np.nansum(np.abs(left_N)) <= np.abs(d_N).sum() / 2:
            return left_N, ": the trainer's numbers there are not its model's"
    return np.where(wrong_N, np.nan, d_N), ""


def _off_the_model(evidence: Evidence) -> np.ndarray | None:
    """The trainer's log π less its model's, nats; None if no model read the responses."""
    if evidence.readings is None:
        return None
    try:
        return evidence.readings.off_T[evidence.sample.index_N]
    except SkippedReading:
        return None
