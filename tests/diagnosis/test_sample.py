"""Columns of a sample by hand, and which responses are in it."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest

from mismatch_cli.base.hashing import hash_keys, prompt_groups
from mismatch_cli.diagnosis.sample import NO_LIMIT, Sample, SampleCollector, seen_before
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.rules.batch import TokenBatch
from tests.diagnosis.samples import few_responses
from tests.metrics.batches import make_batch

NAN = np.nan


def three_responses() -> Sample:
    """Of three, none and four tokens, of which the second and the last do not count."""
    return few_responses(
        [3, 0, 4],
        prompt_id_S=np.array([7, 8, 9]),
        prompt_length_S=np.array([10, 20, 30]),
        logq_T=-np.array([1.0, 2, 3, 4, 5, 6, 7]),
        logp_T=-np.array([1.5, 2, 2, 4, 7, 6, 0]),
        counts_T=np.array([True, False, True, True, True, True, False]),
        topk_logq_TK=np.zeros((7, 2)),
        topk_logp_TK=np.zeros((7, 2)),
    )


def test_tokens_know_their_response_place_and_prompt():
    sample = three_responses()
    assert sample.num_responses == 3 and sample.num_counted == 5
    assert sample.length_S.tolist() == [3, 0, 4]
    assert sample.response_T.tolist() == [0, 0, 0, 2, 2, 2, 2]
    assert sample.position_T.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert sample.last_T.tolist() == [False, False, True, False, False, False, True]
    assert sample.index_N.tolist() == [0, 2, 3, 4, 5]
    assert sample.response_N.tolist() == [0, 0, 2, 2, 2]
    assert sample.axis_N("response").tolist() == [0, 2, 0, 1, 2]
    assert sample.axis_N("context").tolist() == [10, 12, 30, 31, 32]
    alone = few_responses([3, 2])
    assert alone.axis_N("context").tolist() == [0, 1, 2, 0, 1]
    group_S = prompt_groups(np.array([7, 8, 9]))
    assert sample.group_N.tolist() == group_S[[0, 0, 2, 2, 2]].tolist()
    assert [span.stop - span.start for span in sample.spans()] == [3, 0, 4]


def test_a_gap_is_log_p_less_log_q():
    sample = three_responses()
    assert sample.logq_N.tolist() == [-1, -3, -4, -5, -6]
    assert sample.logp_N.tolist() == [-1.5, -2, -4, -7, -6]
    assert sample.d_N.tolist() == [-0.5, 1, 0, -2, 0]
    assert sample.abs_d_T.tolist() == [0.5, 0, 1, 0, 2, 0, 7]
    drop_T = np.array([False, True, True, False, False, True, True])
    np.testing.assert_array_equal(sample.left_without(drop_T), [-0.5, NAN, 0, -2, NAN])


def test_another_gap_another_choice_and_other_values_leave_the_rest():
    sample = three_responses()
    changed = sample.with_gap(np.array([0.25, NAN, 1.0, 0.0, -1.0]))
    assert changed.counts_T.tolist() == [True, False, False, True, True, True, False]
    np.testing.assert_array_equal(changed.logp_T, [-0.75, -2, NAN, -3, -5, -7, 0])
    assert changed.topk_logp_TK is None and changed.topk_logq_TK is sample.topk_logq_TK
    chosen_T = np.array([True, True, False, False, True, True, True])
    only = sample.only(chosen_T)
    assert only.counts_T.tolist() == [True, False, False, False, True, True, False]
    assert sample.num_counted == 5, "the first one is as it was"
    mixed = sample.with_tokens_of(changed, chosen_T)
    assert mixed.logp_T.tolist() == [-0.75, -2, -2, -4, -5, -7, 0]
    assert mixed.counts_T.tolist() == [True, False, True, True, True, True, False]
    assert mixed.topk_logp_TK is None


def test_what_is_typical_is_by_level_of_log_q(rng):
    """The 80 % quantile of |d| in levels of 64 tokens or more, at most 32; at least a thousandth of
    the mean.
    """
    for tokens, levels in ((1, 1), (63, 1), (127, 1), (128, 2), (200, 3), (32 * 64 + 100, 32)):
        logq_T = -rng.exponential(1.0, tokens)
        d_T = -logq_T * rng.normal(size=tokens)
        d_T[logq_T > -0.3] = 0.0
        sample = few_responses([tokens], logq_T=logq_T, logp_T=logq_T + d_T)
        expected_N = np.empty(tokens)
        for level in np.array_split(np.argsort(logq_T), levels):
            typical = np.quantile(np.abs(d_T[level]), 0.8)
            expected_N[level] = max(typical, 1e-3 * np.abs(d_T).mean(), 1e-9)
        assert sample.typical_N == pytest.approx(expected_N, rel=1e-6)
        assert sample.u_N == pytest.approx(np.minimum(np.abs(sample.d_N) / sample.typical_N, 10))
    assert few_responses([3]).typical_N.tolist() == [1e-9] * 3
    assert len(few_responses([2], counts_T=np.zeros(2, dtype=bool)).typical_N) == 0


def test_a_far_token_has_ten_typical_gaps():
    d_T = np.array([1.0, *[0.01] * 9])
    sample = few_responses([10], logp_T=-1.0 + d_T)
    assert sample.u_N == pytest.approx([10.0, *[1.0] * 9])


SIZES = [3, 5, 2, 4, 1, 6, 3]


def rows_batch(numbers: list[int]) -> TokenBatch:
    """Responses whose log-probabilities are their numbers."""
    return make_batch(
        [[-1.0 - number] * SIZES[number] for number in numbers],
        logp_recomputed=[[-1.5 - number] * SIZES[number] for number in numbers],
        prompt_id=np.array([5, 4, 5, 4, 3, 3, 5])[numbers],
        sample_index=np.array([1, 0, 0, 1, 0, 1, 0])[numbers],
        step=np.array([0, 1, 0, 1, 2, 0, 2])[numbers],
    )


ORDER = [5, 2, 0, 1, 3, 4, 6]  # by step, prompt and sample


@pytest.mark.parametrize("most", [1, 4, 8, 9, 12, 17, 23, 24, 40])
def test_the_responses_with_the_smallest_hashes_are_in_the_sample(most, rng):
    """At most so many tokens, but one response at least; in one batch, or in parts."""
    batch = rows_batch(list(range(len(SIZES))))
    hash_S = hash_keys(batch.prompt_id_S, batch.sample_index_S, batch.step_S, seed=2)
    chosen, tokens, limit_of_all = [], 0, NO_LIMIT
    for number in np.argsort(hash_S).tolist():
        if chosen and tokens + SIZES[number] > most:
            limit_of_all = int(hash_S[number])
            break
        tokens += SIZES[number]
        chosen.append(number)
    expected = [number for number in ORDER if number in chosen]
    whole, merged = (
        SampleCollector(PAIRS["mismatch"], most),
        SampleCollector(PAIRS["mismatch"], most),
    )
    whole.update(batch)
    for turn, part in enumerate(np.array_split(rng.permutation(len(SIZES)), 4)):
        limit = merged.limit if turn % 2 else NO_LIMIT
        later = SampleCollector(PAIRS["mismatch"], most, limit)
        later.update(rows_batch(part.tolist()))
        merged.merge(pickle.loads(pickle.dumps(later)))
    for collector in (whole, merged):
        sample = collector.result()
        firsts = sample.logq_T[sample.offset_S1[:-1]]
        assert [int(-1 - first) for first in firsts] == expected
        assert sample.length_S.tolist() == [SIZES[number] for number in expected]
        assert (sample.logp_T == sample.logq_T - 0.5).all() and sample.counts_T.all()
    assert whole.limit == limit_of_all


def test_at_most_a_quarter_of_a_million_tokens_are_in_the_sample():
    half = np.full(2**17, -1.0)
    collector = SampleCollector(PAIRS["mismatch"])
    collector.update(make_batch([half] * 3, logp_recomputed=[half] * 3))
    assert len(collector.result().logq_T) == 2**18


def test_a_response_at_the_limit_is_not_in_the_sample():
    batch = make_batch([[-1.0], []], logp_recomputed=[[-1.0], []], prompt_id=[[9, 9]])
    own = int(hash_keys(np.array([9]), np.array([0]), np.array([0]), seed=2)[0])
    for limit, responses in ((own, 0), (own + 1, 1), (NO_LIMIT, 1)):
        collector = SampleCollector(PAIRS["mismatch"], limit=limit)
        collector.update(batch)
        assert collector.result().num_responses == responses
        earlier, later = (
            SampleCollector(PAIRS["mismatch"], limit=limit),
            SampleCollector(PAIRS["mismatch"]),
        )
        later.update(batch)
        earlier.merge(later)
        assert earlier.result().num_responses == responses


def test_what_was_not_measured_is_not_in_the_sample():
    collector = SampleCollector(PAIRS["mismatch"])
    collector.update(make_batch([[-1.0]]))
    sample = collector.result()
    assert sample.num_responses == 0 and len(sample.logq_T) == 0 and sample.origin_S == {}


def test_ranks_that_are_left_out_still_give_the_gap_of_the_sampled_token():
    """Ten ranks of four tokens: the sampled one is of rank 0, 9 and 3, and in none."""
    ids_TK = np.tile(np.arange(10, 20), (4, 1))
    logq_TK = -np.arange(40.0).reshape(4, 10)
    batch = make_batch(
        [[-1.0, -2.0], [-3.0, NAN]],
        logp_recomputed=[[-1.0, -2.0], [-3.0, -4.0]],
        response_ids=[[10, 19], [13, 5]],
        topk_ids=ids_TK,
        topk_logp_rollout=logq_TK,
        topk_logp_recomputed=logq_TK * 1.5,
        entropy_trainer=np.arange(4.0),
        truncated=np.array([True, False]),
        loss_mask=[[True, False], [True, True]],
    )
    collector = SampleCollector(PAIRS["mismatch"])
    origin_S = {"rank": np.array([3, 4]), "file": np.array(["a", "b"])}
    collector.update(batch, pa.array([[10], [1, 2]]), origin_S)
    sample = collector.result()
    np.testing.assert_allclose(sample.topk_d_T, [0.0, -19 / 2, -23 / 2, NAN])
    assert sample.topk_logq_TK.tolist() == logq_TK[:, :8].tolist()
    assert sample.topk_logp_TK.tolist() == (1.5 * logq_TK[:, :8]).tolist()
    assert sample.entropy_T.tolist() == [0, 1, 2, 3] and sample.truncated_S.tolist() == [
        True,
        False,
    ]
    assert sample.counts_T.tolist() == [True, False, True, False]
    assert sample.seen_T.tolist() == [True, False, False, False]
    assert sample.topk_seen_TK.shape == (4, 8) and sample.topk_seen_TK[:, 0].tolist() == [
        True,
        True,
        False,
        False,
    ]
    assert sample.topk_seen_TK[3].tolist() == [False, False, False, True, *[False] * 4]
    origins = {name: value_S.tolist() for name, value_S in sample.origin_S.items()}
    assert origins == {"rank": [3, 4], "file": ["a", "b"]}
    collector.update(make_batch([[-1.0]], logp_recomputed=[[-1.0]], step=[[1]]))
    assert collector.result().origin_S == {}, "not of every response"


def test_an_id_above_all_of_the_context_has_not_been_seen():
    columns = seen_before(np.array([2]), np.array([3, 2]), np.array([[9, 3], [3, 9]]))
    assert columns["seen_T"].tolist() == [False, True]
    assert columns["topk_seen_TK"].tolist() == [[False, False], [True, False]]
    assert seen_before(np.array([2]), np.array([3]), None).keys() == {"seen_T"}
