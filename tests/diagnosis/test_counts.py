"""Counts over a whole trace, each by hand: impossible values, exact zeros, contradicting columns
and copies.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from mismatch_cli.diagnosis.counts import (
    Counts,
    ImprobableCopies,
    OwnColumns,
    SideAgreement,
    SideCounts,
    ZeroCounts,
    content_hashes,
    in_runs,
)
from mismatch_cli.diagnosis.sample import NO_LIMIT
from mismatch_cli.metrics.pairs import PAIRS
from tests.metrics.batches import make_batch

INF, NAN = np.inf, np.nan


def test_exact_zeros_nearly_certain_tokens_and_the_rest_are_counted():
    own_N = np.array([0.0, 0.0, 0.0, -0.04, -0.05, -0.03, -2.0, 0.01])
    other_N = np.array([-3.0, -1.0, -0.5, -4.0, -5.0, -0.5, -6.0, -1.5])
    zeros = ZeroCounts()
    for times in (1, 2):
        zeros.update(own_N, other_N)
        expected = ZeroCounts(
            tokens=1,
            gap=3.0,
            zeros=3,
            zeros_surprise=4.5,
            nearly=3,
            nearly_uncertain=2,
            rest=5,
            rest_surprise=17.0,
        )
        assert vars(zeros) == {name: times * value for name, value in vars(expected).items()}


def test_sums_of_float32_are_exact_to_more_digits():
    """Of a thousand values that float32 would add with errors."""
    other_N = np.full(1000, -1.1, dtype=np.float32)
    total = 1000 * float(np.float32(1.1))
    zeros = ZeroCounts()
    zeros.update(np.zeros(1000, dtype=np.float32), other_N)
    zeros.update(np.full(1000, -3.0, dtype=np.float32), other_N)
    sums = (zeros.gap, zeros.zeros_surprise, zeros.rest_surprise)
    assert sums == pytest.approx([total] * 3, rel=1e-12)
    batch = topk_batch(
        topk_ids_TK=np.ones((1000, 1)),
        response_ids_T=np.ones(1000),
        logp_rollout_T=other_N,
        topk_logp_rollout_TK=np.zeros((1000, 1), dtype=np.float32),
    )
    columns = OwnColumns()
    columns.update(batch)
    assert columns.sides["rollout"].difference == pytest.approx(total, rel=1e-12)


def test_zeros_are_doubted_as_often_as_nearly_certain_tokens_are():
    """Of none that is nearly certain, none may be doubted."""
    assert ZeroCounts(zeros=5, nearly=0, nearly_uncertain=0, tokens=0).are_legitimate
    assert not ZeroCounts(zeros=5, nearly=0, nearly_uncertain=0, tokens=1).are_legitimate
    assert ZeroCounts(zeros=9, nearly=1, nearly_uncertain=1, tokens=18).are_legitimate
    assert not ZeroCounts(zeros=9, nearly=1, nearly_uncertain=1, tokens=19).are_legitimate
    assert not ZeroCounts(zeros=2, zeros_surprise=1.0, rest=0, rest_surprise=0.0).are_sampled
    assert ZeroCounts(zeros=2, zeros_surprise=6.0, rest=4, rest_surprise=4.0).are_sampled
    assert not ZeroCounts(zeros=2, zeros_surprise=6.1, rest=4, rest_surprise=4.0).are_sampled


def test_placeholders_are_counted_at_ends_and_in_runs():
    """At the end of three responses and of one that is truncated; a run there, and one that two
    responses would make together. At −1 nat and without an exact zero there is none.
    """
    rows = [
        ([-1.0, -1.0, 0.0], [-0.5, -0.5, -3.0]),
        ([0.0, 0.0, -1.0], [-3.0, -3.0, -0.5]),
        ([-1.0, 0.0, 0.0, 0.0], [-0.5, -3.0, -3.0, -3.0]),
        ([], []),
        ([0.0, -2.0, 0.0], [-3.0, -0.5, -3.0]),
        ([0.0], [-3.0]),
        ([-1.0, 0.0], [-0.5, -1.0]),
        ([-2.0], [-5.0]),
        ([], []),
    ]
    own, other = map(list, zip(*rows, strict=True))
    batch = make_batch(own, logp_recomputed=other, truncated=np.arange(9) == 2)
    counts, table = Counts(), SimpleNamespace(column_names=[])
    for times in (1, 2):
        counts.update(table, batch, PAIRS["mismatch"])
        zeros = counts.zeros["logp_rollout"]
        placeholders = (zeros.tokens, zeros.last, zeros.in_runs, zeros.gap)
        assert placeholders == (9 * times, 3 * times, 3 * times, 27.0 * times)
        assert counts.responses == 9 * times
    assert counts.zeros["logp_trainer"].tokens == 0 and counts.out_of_support == 0


def test_tokens_that_the_current_policy_excludes_are_out_of_support():
    """In the loss, sampled with a probability, and at −∞ in the current policy."""
    batch = make_batch(
        [[-1.0, -1.0, -INF, -1.0, -1.0, -1.0]],
        logp_recomputed=[[-INF, -INF, -INF, NAN, -1.0, -2.0]],
        loss_mask=[[True, False, True, True, True, False]],
    )
    counts = Counts()
    counts.update(SimpleNamespace(column_names=[]), batch, PAIRS["mismatch"])
    assert counts.out_of_support == 1
    assert counts.zeros["logp_rollout"].rest == 1


def test_impossible_values_are_counted_as_recorded():
    """Of a column that one response lacks: in the loss, above 0 by more than rounding."""
    rows = [[NAN, INF, -INF, 2e-6, 1e-6, -1.0], None, [-2.0, 3.0, NAN]]
    mask = [[True] * 6, [True] * 2, [True, False, True]]
    table = pa.table({"logp_trainer": pa.array(rows, pa.list_(pa.float32()))})
    batch = make_batch([[-1.0] * 6, [-1.0] * 2, [-1.0] * 3], loss_mask=mask)
    counts = Counts()
    for times in (1, 2):
        counts._update_side("logp_trainer", table.column(0).combine_chunks(), batch)
        side = SideCounts(
            tokens=8 * times,
            not_a_number=3 * times,
            above_zero=times,
            impossible=times,
            largest=float(np.float32(2e-6)),
        )
        assert counts.sides == {"logp_trainer": side}


def test_of_two_parts_counts_add_up_and_the_larger_value_stays():
    first = SideCounts(tokens=3, not_a_number=1, above_zero=2, impossible=4, largest=-1.0)
    first.merge(SideCounts(tokens=5, largest=0.5))
    assert first == SideCounts(8, 1, 2, 4, 0.5)


@pytest.mark.parametrize(("shortest", "places"), [
    (1, [0, 1, 3, 4, 5, 6, 7, 8]), (2, [0, 1, 3, 4, 6, 7, 8]), (3, [6, 7, 8]), (4, []),
])  # fmt: skip
def test_a_run_is_within_one_response(shortest, places):
    """Flags of 2, then 2 and 1, which two responses share, then 3, before an empty response."""
    flag_T = np.array([1, 1, 0, 1, 1, 1, 1, 1, 1]) > 0
    offset_S1 = np.array([0, 5, 5, 6, 9, 9])
    assert np.flatnonzero(in_runs(flag_T, offset_S1, shortest)).tolist() == places
    assert in_runs(flag_T[:0], np.array([0, 0]), shortest).tolist() == []
    assert in_runs(~flag_T[:1], np.array([0, 1]), shortest).tolist() == [False]


def topk_batch(**sides: np.ndarray) -> SimpleNamespace:
    """Three ranks of five tokens; the last token was sampled beyond them."""
    unmeasured = dict.fromkeys(
        f"{topk}logp_{side}_T{k}"
        for side in ("rollout", "trainer", "recomputed")
        for topk, k in (("", ""), ("topk_", "K"))
    )
    ids_TK = np.array([[1, 2, 3]] * 5)
    ids = {"topk_ids_TK": ids_TK, "response_ids_T": np.array([1, 2, 3, 2, 9])}
    return SimpleNamespace(**unmeasured | ids | sides)


def test_sampled_tokens_are_compared_with_their_rank_on_every_side():
    logp_TK = np.log(np.array([[0.5, 0.3, 0.2]] * 5))
    logp_T = logp_TK[np.arange(5), [0, 1, 2, 1, 0]]
    odd_T = logp_T + np.array([0.0, 0.25, -0.5, np.nan, 1.0])
    infinite_TK = logp_TK.copy()
    infinite_TK[0, 0] = -np.inf
    batch = topk_batch(
        logp_rollout_T=logp_T,
        topk_logp_rollout_TK=infinite_TK,
        logp_recomputed_T=odd_T,
        topk_logp_recomputed_TK=logp_TK,
        logp_trainer_T=logp_T,
    )
    columns = OwnColumns()
    for times in (1, 2):
        columns.update(batch)
        rollout, recomputed = columns.sides["rollout"], columns.sides["recomputed"]
        assert (rollout.compared, rollout.at_odds, rollout.difference) == (3 * times, 0, 0.0)
        assert (recomputed.compared, recomputed.at_odds) == (3 * times, 2 * times)
        assert recomputed.difference == pytest.approx(0.75 * times)
    assert list(columns.sides) == ["rollout", "recomputed"]
    trainer = OwnColumns()
    measured = {"logp_rollout_T": logp_T, "logp_trainer_T": logp_T - 1.0}
    trainer.update(topk_batch(topk_logp_trainer_TK=logp_TK, **measured))
    assert trainer.sides == {"trainer": SideAgreement(4, 4, pytest.approx(4.0))}
    for missing in ({"topk_ids_TK": None}, {"response_ids_T": None}):
        without = OwnColumns()
        without.update(SimpleNamespace(**vars(batch) | missing))
        assert without.sides == {}
    assert vars(SideAgreement()) == {"compared": 0, "at_odds": 0, "difference": 0.0}


def copies_batch(contents: list[int], keys: list[int], surprise: float = 16.0) -> SimpleNamespace:
    """Of responses of two tokens, which are equal for equal contents."""
    return make_batch(
        [[0.0, -surprise]] * len(contents),
        response_ids=[[content, content + 1] for content in contents],
        step=np.array(keys) % 2,
        prompt_id=np.array(keys) // 2,
    )


def test_a_copy_is_the_same_response_under_another_key():
    """Of 16 nats or more; a reused response keeps its key."""
    copies = ImprobableCopies()
    copies.update(copies_batch([1, 1, 2, 3, 3, 3], [0, 1, 2, 3, 4, 5]))
    copies.update(copies_batch([2, 4], [2, 6]))
    assert copies.count() == (3, 7)
    copies.update(copies_batch([4, 5], [7, 8], surprise=15.99))
    assert copies.count() == (3, 7)
    without = copies_batch([4], [9])
    object.__setattr__(without, "response_ids_T", None)
    copies.update(without)
    assert copies.count() == (3, 7)


def test_values_that_are_not_measured_make_no_response_improbable():
    batch = make_batch([[NAN, -INF, -9.0], [NAN, -9.0, -7.0]], response_ids=[[1, 2, 3]] * 2)
    copies = ImprobableCopies()
    copies.update(batch)
    assert copies.count() == (0, 1)
    # Nor do they hide the copies after them
    copies.update(make_batch([[INF, -9.0], [-9.0, -9.0], [-9.0, -9.0]], response_ids=[[4, 5]] * 3))
    assert copies.count() == (1, 3)


def test_an_improbable_response_leaves_the_sums_of_others_exact():
    copies = ImprobableCopies()
    copies.update(make_batch([[-1e9], [-17.0], [-15.0]]))
    assert copies.count() == (0, 2)


@pytest.mark.parametrize("most", [1, 3, 4, 6, 8, 20])
def test_responses_with_the_smallest_hashes_are_remembered_with_their_copies(most, rng):
    """In one batch, or in parts that are merged; some of them know the limit before."""
    contents = np.repeat(np.arange(6) * 10, [1, 3, 2, 1, 2, 3])
    keys = np.arange(len(contents))
    ids_T = np.stack([contents, contents + 1], axis=1).ravel()
    hash_S = content_hashes(ids_T, np.arange(0, 2 * len(contents) + 1, 2))
    # The limit is the hash of the response that no longer fits
    ordered = np.sort(hash_S)
    small_S = hash_S < ordered[most] if most < len(ordered) else np.ones(len(ordered), dtype=bool)
    expected = (int(small_S.sum()) - len(np.unique(hash_S[small_S])), int(small_S.sum()))
    whole, merged = ImprobableCopies(most), ImprobableCopies(most)
    whole.update(copies_batch(contents.tolist(), keys.tolist()))
    order = rng.permutation(len(contents))
    for turn, part in enumerate(np.array_split(order, 5)):
        later = ImprobableCopies(most, merged.limit if turn % 2 else NO_LIMIT)
        later.update(copies_batch(contents[part].tolist(), keys[part].tolist()))
        merged.merge(pickle.loads(pickle.dumps(later)))
    assert whole.count() == merged.count() == expected


def test_a_response_at_the_limit_is_not_remembered():
    own = int(content_hashes(np.array([7, 8]), np.array([0, 2]))[0])
    for limit, responses in ((own, 0), (own + 1, 1)):
        copies = ImprobableCopies(limit=limit)
        copies.update(copies_batch([7], [0]))
        assert copies.count() == (0, responses)
        earlier, later = ImprobableCopies(limit=limit), ImprobableCopies()
        later.update(copies_batch([7], [0]))
        earlier.merge(later)
        assert earlier.count() == (0, responses) and earlier.limit == limit


def test_hashes_are_those_of_ids_at_their_places():
    """Whatever comes before a response; an empty one has the hash of nothing."""
    ids_T = np.array([5, 6, 5, 6, 6, 5, 5])
    hash_S = content_hashes(ids_T, np.array([0, 2, 2, 4, 6, 7, 7])).tolist()
    assert hash_S[0] == hash_S[2] and hash_S[1] == hash_S[5]
    assert len(set(hash_S)) == 4
