"""Cuts of sequences, in a few whose answer is computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import context_parallel
from mismatch_cli.diagnosis.checks.context_parallel import Cuts
from mismatch_cli.diagnosis.model import SkippedReading
from tests.diagnosis.samples import SampleColumns


def sequences(prompts: list[int], lengths: list[int], **columns: object) -> SampleColumns:
    length_S, prompt_S = np.array(lengths), np.array(prompts)
    response_T = np.repeat(np.arange(len(lengths)), length_S)
    position_T = np.arange(len(response_T)) - (np.cumsum(length_S) - length_S)[response_T]
    context_T = position_T + prompt_S[response_T]
    return SampleColumns(
        response_T=response_T,
        index_N=np.arange(len(response_T)),
        length_S=length_S,
        prompt_length_S=prompt_S,
        num_responses=len(lengths),
        axis_N=lambda axis: {"context": context_T}[axis],
        context_T=context_T,
        **columns,
    )


def test_sequences_are_cut_into_equal_parts_and_padded_to_a_multiple():
    """Of 4 + 7 and 2 + 12 tokens: halves of 6 and 7, or of 7 for the longest; and so on."""
    sample = sequences([4, 2], [7, 12])
    length_S = np.array([11, 14])
    cuts = list(context_parallel._cuts(sample, length_S))
    assert len(cuts) == 5 * 2 * 3
    at_cuts = {}
    for place, cut in enumerate(cuts):
        at_cuts[cut.parts, cut.whole, (0, -1, 1)[place % 3]] = cut.at_N
    for parts in (2, 4, 8, 16, 32):
        for whole in ("the sequence", "the longest sequence"):
            for beside in (0, -1, 1):
                expected = []
                for s, position in zip(sample.response_T, sample.context_T, strict=True):
                    length = int(length_S[s]) if whole == "the sequence" else 14
                    part = (length + parts - 1) // parts
                    expected.append((position - beside) % part == 0)
                assert at_cuts[parts, whole, beside].tolist() == expected


def test_of_the_cuts_at_outlying_tokens_those_at_the_fewest_tokens_are_named():
    outlying_N = np.array([1, 1, 1, 1, 1, 0, 0, 0, 0, 0]) > 0
    few = Cuts(2, "the sequence", np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0]) > 0)
    many = Cuts(4, "the sequence", np.array([1, 1, 1, 1, 1, 1, 0, 0, 0, 0]) > 0)
    less = Cuts(8, "the sequence", np.array([1, 1, 1, 0, 0, 0, 0, 0, 0, 0]) > 0)
    least = Cuts(16, "the sequence", np.array([1, 1, 0, 0, 0, 0, 0, 0, 0, 0]) > 0)
    assert context_parallel._score(few, outlying_N) == (True, pytest.approx(-0.4))
    assert context_parallel._score(many, outlying_N) == (True, pytest.approx(-0.6))
    assert context_parallel._score(less, outlying_N) == (False, pytest.approx(0.6))
    ranked = sorted(
        [many, least, few, less], key=lambda cut: context_parallel._score(cut, outlying_N)
    )
    assert [cut.parts for cut in ranked] == [16, 8, 4, 2]


def test_the_cuts_are_named_with_the_share_of_the_outlying_tokens():
    """Twenty sequences of 12 + 28 are cut into four: at 20 and 30, and fifteen tokens are there of
    sixteen that outlie.
    """
    sample = sequences([12] * 20, [28] * 20)
    u_N = np.ones(560)
    at_20, at_30 = (np.flatnonzero(sample.context_T == place) for place in (20, 30))
    u_N[[*at_20[:8], *at_30[:7], 5]] = 10.0
    sample.u_N, sample.d_N = u_N, 0.1 * u_N
    sample.left_without = None
    evidence = SimpleNamespace(sample=sample, readings=None)
    finding = context_parallel.check(evidence)
    assert (finding.check, finding.status) == ("context-parallel", "found")
    assert finding.effect == 15 / 16 and finding.measure == "of the outlying tokens at cuts"
    assert finding.evidence == (
        ("tokens with ten times the typical gap", 16),
        ("of them at k/4 of the sequence", 15 / 16),
        ("of all tokens there", 2 / 28),
    )
    assert finding.sentence == (
        "94 % of the tokens with a huge gap are at k/4 of the sequence, where 7.1 % of all tokens "
        "are."
    )
    assert np.isnan(finding.left_N).sum() == 15
    sample.u_N[at_20[:5]] = 9.9
    few = context_parallel.check(evidence)
    assert (few.status, few.effect) == ("clear", 0.0)
    assert few.reason == "would have found it in ≥ 12 tokens (2.1 %)"
    assert few.evidence == ()
    sample.prompt_length_S = None
    untested = context_parallel.check(evidence)
    assert (untested.check, untested.reason) == ("context-parallel", "the trace has no prompts")


def test_outlying_tokens_elsewhere_are_clear():
    sample = sequences([12] * 20, [28] * 20)
    sample.u_N = np.where(np.arange(560) % 9 == 5, 10.0, 1.0)
    sample.d_N = 0.1 * sample.u_N
    finding = context_parallel.check(SimpleNamespace(sample=sample, readings=None))
    assert finding.status == "clear" and 0 < finding.effect < 0.8
    assert len(finding.evidence) == 3


@pytest.mark.parametrize(("left", "by_model"), [(0.99, True), (1.01, False)])
def test_the_models_numbers_are_taken_if_they_leave_half_of_the_gap(left, by_model):
    """Of 2 nats on the two wrong tokens, the second of which was not scored."""
    d_N = np.array([0.0, 1.5, 0.5])
    off_T = np.array([0.0, 1.5 - left, np.nan])

    class Readings:
        pass

    readings = Readings()
    readings.off_T = off_T
    evidence = SimpleNamespace(
        sample=SimpleNamespace(d_N=d_N, index_N=np.arange(3)), readings=readings
    )
    left_N, side = context_parallel.left_of_cuts(evidence, np.array([False, True, True]))
    assert bool(side) == by_model
    expected = [0.0, left, np.nan] if by_model else [0.0, np.nan, np.nan]
    np.testing.assert_allclose(left_N, expected)


def test_a_model_that_skipped_the_reading_says_nothing():
    class Readings:
        @property
        def off_T(self):
            raise SkippedReading("too slow")

    sample = SimpleNamespace(index_N=np.arange(3))
    for readings in (None, Readings()):
        evidence = SimpleNamespace(sample=sample, readings=readings)
        assert context_parallel._off_the_model(evidence) is None
