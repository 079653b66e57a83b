"""The shorter checks, on a few tokens whose answer is computed by hand."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import (
    _read_again,
    credit,
    end_of_sequence,
    exchanged_responses,
    masked_tokens,
    prefix_cache,
    uneven_responses,
)
from mismatch_cli.diagnosis.far_responses import Subset
from mismatch_cli.diagnosis.group_estimates import mean_over_prompts
from mismatch_cli.diagnosis.readings import Reading
from mismatch_cli.diagnosis.sample import Sample
from tests.diagnosis.samples import SampleColumns


def test_a_prompt_is_old_in_a_step_after_its_first():
    sample = SimpleNamespace(
        prompt_id_S=np.array([7, 3, 7, 3, 7, 9]), step_S=np.array([4, 2, 3, 2, 3, 1])
    )
    is_old_S = prefix_cache._is_old_S(sample)
    assert is_old_S.tolist() == [True, False, False, False, False, False]


def cached(times: float, old: int = 32, new: int = 32, noise: float = 0.0):
    """The finding for responses to new prompts, and to as many that recur in the second step."""
    rng = np.random.default_rng(0)
    prompts = np.concatenate([np.arange(new), np.arange(old)])
    is_old_S = np.arange(new + old) >= new
    response_N = np.repeat(np.arange(new + old), 4)
    u_N = np.where(is_old_S[response_N], times, 1.0) * np.exp(
        noise * rng.normal(size=len(response_N))
    )
    sample = SampleColumns(
        prompt_id_S=prompts,
        step_S=is_old_S.astype(int),
        response_T=response_N,
        index_N=np.arange(len(response_N)),
        u_N=u_N,
        d_N=0.1 * u_N,
        group_N=prompts[response_N],
    )
    return prefix_cache.check(SimpleNamespace(sample=sample)), sample, is_old_S[response_N]


@pytest.mark.parametrize(
    ("times", "noise", "status"),
    [(1.55, 0.1, "found"), (1.45, 0.1, "clear"), (1.6, 1.5, "clear")],
)
def test_old_prompts_have_half_as_much_again_beyond_six_standard_errors(times, noise, status):
    finding, sample, is_old_N = cached(times, noise=noise)
    old, new = (mean_over_prompts(sample.u_N[o], sample.group_N[o]) for o in (is_old_N, ~is_old_N))
    factor = old.value / new.value
    assert (finding.check, finding.status) == ("prefix-cache", status)
    assert finding.effect == pytest.approx(factor)
    assert finding.evidence == (
        ("responses to prompts seen before", 32),
        ("to new prompts", 32),
        ("z", old.z_of_log_ratio(new)),
    )
    if status == "found":
        assert finding.left_N == pytest.approx(np.where(is_old_N, sample.d_N / factor, sample.d_N))
        assert f"is {factor:.3g} times that on new ones" in finding.sentence


def test_ten_prompts_of_either_kind_are_compared():
    for old, new, status in ((10, 10, "clear"), (9, 10, "untested")):
        finding, *_ = cached(1.0, old, new, noise=0.1)
        assert (finding.check, finding.status) == ("prefix-cache", status)


def pairs_of(against: int, count: int = 40, groups: int = 10, permuted: int = 0):
    """Pairs of as many prompts, of which the first ones have all that are turned."""
    count_G = np.array([count // groups] * groups + [0])
    against_G = np.minimum(np.maximum(against - 4.0 * np.arange(groups + 1), 0), 4)
    against_G[groups] = 0
    permuted_G = np.arange(groups + 1) < permuted
    pairs = SimpleNamespace(
        count_G=count_G, against_G=against_G, permuted_G=permuted_G, share=against / count
    )
    evidence = SimpleNamespace(credit=SimpleNamespace(pairs=lambda: pairs, varying=3))
    return credit.check(evidence)


@pytest.mark.parametrize(
    ("against", "permuted", "words"),
    [
        (33, 0, "their sign is turned"),
        (32, 7, "they fit in another order, so they belong to other responses of the same prompt"),
        (32, 6, "they belong to other responses"),
    ],
)
def test_advantages_are_turned_permuted_or_of_others(against, permuted, words):
    """32 of 40 pairs are those of eight prompts."""
    finding = pairs_of(against, permuted=permuted)
    assert (finding.check, finding.status, finding.effect) == ("credit", "found", against / 40)
    assert finding.sentence == (
        f"In {against} of 40 pairs of responses to one prompt the smaller reward has the larger "
        f"advantage: {words}."
    )
    assert finding.evidence == (
        ("pairs of responses with different rewards", 40),
        ("of these, the smaller reward has the larger advantage", float(against)),
        ("prompts compared", 10),
        ("prompts whose advantages fit in another order", permuted),
        ("responses with several advantages, left out", 3),
    )


@pytest.mark.parametrize(("against", "status"), [(28, "found"), (20, "clear"), (8, "clear")])
def test_a_fifth_of_the_pairs_may_be_turned_and_three_standard_errors_more(against, status):
    """Of 28 pairs in 7 of 10 prompts the error is 0.153, of 20 it is 0.167."""
    finding = pairs_of(against)
    share = against / 40
    error = np.sqrt(share * (1 - share) / 9)
    assert finding.status == status
    assert (share - 3 * error > 0.2) == (status == "found")
    if status == "clear":
        shown = 100 * (0.2 + 3 * error)
        assert finding.reason == f"would have found it in ≥ {shown:.2g} % of the pairs"


def test_credit_takes_thirty_pairs_of_eight_prompts():
    for count, groups, status in ((32, 8, "found"), (35, 7, "untested"), (24, 8, "untested")):
        finding = pairs_of(count, count, groups)
        assert (finding.check, finding.status) == ("credit", status)


def test_a_response_is_looked_up_by_its_step_prompt_and_sample():
    sample = SimpleNamespace(
        step_S=np.array([1, 1, 2]),
        prompt_id_S=np.array([7, 8, 7]),
        sample_index_S=np.array([0, 3, 0]),
    )
    heads = SimpleNamespace(index_of={(1, 8, 3): 4, (2, 7, 0): 0, (7, 1, 0): 9})
    evidence = SimpleNamespace(sample=sample, exchanges=SimpleNamespace(heads=heads))
    assert exchanged_responses._head_S(evidence).tolist() == [-1, 4, 0]


@pytest.mark.parametrize(("misfits", "others"), [(2, True), (3, False)])
def test_misfits_of_unknown_groups_are_exchanged_if_seven_tenths_are(misfits, others, monkeypatch):
    """Two heads are exchanged, of two misfits or of three."""
    monkeypatch.setattr(exchanged_responses, "_head_S", lambda _: np.array([0, 1, -1, -1, 2]))
    gap_S = np.array([9.0, 0.0, 9.0, 0.0, 0.0])
    misfit_R = np.array([1, 1, misfits > 2]) > 0
    evidence = SimpleNamespace(
        exchanges=SimpleNamespace(misfit_R=misfit_R), alignment=SimpleNamespace(gap_S=gap_S)
    )
    exchanged_R = np.array([True, True, False])
    exchanged_S = exchanged_responses._exchanged_S(evidence, exchanged_R)
    assert exchanged_S.tolist() == [True, True, others, False, False]
    assert exchanged_responses._repaired_R(evidence).tolist() == [False, True, True]


def tokens_of(d_T: list[float], lengths: list[int], typical: float = 0.1) -> SampleColumns:
    tokens = len(d_T)
    response_T = np.repeat(np.arange(len(lengths)), lengths)
    stops = np.cumsum(lengths)
    sample = SampleColumns(
        logq_T=np.full(tokens, -9.0),
        logp_T=np.array(d_T) - 9.0,
        d_N=np.array(d_T),
        abs_d_T=np.abs(d_T),
        typical_N=np.full(tokens, typical),
        index_N=np.arange(tokens),
        counts_T=np.ones(tokens, dtype=bool),
        response_T=response_T,
        num_responses=len(lengths),
        offset_S1=np.concatenate([[0], stops]),
        last_T=np.isin(np.arange(tokens), stops - 1),
        truncated_S=np.zeros(len(lengths), dtype=bool),
        group_N=response_T,
    )
    sample.left_without = partial(Sample.left_without, sample)
    return sample


@pytest.mark.parametrize(
    ("gap", "typical", "is_huge"),
    [
        (2.01, 0.1, True), (1.99, 0.1, False), (2.9, 0.3, False), (3.1, 0.3, True),
        (4.1, 9.0, True), (3.9, 9.0, False), (-2.01, 0.1, True),
    ],
)  # fmt: skip
def test_a_gap_is_huge_beyond_two_nats_or_up_to_four_where_large_ones_are_typical(
    gap, typical, is_huge
):
    sample = tokens_of([0.0, gap, 0.0], [3], typical)
    assert masked_tokens._huge_T(sample).tolist() == [False, is_huge, False]


def masked(runs: dict[int, int], alone: int = 0, length: int = 40):
    """The finding for ten responses, with a run of huge gaps from the sixth token on in some, and
    single ones in the last.
    """
    d_T = np.full(10 * length, 0.1)
    for s, tokens in runs.items():
        d_T[length * s + 5 : length * s + 5 + tokens] = -5.0
    d_T[9 * length : 9 * length + 2 * alone : 2] = 5.0
    sample = tokens_of(d_T.tolist(), [length] * 10)
    counts = SimpleNamespace(zeros={}, sides={})
    evidence = SimpleNamespace(sample=sample, counts=counts, undone=())
    return masked_tokens.check(evidence), d_T


@pytest.mark.parametrize(
    ("runs", "alone", "status"),
    [
        ({0: 4, 1: 5}, 0, "found"),
        ({0: 4, 1: 5}, 6, "found"),
        ({0: 4, 1: 5}, 7, "clear"),
        ({0: 9}, 0, "clear"),
        ({0: 4, 1: 3}, 0, "clear"),
        (dict.fromkeys(range(4), 30), 0, "found"),
        (dict.fromkeys(range(4), 30) | {5: 4}, 0, "clear"),
    ],
    ids=["two runs", "six tenths", "less", "one response", "a short run", "three tenths", "many"],
)
def test_runs_of_four_huge_gaps_in_two_responses_were_not_sampled(runs, alone, status):
    finding, d_T = masked(runs, alone)
    assert (finding.check, finding.status) == ("masked-tokens", status)
    in_runs_T = d_T < 0
    if status == "found":
        tokens = int(in_runs_T.sum())
        assert finding.effect == tokens / 400
        assert finding.evidence == (
            ("responses with such a run", len(runs)),
            ("share of all huge gaps", tokens / (tokens + alone)),
        )
        assert np.isnan(finding.left_N).tolist() == in_runs_T.tolist()
        assert np.flatnonzero(finding.part.inside_S).tolist() == list(runs)
        assert finding.part.among_S.all()
    else:
        assert finding.reason == "would have found runs of 4 tokens, 2 nats apart, in 2 responses"


def ended(at_end: float, high: float = 0.5, responses: int = 40, truncated: int = 0):
    """The finding for responses of five tokens with gaps of 0.1 ± 0.01, and another at the end."""
    rng = np.random.default_rng(0)
    d_T = rng.uniform(0.09, 0.11, 5 * responses)
    d_T[4::5] *= at_end * 10
    sample = tokens_of(d_T.tolist(), [5] * responses)
    sample.truncated_S[:truncated] = True
    evidence = SimpleNamespace(
        sample=sample,
        counts=SimpleNamespace(zeros={}, sides={}),
        undone=(),
        expected=SimpleNamespace(high=high),
    )
    return end_of_sequence.check(evidence), sample


@pytest.mark.parametrize(
    ("at_end", "high", "status", "reason"),
    [
        (1.1, 0.5, "found", ""),
        (0.9, 0.5, "clear", "would have found a gap of ≥ 1 nats there"),
        (1.1, 1.3, "clear", "would have found a gap of ≥ 1.3 nats there"),
    ],
)
def test_the_gap_at_the_end_is_ten_times_that_elsewhere_and_beyond_the_expected(
    at_end, high, status, reason
):
    finding, sample = ended(at_end, high)
    at_end_N = sample.last_T
    last, others = np.abs(sample.d_N[at_end_N]).mean(), np.abs(sample.d_N[~at_end_N]).mean()
    assert (finding.check, finding.status) == ("end-of-sequence", status)
    assert finding.effect == pytest.approx(last / others)
    assert [value for _, value in finding.evidence[:2]] == pytest.approx([last, others])
    assert finding.reason == reason
    if status == "found":
        left_N = np.where(at_end_N, sample.d_N / finding.effect, sample.d_N)
        assert finding.left_N == pytest.approx(left_N)


def test_eight_responses_must_have_ended_on_their_own():
    assert ended(1.1, responses=12, truncated=4)[0].status == "clear"
    few, sample = ended(1.1, responses=12, truncated=5)
    assert (few.check, few.reason) == (
        "end-of-sequence",
        "fewer than 8 responses ended on their own",
    )
    spoiled_T = end_of_sequence.spoiled_T(SimpleNamespace(sample=sample))
    assert spoiled_T.tolist() == sample.last_T.tolist()


def uneven(far: int, low: float = 0.05, newer: bool = False, gap: float = 0.4):
    """The finding where so many of ten responses of eight tokens have a gap that is not 0.1."""
    inside_S = np.arange(10) < far
    d_T = np.where(np.repeat(inside_S, 8), gap, 0.1)
    sample = tokens_of(d_T.tolist(), [8] * 10)
    evidence = SimpleNamespace(
        sample=sample,
        far_responses=Subset(inside_S, np.ones(10, dtype=bool)) if far else None,
        weights_differ=newer,
        expected=SimpleNamespace(low=low),
    )
    return uneven_responses.check(evidence), sample


@pytest.mark.parametrize(
    ("far", "low", "newer", "status"),
    [
        (3, 0.05, False, "found"),
        (2, 0.05, False, "clear"),
        (3, 0.41, False, "clear"),
        (3, 0.05, True, "untested"),
        (0, 0.05, False, "clear"),
    ],
)
def test_more_than_a_fifth_of_the_tokens_are_uneven_responses(far, low, newer, status):
    finding, sample = uneven(far, low, newer)
    assert (finding.check, finding.status) == ("uneven-responses", status)
    if far and status != "untested":
        assert finding.effect == pytest.approx(4.0)
        assert [value for _, value in finding.evidence] == pytest.approx([far, 0.4, 0.1, far / 10])
    if status == "found":
        assert finding.left_N == pytest.approx(0.1) and finding.beyond_expected
        assert finding.sentence == (
            "The gap is 0.4 nats in 3 of 10 responses, and 0.1 in the others: 4 times."
        )
    if status == "clear":
        assert finding.reason == "would have found 3 times the others’ gap in > 20 % of the tokens"
    assert uneven_responses._power(sample).startswith("3 times")
    short = tokens_of([0.1] * 79, [7] + [8] * 9)
    assert uneven_responses._power(short) == "no power: 9 of 10 responses have 8 tokens"


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (0.49, "reproduces the trainer's numbers; as recorded, the rollout's."),
        (0.51, "is clearly nearer to the trainer's numbers: that explains 49 % of the gap."),
    ],
)
def test_a_reading_that_leaves_half_of_the_gap_reproduces_a_side(left, words):
    reading = Reading("another base", "trainer", np.array([0.1, np.nan]), left)
    sample = SimpleNamespace(index_N=np.arange(2), d_N=np.array([0.3, 0.2]))
    finding = _read_again._found("position-encoding", SimpleNamespace(sample=sample), reading)
    assert finding.sentence == f"With another base the model {words}"
    assert (finding.check, finding.status, finding.effect) == ("position-encoding", "found", left)
    assert finding.left_N == pytest.approx([0.1, 0.2 * left])
    assert [value for _, value in finding.evidence] == ["trainer", "another base", left]


@pytest.mark.parametrize(
    ("nearest", "gap", "high", "is_other"),
    [
        (0.19, 0.1, 0.01, False), (0.21, 0.1, 0.01, True), (0.19, 0.01, 0.1, False),
        (0.21, 0.01, 0.1, True), (3.9e-5, 0.0, 0.0, False), (4.1e-5, 0.0, 0.0, True),
    ],
)  # fmt: skip
def test_a_model_beyond_twice_the_gap_is_another_one(nearest, gap, high, is_other):
    readings = SimpleNamespace(distances={"rollout": 9.0, "trainer": nearest})
    evidence = SimpleNamespace(
        readings=readings,
        gap=SimpleNamespace(value=gap),
        expected=SimpleNamespace(high=high),
    )
    answer = _read_again.readings_of("padding", evidence)
    assert (answer is readings) != is_other
    if is_other:
        assert answer.reason.startswith(f"the model at hand is {nearest:.2g} nats per token from")
    evidence.readings = None
    assert _read_again.readings_of("padding", evidence).needs == "--trainer-model MODEL"
