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
    length: str  # of what
    at_N: np.ndarray  # bool


def check(evidence: Evidence) -> Finding:
    """Where in their sequences, prompt and response together, tokens have ten times the typical
    gap: at the bounds of equal parts?
    """
    sample = evidence.sample
    if sample.prompt_length_S is None:
        return untested(NAME, WITHOUT_PROMPTS)
    outlying_N = _outlying(sample)
    if outlying_N.sum() < _FEWEST:
        return clear(NAME, 0.0, MEASURE, of_tokens(_FEWEST, sample))
    own_S = sample.prompt_length_S + sample.length_S
    cuts = max(_cuts(sample, own_S), key=lambda cuts: _score(cuts, outlying_N))
    share, chance = float(cuts.at_N[outlying_N].mean()), float(cuts.at_N.mean())
    rows: tuple[Row, ...] = (
        ("tokens with ten times the typical gap", int(outlying_N.sum())),
        (f"of them at k/{cuts.parts} of {cuts.length}", share),
        ("of all tokens there", chance),
    )
    if share < _AT_CUTS or chance > _BY_CHANCE:
        return clear(NAME, share, MEASURE, of_tokens(_FEWEST, sample), rows)
    left_N, side = left_of_cuts(evidence, cuts.at_N & outlying_N)
    sentence = (
        f"{100 * share:.0f} % of the tokens with a huge gap are at k/{cuts.parts} of "
        f"{cuts.length}, where {100 * chance:.1f} % of all tokens are{side}."
    )
    return Finding(NAME, "found", share, MEASURE, sentence, rows, left_N=left_N)


def _outlying(sample: Sample) -> np.ndarray:
    return np.asarray(sample.u_N >= _OUTLYING)


def _score(cuts: Cuts, outlying_N: np.ndarray) -> tuple[bool, float]:
    """The fewest parts whose cuts have the outlying tokens, before those that have fewer."""
    share, chance = float(cuts.at_N[outlying_N].mean()), float(cuts.at_N.mean())
    return share >= _AT_CUTS, -chance if share >= _AT_CUTS else share


def _cuts(sample: Sample, own_S: np.ndarray) -> Iterator[Cuts]:
    """The cuts of the sequences' own lengths and of the longest, in tokens, padded to multiples of
    the number of parts.
    """
    position_N = sample.axis_N("context")
    own_N = own_S[sample.response_N]
    lengths = {"the sequence": own_N, "the longest sequence": np.full_like(own_N, own_S.max())}
    for parts in PARTS:
        for words, length_N in lengths.items():
            part_N = -(-length_N // parts)
            for beside in _BESIDE:
                yield Cuts(parts, words, (position_N - beside) % part_N == 0)


def left_of_cuts(evidence: Evidence, wrong_N: np.ndarray) -> tuple[np.ndarray, str]:
    """The gap with the model's own numbers in these tokens, or without them; and the side that
    the model names.
    """
    sample = evidence.sample
    try:
        off_N = None if evidence.readings is None else evidence.readings.off_T[sample.index_N]
    except SkippedReading:
        off_N = None
    if off_N is None or np.isnan(off_N[wrong_N]).all():
        return sample.left_without(_in_sample(sample, wrong_N)), ""
    left_N = np.where(wrong_N, sample.d_N - off_N, sample.d_N)
    if np.nansum(np.abs(left_N)) > np.abs(sample.d_N).sum() / 2:
        return sample.left_without(_in_sample(sample, wrong_N)), ""
    return left_N, ": the trainer's numbers there are not its model's"


def _in_sample(sample: Sample, wrong_N: np.ndarray) -> np.ndarray:
    wrong_T = np.zeros(len(sample.logq_T), dtype=bool)
    wrong_T[sample.index_N[wrong_N]] = True
    return wrong_T
