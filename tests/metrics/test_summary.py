"""A complete summary: sharding, order, extreme batches, and the shape of its result."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_cli.base.json_form import from_json, to_json
from mismatch_cli.metrics import correlation
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.gap_table import METRICS, VOLATILITY
from mismatch_cli.metrics.gaps import token_gaps
from mismatch_cli.metrics.pair_summary import PairSummary
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.metrics.summary import MismatchSummary
from tests.leaves import assert_close
from tests.metrics.summaries import summarise

INF, NAN = float("inf"), float("nan")


def test_shards_merged_in_order_give_the_bits_of_one_pass(random_batch) -> None:
    batches = [random_batch(seed, top_k=3) for seed in range(4)]
    whole = summarise(*batches)
    merged = MismatchSummary(PAIRS["mismatch"])
    for batch in batches:
        merged.merge(pickle.loads(pickle.dumps(summarise(batch))))
    assert to_json(merged.result()) == to_json(whole.result())


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.randoms())
def test_any_sharding_and_order_gives_the_same_up_to_rounding(
    random_batch, take_responses, cuts, rng
) -> None:
    batch = random_batch(7, responses=30)
    order = list(range(batch.num_responses))
    rng.shuffle(order)
    edges = sorted({0, len(order), *(5 * cut for cut in cuts)})
    merged = MismatchSummary(PAIRS["mismatch"])
    for first, last in pairwise(edges):
        merged.merge(summarise(take_responses(batch, order[first:last])))
    assert_close(merged.result(), summarise(batch).result())


def test_exact_state_is_the_same_bits_in_any_order(random_batch, take_responses) -> None:
    batch = random_batch(3, top_k=3)
    backwards = summarise(take_responses(batch, range(batch.num_responses - 1, -1, -1)))
    forwards = summarise(batch)
    for first, other in (
        (backwards.exact.cells.d, forwards.exact.cells.d),
        (backwards.exact.cells.topk, forwards.exact.cells.topk),
    ):
        np.testing.assert_array_equal(first.total, other.total)
        np.testing.assert_array_equal(first.by_group, other.by_group)
        np.testing.assert_array_equal(first.largest, other.largest)
    np.testing.assert_array_equal(
        backwards.exact.spearman.sample.rows(), forwards.exact.spearman.sample.rows()
    )


def test_cutting_a_long_batch_into_slices_changes_nothing(random_batch, monkeypatch) -> None:
    batch = random_batch(1, top_k=2)
    whole = summarise(batch).result()
    monkeypatch.setattr("mismatch_cli.metrics.gaps.token_gaps.__defaults__", (7, ()))
    assert_close(summarise(batch).result(), whole)


def test_slices_have_as_many_measured_tokens_as_they_may(make_batch) -> None:
    """Of six responses of two tokens the first three are not measured, and cost nothing."""
    logp = [[-1.0, -1.0]] * 6
    part = [[np.nan, np.nan]] * 3 + logp[3:]
    for trainer, cuts in ((logp, [0, 1, 2, 3, 4, 5, 6]), (part, [0, 4, 5, 6])):
        batch = make_batch(logp, logp_recomputed=trainer)
        places = []
        for gaps in token_gaps(batch, PAIRS["mismatch"], max_tokens=2):
            assert (gaps.first, gaps.last) in pairwise(cuts)
            response_N, position_N = gaps.places()
            places += zip(gaps.first + response_N, position_N, strict=True)
        first = 0 if trainer is logp else 3
        assert places == [(response, place) for response in range(first, 6) for place in (0, 1)]


def test_result_is_plain_json_with_every_metric_of_the_catalog(random_batch) -> None:
    result = summarise(random_batch(top_k=3)).result()
    content = json.loads(json.dumps(to_json(result), allow_nan=False))
    assert from_json(PairSummary, content) == from_json(PairSummary, to_json(result))
    assert to_json(from_json(PairSummary, content)) == content
    assert list(result.metrics) == list(METRICS)
    estimated = {key for key, estimate in result.metrics.items() if estimate.value is None}
    assert estimated == set()
    for row in result.volatility:
        assert set(row.metrics) == set(VOLATILITY)
    for key, estimate in result.metrics.items():
        if estimate.low is None:
            assert estimate.note, key
        else:
            assert estimate.low <= estimate.high, key


def test_an_empty_batch_changes_nothing(random_batch, take_responses) -> None:
    batch = random_batch()
    empty = take_responses(batch, [])
    assert to_json(summarise(empty, batch, empty).result()) == to_json(summarise(batch).result())
    nothing = summarise(empty).result()
    assert nothing.counts.tokens == 0
    assert all(estimate.value is None for estimate in nothing.metrics.values())
    json.dumps(to_json(nothing), allow_nan=False)


def test_a_response_without_tokens_is_only_counted(make_batch) -> None:
    with_empty = summarise(
        make_batch([[-1.0], [], [-2.0]], logp_recomputed=[[-1.5], [], [-2.0]])
    ).result()
    without = summarise(make_batch([[-1.0], [-2.0]], logp_recomputed=[[-1.5], [-2.0]])).result()
    assert with_empty.counts.responses == 3
    assert with_empty.metrics["length_mean"].value == pytest.approx(2 / 3)
    for key in ("abs_d_mean", "ess_sequence", "sequence_kl", "chi2_sequence", "spearman"):
        assert with_empty.metrics[key] == without.metrics[key]


def test_one_token(make_batch) -> None:
    result = summarise(make_batch([[-1.0]], logp_recomputed=[[-1.25]])).result()
    value = {key: estimate.value for key, estimate in result.metrics.items()}
    assert value["abs_d_mean"] == value["abs_d_max"] == 0.25
    assert value["abs_d_p50"] == pytest.approx(0.25, rel=0.04)
    assert (
        value["ess_token"] == pytest.approx(1)
        and value["pearson"] is None
        and value["spearman"] is None
    )
    assert [row.tokens for row in result.positions] == [1] and result.from_end[0].last == 0
    json.dumps(to_json(result), allow_nan=False)


def test_masked_tokens_have_no_influence(random_batch, take_responses) -> None:
    batch = random_batch(2, responses=20, top_k=2)
    padded = type(batch)(
        **{**vars(batch), "loss_mask_T": np.random.default_rng(0).random(batch.num_tokens) < 0.7}
    )
    result = summarise(padded)
    wild = np.where(padded.loss_mask_T, padded.logp_recomputed_T, np.float32(-25))
    wild_result = summarise(type(batch)(**{**vars(padded), "logp_recomputed_T": wild})).result()
    assert to_json(wild_result) == to_json(result.result())
    assert wild_result.counts.masked == int((~padded.loss_mask_T).sum())
    d = (padded.logp_recomputed_T - padded.logp_rollout_T)[padded.loss_mask_T].astype(np.float64)
    assert wild_result.metrics["abs_d_mean"].value == pytest.approx(np.abs(d).mean(), rel=1e-9)


def test_all_masked(make_batch) -> None:
    mask = np.zeros(3, dtype=bool)
    result = summarise(
        make_batch([[-1.0, -2.0], [-3.0]], logp_recomputed=[[-1.0, -2.0], [-3.0]], loss_mask=mask)
    ).result()
    assert result.counts.tokens == 0 and result.counts.masked == 3 and result.counts.responses == 2
    assert result.metrics["abs_d_mean"].value is None
    assert result.metrics["length_mean"].value == 1.5
    json.dumps(to_json(result), allow_nan=False)


def test_positions_count_masked_tokens_too(make_batch) -> None:
    mask = np.array([False, False, True, False])
    gaps = [[9.0, 9.0, 0.5, 9.0]]
    mu = [[-10.0] * 4]
    pi = [[m + g for m, g in zip(mu[0], gaps[0], strict=True)]]
    result = summarise(make_batch(mu, logp_recomputed=pi, loss_mask=mask)).result()
    (row,) = result.positions
    assert (row.first, row.last, row.abs_d_mean.value) == (2, 3, 0.5)
    (row,) = result.from_end
    assert (row.first, row.last, row.tokens) == (1, 1, 1)


def test_out_of_support(make_batch) -> None:
    """μ = (.5, .25), π = (0, .5): Δp = −.5 and +.25, ratios 0 and 2, and log metrics from the
    second token only.
    """
    mu, pi = [[np.log(0.5), np.log(0.25)]], [[-INF, np.log(0.5)]]
    result = summarise(make_batch(mu, logp_recomputed=pi)).result()
    value = {key: estimate.value for key, estimate in result.metrics.items()}
    assert result.counts.out_of_support == 1 and result.counts.tokens == 2
    assert value["tv_binary_mean"] == pytest.approx(0.375) and value[
        "tv_signed_min"
    ] == pytest.approx(-0.5)
    assert (
        value["ratio_mean"] == pytest.approx(1)
        and value["ratio_min"] == 0
        and value["ratio_max"] == pytest.approx(2)
    )
    assert value["ratio_outside_0.8_1.25"] == 1
    assert value["chi2_token"] == pytest.approx(4 / 2 - 1)
    for key in ("abs_d_mean", "abs_d_max", "d_mean"):
        assert value[key] == pytest.approx(np.log(2), rel=1e-6)
    assert value["k3"] == pytest.approx(1 - np.log(2), rel=1e-6)
    assert value["mult_prob_error"] == pytest.approx(2)
    assert value["kl_binary_mean"] == pytest.approx(
        0.25 * np.log(0.5) + 0.75 * np.log(1.5), rel=1e-5
    )
    assert value["sequence_kl"] == pytest.approx(-np.log(2), rel=1e-6)
    assert value["chi2_sequence"] == -1  # the product of the ratios is 0
    assert value["ess_sequence"] is None


def test_all_out_of_support(make_batch) -> None:
    result = summarise(make_batch([[-1.0, -2.0]], logp_recomputed=[[-INF, -INF]])).result()
    value = {key: estimate.value for key, estimate in result.metrics.items()}
    assert result.counts.out_of_support == result.counts.tokens == 2
    assert value["ratio_mean"] == value["ratio_max"] == value["ratio_p99"] == 0
    assert value["tv_binary_mean"] == pytest.approx((np.exp(-1) + np.exp(-2)) / 2)
    assert value["abs_d_mean"] is None and value["k3"] is None and value["abs_d_max"] is None
    json.dumps(to_json(result), allow_nan=False)


def test_unmeasured_tokens_are_left_out(make_batch) -> None:
    mu, pi = [[-1.0, -2.0], [-0.5]], [[-1.0, -2.0], [-0.5]]
    repeat = [[NAN, NAN], [-0.75]]
    result = summarise(
        make_batch(mu, logp_trainer=pi, logp_trainer_repeat=repeat), pair="floor"
    ).result()
    assert result.counts.not_measured == 2 and result.counts.tokens == 1
    assert result.metrics["abs_d_mean"].value == 0.25
    absent = summarise(make_batch(mu, logp_trainer=pi), pair="floor").result()
    assert absent.counts.tokens == 0


def test_unmeasured_prompts_do_not_count_towards_an_interval(make_batch) -> None:
    """The floor was measured on 2 of 20 prompts, so it has 2 prompts."""
    mu = [[-1.0, -2.0]] * 20
    repeat = [[-1.1, -2.1]] * 2 + [[NAN, NAN]] * 18
    result = summarise(
        make_batch(mu, logp_trainer=mu, logp_trainer_repeat=repeat), pair="floor"
    ).result()
    assert result.counts.prompts == 2 and result.counts.responses == 20
    assert result.metrics["abs_d_mean"].low is None


def test_the_state_does_not_grow(random_batch, monkeypatch) -> None:
    monkeypatch.setattr(correlation, "SAMPLE_TOKENS", 100)  # full from the first batch on
    sizes = [
        _bytes_in(summarise(*(random_batch(seed) for seed in range(count)))) for count in (1, 6)
    ]
    assert sizes[1] - sizes[0] < 10_000
    assert 15_000_000 < sizes[1] < 23_000_000


def _bytes_in(value: object) -> int:
    """The memory of all arrays of an accumulator."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    parts = (
        vars(value).values()
        if isinstance(value, Accumulator)
        else value
        if isinstance(value, list)
        else []
    )
    return sum(map(_bytes_in, parts))


def test_a_pickled_summary_is_small_and_complete(random_batch) -> None:
    """Counts travel without their zeros: every array comes back to the bit, and can be added to."""
    summary = summarise(*(random_batch(seed) for seed in range(3)))
    sent = pickle.dumps(summary)
    assert len(sent) < _bytes_in(summary) / 5
    came = pickle.loads(sent)
    assert to_json(came.result()) == to_json(summary.result())
    came.update(random_batch(7))
    summary.update(random_batch(7))
    assert to_json(came.result()) == to_json(summary.result())


def test_topk_measured_for_some_responses_only(make_batch) -> None:
    mu, pi = [[np.log(0.5)], [np.log(0.5)]], [[np.log(0.4)], [np.log(0.4)]]
    top = np.log(np.array([[0.5, 0.3], [NAN, NAN]])), np.log(np.array([[0.4, 0.4], [NAN, NAN]]))
    columns = {
        "topk_logp_rollout": top[0],
        "topk_logp_recomputed": top[1],
        "topk_ids": np.array([[0, 9], [-1, -1]]),
    }
    result = summarise(make_batch(mu, logp_recomputed=pi, **columns)).result()
    assert result.metrics["tv_topk_mean"].value == pytest.approx(0.1, abs=1e-6)
    assert result.metrics["tv_topk_max"].value == pytest.approx(0.1, abs=1e-6)
    assert result.metrics["tv_binary_mean"].value == pytest.approx(0.1, abs=1e-6)


def test_an_infinite_topk_kl_is_left_out_but_its_tv_is_kept(make_batch) -> None:
    mu, pi = [[np.log(0.5), np.log(0.5)]], [[np.log(0.5), np.log(0.5)]]
    rollout = np.log(np.array([[0.5, 0.3], [0.5, 0.3]]))
    recomputed = np.log(np.array([[0.5, 0.0], [0.5, 0.3]]))
    ids = np.array([[0, 9], [1, 9]])
    batch = make_batch(
        mu,
        logp_recomputed=pi,
        topk_logp_rollout=rollout,
        topk_logp_recomputed=recomputed,
        topk_ids=ids,
    )
    value = {key: estimate.value for key, estimate in summarise(batch).result().metrics.items()}
    assert value["tv_topk_mean"] == pytest.approx(0.15, abs=1e-6)
    assert value["kl_topk_mean"] == pytest.approx(0, abs=1e-6)


def test_enormous_gaps_do_not_spread(make_batch) -> None:
    """A broken recording: a gap of 95 nats on one token, Σd of thousands in a response."""
    mu, pi = [[-96.0], [-40.0] * 100, [-1.0]], [[-1.0], [-1.0] * 100, [-1.0]]
    result = summarise(make_batch(mu, logp_recomputed=pi)).result()
    value = {key: estimate.value for key, estimate in result.metrics.items()}
    assert value["abs_d_max"] == 95 and value["ess_sequence"] == pytest.approx(1 / 3)
    assert value["chi2_sequence"] is None and "float" in result.metrics["chi2_sequence"].note
    json.dumps(to_json(result), allow_nan=False)


def test_a_constant_rollout_has_no_correlation(make_batch):
    """Neither a single token nor many equal ones: their variance is rounding of the sums."""
    for count in (1, 7):
        metrics = (
            summarise(make_batch([[-0.7] * count], logp_recomputed=[[-0.3] * count]))
            .result()
            .metrics
        )
        assert metrics["pearson"].value is None


def test_top_k_masses_by_hand(make_batch) -> None:
    mu = np.array([[0.5, 0.3, 0.1], [0.6, 0.3, 0.05], [0.4, 0.4, 0.0], [0.2, 0.2, 0.2]])
    # The third is rounded above 1
    pi = np.array([[0.4, 0.3, 0.1], [0.7, 0.2, 0.05], [0.5, 0.5, 0.1], [np.nan] * 3])
    with np.errstate(divide="ignore"):
        columns = {"topk_logp_rollout": np.log(mu), "topk_logp_recomputed": np.log(pi)}
    batch = make_batch(
        [[-0.7, -0.5], [-0.9, -1.6]],
        logp_recomputed=[[-0.8, -0.4], [-0.9, -1.6]],
        topk_ids=np.tile([1, 2, 3], (4, 1)),
        step=[3, 4],
        **columns,
    )
    result = summarise(batch).result()
    masses = [result.metrics[f"topk_mass_{name}"].value for name in ("reference", "current")]
    assert masses == pytest.approx([(0.9 + 0.95 + 0.8) / 3, (0.8 + 0.95 + 1) / 3], rel=1e-6)
    steps = [
        (row.first, row.last, row.tokens, row.masses["topk_mass_reference"].value)
        for row in result.by_step
    ]
    assert steps == [(3, 3, 2, pytest.approx(0.925)), (4, 4, 1, pytest.approx(0.8))]
    assert summarise(make_batch([[-0.7]], logp_recomputed=[[-0.8]])).result().by_step == []


@pytest.mark.parametrize(("steps", "stretch"), [(512, 1), (513, 2)])
def test_masses_are_of_at_most_512_stretches_of_steps(make_batch, steps, stretch) -> None:
    batch = make_batch(
        [[-0.7]] * steps,
        logp_recomputed=[[-0.8]] * steps,
        topk_ids=np.tile([1, 2], (steps, 1)),
        topk_logp_rollout=np.full((steps, 2), -0.7),
        topk_logp_recomputed=np.full((steps, 2), -0.8),
        step=np.arange(steps),
    )
    firsts = [row.first for row in summarise(batch).result().by_step]
    assert firsts == list(range(0, steps, stretch))
