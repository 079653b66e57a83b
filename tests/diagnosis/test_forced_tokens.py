"""Places at which all responses have one token, on a few whose answer is computed by hand."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import forced_tokens
from mismatch_cli.diagnosis.sample import Sample
from tests.diagnosis.samples import SampleColumns

FORCED = 99


def sample_of(lengths: list[int], place: int = 2, equal: int = 99, skipped: int = 0):
    """Responses with other ids everywhere but at one place: there the first `equal` responses have
    one id, which both sides call improbable by 2 and 5 nats. The first `skipped` tokens do not
    count.
    """
    length_S = np.array(lengths)
    response_T = np.repeat(np.arange(len(lengths)), length_S)
    position_T = np.arange(len(response_T)) - (np.cumsum(length_S) - length_S)[response_T]
    ids_T = 1000 + np.arange(len(response_T))
    is_forced_T = (position_T == place) & (response_T < equal)
    ids_T[is_forced_T] = FORCED
    logq_T, logp_T = np.full(len(ids_T), -1.0), np.full(len(ids_T), -1.01)
    logq_T[is_forced_T], logp_T[is_forced_T] = -2.0, -5.0
    counts_T = np.arange(len(ids_T)) >= skipped
    index_N = np.flatnonzero(counts_T)
    sample = SampleColumns(
        response_ids_T=ids_T,
        logq_T=logq_T,
        logp_T=logp_T,
        d_N=(logp_T - logq_T)[index_N],
        counts_T=counts_T,
        index_N=index_N,
        position_T=position_T,
        response_T=response_T,
        num_responses=len(lengths),
    )
    sample.left_without = partial(Sample.left_without, sample)
    return sample, is_forced_T


@pytest.mark.parametrize(
    ("lengths", "equal", "places"),
    [
        ([5] * 16, 16, [2]),
        ([5] * 15 + [2], 16, []),
        ([5] * 20, 18, [2]),
        ([5] * 20, 17, []),
        ([5] * 16 + [2] * 9, 99, [2]),
    ],
)
def test_a_place_has_sixteen_responses_of_which_nine_tenths_have_one_id(lengths, equal, places):
    sample, is_forced_T = sample_of(lengths, equal=equal)
    uniform = forced_tokens._uniform_places(sample)
    assert [place.position for place in uniform] == places
    for place in uniform:
        assert (place.token, place.responses) == (FORCED, sum(n > 2 for n in lengths))
        assert sorted(place.index.tolist()) == np.flatnonzero(is_forced_T).tolist()
    sample.response_ids_T = None
    assert forced_tokens._uniform_places(sample) == []


def test_tokens_that_do_not_count_are_at_no_place():
    """The first three tokens of the first of seventeen responses."""
    sample, is_forced_T = sample_of([5] * 17, skipped=3)
    (place,) = forced_tokens._uniform_places(sample)
    assert place.responses == 16
    assert sorted(place.index.tolist()) == np.flatnonzero(is_forced_T)[1:].tolist()


@pytest.mark.parametrize(
    ("logq", "logp", "elsewhere", "is_forced"),
    [
        (-1.1, -9.0, 0.7, True),
        (-0.9, -9.0, 0.7, False),
        (0.0, -1.1, 0.1, True),
        (0.0, -0.9, 0.08, False),
        (-3.0, -1.0, 0.19, True),
        (-3.0, -1.0, 0.21, False),
    ],
)
def test_a_token_is_forced_if_it_is_improbable_and_its_gap_ten_times_the_others(
    logq, logp, elsewhere, is_forced
):
    """A mean of one nat on either side, and of the engine unless it is certain."""
    sample, is_forced_T = sample_of([3] * 20, place=0)
    sample.logq_T[is_forced_T], sample.logp_T[is_forced_T] = logq, logp
    sample.d_N = np.where(is_forced_T, logp - logq, elsewhere * np.resize([1.0, -1.0], 60))
    (place,) = forced_tokens._uniform_places(sample)
    assert forced_tokens._is_forced(sample, place) == is_forced


def test_a_forced_token_is_named_with_its_place_from_1():
    """The eighteen of twenty responses that have it, at the second place of three that are forced;
    two places more are of another id.
    """
    sample, is_forced_T = sample_of([5] * 20, place=1, equal=18)
    sample.logq_T[is_forced_T] = np.linspace(-3.0, -1.0, 18)
    finding = forced_tokens.check(SimpleNamespace(sample=sample))
    assert (finding.check, finding.status, finding.effect) == ("forced-tokens", "found", 0.18)
    assert finding.measure == "share of tokens"
    assert finding.sentence == (
        "18 of 20 responses have token 99 at place 2, with a mean log μ of -2 and a mean log π of "
        "-5: it was forced, not sampled."
    )
    assert finding.evidence == (
        ("token", 99),
        ("place in the response, from 1", 2),
        ("places with a forced token", 1),
        ("mean −log μ there, nats", pytest.approx(2.0)),
        ("mean −log π there, nats", pytest.approx(5.0)),
    )
    assert np.isnan(finding.left_N).tolist() == is_forced_T.tolist()
    spoiled_T = forced_tokens.spoiled_T(SimpleNamespace(sample=sample))
    assert spoiled_T.tolist() == (sample.position_T == 1).tolist()


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        ([5] * 16 + [9] * 2, "would have found it in 90 % of the responses, at any of the first 5 places"),
        ([1] * 16, "would have found it in 90 % of the responses, at any of the first 1 place"),
        ([5] * 15, "no power: no place is reached by 16 responses"),
    ],
)  # fmt: skip
def test_places_that_sixteen_responses_reach_would_have_shown_it(lengths, reason):
    sample, _ = sample_of(lengths, equal=0)
    finding = forced_tokens.check(SimpleNamespace(sample=sample))
    assert finding.reason == reason
    if finding.status == "clear":
        assert finding.effect == 0.0
    sample.response_ids_T = None
    finding = forced_tokens.check(SimpleNamespace(sample=sample))
    assert (finding.check, finding.reason) == ("forced-tokens", "the trace has no token ids")
