"""The building blocks of checks: the sample, runs, means over prompts."""

from __future__ import annotations

from itertools import groupby, pairwise
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from mismatch_cli.base.hashing import GROUPS
from mismatch_cli.diagnosis import diagnose
from mismatch_cli.diagnosis.alignment import Heads, find_exchanges
from mismatch_cli.diagnosis.checks import (
    columns_at_odds,
    heavy_tail,
    lm_head,
    log_base,
    masked_tokens,
    position_drift,
    stale_weights,
)
from mismatch_cli.diagnosis.counts import Counts, in_runs
from mismatch_cli.diagnosis.evidence import Finding
from mismatch_cli.diagnosis.group_estimates import (
    Mean,
    is_share_above,
    mean_over_prompts,
    slope_over_prompts,
)
from mismatch_cli.diagnosis.sample import SampleCollector
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.trace.reader import table_to_batch
from tests.diagnosis.samples import SampleColumns
from tests.metrics.batches import make_batch


def test_runs_are_those_of_a_plain_loop(rng):
    for _ in range(50):
        lengths = rng.integers(0, 9, 12)
        offset_S1 = np.concatenate([[0], np.cumsum(lengths)])
        flag_T = rng.random(offset_S1[-1]) < 0.6
        expected: list[bool] = []
        for start, stop in pairwise(offset_S1):
            for value, group in groupby(flag_T[start:stop].tolist()):
                run = list(group)
                expected += [value and len(run) >= 3] * len(run)
        assert in_runs(flag_T, offset_S1).tolist() == expected


def test_the_sample_is_bounded_and_the_same_in_any_sharding(pools):
    table = pools["fp8-kv"].table()
    samples = []
    for pieces in (1, 7):
        collector = SampleCollector(PAIRS["mismatch"], most_tokens=2000)
        step = -(-len(table) // pieces)
        for start in range(0, len(table), step):
            collector.update(table_to_batch(table.slice(start, step).combine_chunks()))
        samples.append(collector.result())
    one, other = samples
    assert 1500 < len(one.logq_T) <= 2000
    assert one.offset_S1.tolist() == other.offset_S1.tolist()
    np.testing.assert_array_equal(one.logp_T, other.logp_T)


def test_a_gap_below_the_steps_of_float32_stays_in_a_sample(pools):
    """Columns are in float32, and what is left of their gaps is computed in float64."""
    collector = SampleCollector(PAIRS["mismatch"], most_tokens=2000)
    collector.update(table_to_batch(pools["fp8-kv"].table()))
    sample = collector.result()
    assert sample.logq_T.dtype == sample.logp_T.dtype == np.float64
    tiny_N = np.full(sample.num_counted, 1e-9)
    np.testing.assert_allclose(sample.with_gap(tiny_N).d_N, tiny_N, rtol=1e-5)


def test_responses_without_a_column_have_no_value_of_it_and_nothing_seen_before():
    """The second table has neither prompts nor entropies."""
    logp, collector = [[-1.0, -2.0, -3.0]], SampleCollector(PAIRS["mismatch"])
    own = {"logp_recomputed": logp, "response_ids": [[7, 8, 8]]}
    collector.update(make_batch(logp, entropy_trainer=[[1, 2, 3]], **own), pa.array([[7]]))
    collector.update(make_batch(logp, step=[1], **own))
    sample = collector.result()
    np.testing.assert_array_equal(sample.entropy_T, [1, 2, 3, np.nan, np.nan, np.nan])
    assert sample.seen_T.tolist() == [True, False, True, False, False, False]


def test_a_mean_and_its_error_over_prompts(rng):
    """The error covers the truth when tokens of a prompt are correlated."""
    covered = 0
    for _ in range(300):
        group_N = np.repeat(np.arange(GROUPS), 20)
        value_N = rng.normal(size=GROUPS)[group_N] + rng.normal(size=len(group_N))
        mean = mean_over_prompts(value_N, group_N)
        assert mean.value == pytest.approx(value_N.mean())
        covered += abs(mean.value) < 2.04 * mean.error
    assert 0.90 < covered / 300 < 0.98


def test_too_few_prompts_have_no_error(rng):
    assert mean_over_prompts(rng.normal(size=30), np.zeros(30, dtype=int)).error == np.inf
    assert mean_over_prompts(np.zeros(0), np.zeros(0, dtype=int)).count == 0


def test_a_share_is_above_a_limit_by_two_standard_errors():
    """Of 128 prompts with a weight of 4 each, half have all in the chosen token, half have 2:
    a share of 0.75 ± 0.022.
    """
    group_N = np.repeat(np.arange(GROUPS), 2)
    chosen_N = np.tile([True, False], GROUPS)
    weight_N = np.tile([4.0, 0.0, 2.0, 2.0], GROUPS // 2)
    assert is_share_above(chosen_N, weight_N, group_N, 0.70)
    assert not is_share_above(chosen_N, weight_N, group_N, 0.71)


def test_a_slope_through_the_origin(rng):
    x_N, group_N = rng.normal(size=4000), rng.integers(0, GROUPS, 4000)
    slope, error = slope_over_prompts(x_N, 0.7 * x_N + 0.1 * rng.normal(size=4000), group_N)
    assert abs(slope - 0.7) < 4 * error < 0.02


def test_only_long_responses_can_be_far_and_they_alone_set_the_median():
    """Normalised gaps of 1, one response of 9, and many short ones of 100, which would hide it."""
    lengths = [8, 20, 12, 30, 7, 7, 7, 7, 7]
    mean_S = np.array([1.0, 1.0, 9.0, 1.0, 100.0, 100.0, 100.0, 100.0, 100.0])
    response_N = np.repeat(np.arange(len(lengths)), lengths)
    sample = SampleColumns(
        response_T=response_N,
        index_N=np.arange(len(response_N)),
        num_responses=len(lengths),
        u_N=mean_S[response_N],
    )
    assert np.flatnonzero(heavy_tail.are_far_S(sample)).tolist() == [2]
    only_short = SampleColumns(
        response_T=np.zeros(7, dtype=int),
        index_N=np.arange(7),
        num_responses=1,
        u_N=np.full(7, 9.0),
    )
    assert not heavy_tail.are_far_S(only_short).any()


def test_a_gap_that_rises_with_the_position_rises_steadily(rng):
    """Beside one that rises and falls, and one that is constant."""
    position_T = np.tile(np.arange(240), 20)

    def drift(gap_by_position: np.ndarray) -> tuple[float, float, float]:
        sample = SampleColumns(
            position_T=position_T,
            index_N=np.arange(len(position_T)),
            u_N=gap_by_position[position_T],
            group_N=np.repeat(np.arange(20), 240),
        )
        early, late, steady = position_drift.drift_of(sample)
        return early.value, late.value, steady

    early, late, steady = drift(np.exp(np.arange(240) / 100))
    assert early < late and steady > 0.99
    assert abs(drift(np.exp(-np.abs(np.arange(240) - 119.5) / 100))[2]) < 0.1
    assert drift(np.ones(240)) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize(("about", "status"), [
    ({}, "found"),
    ({"rollout": {"kv_cache_dtype": "bfloat16"}}, "found"),
    ({"rollout": {"kv_cache_dtype": "fp8"}}, "clear"),
])  # fmt: skip
def test_a_coarse_cache_alone_may_raise_the_gap_along_the_context(rng, about, status):
    """By 1.45 here: its rounding accumulates, and no other precision does that."""
    position_T = np.tile(np.arange(240), 40)
    u_N = np.exp(position_T / 400) * rng.uniform(0.9, 1.1, len(position_T))
    sample = SampleColumns(
        position_T=position_T,
        index_N=np.arange(len(position_T)),
        u_N=u_N,
        d_N=0.01 * u_N,
        group_N=np.repeat(np.arange(40) % GROUPS, 240),
        axis_N=lambda _: position_T,
    )
    finding = position_drift.check(SimpleNamespace(sample=sample, about=about))
    assert finding.status == status and finding.effect == pytest.approx(1.45, abs=0.02)


def test_two_means_are_not_compared_if_one_of_them_is_0():
    none, some = Mean(0.0, 0.1, 100, 30), Mean(1.0, 0.1, 100, 30)
    assert none.z_of_log_ratio(some) == some.z_of_log_ratio(none) == 0
    assert Mean(2.0, 0.1, 100, 30).z_of_log_ratio(some) > 4


def test_only_a_run_at_the_end_reaches_the_end():
    """Two runs in the first response, and one in the second, which it fills."""
    flag_T = np.array([False, True, True, False, True, True, True])
    reaches_T = masked_tokens.reaches_the_end(flag_T, np.array([0, 5, 7]))
    assert np.flatnonzero(reaches_T).tolist() == [4, 5, 6]


def test_another_base_must_fit_nearly_every_token_and_not_only_most_of_the_gap():
    """Three of five tokens fit base 2 exactly, the others are a tenth away from it."""
    logp_N = np.full(20, -2.0)
    assert log_base.pair_of_bases(logp_N / np.log(2), logp_N) == ("2", "e")
    factor_N = np.tile([1 / np.log(2), 1 / np.log(2), 1 / np.log(2), 1.6, 1.6], 4)
    assert log_base.pair_of_bases(factor_N * logp_N, logp_N) is None


def test_six_uncertain_tokens_tell_a_base_and_five_do_not():
    logp_N = np.full(6, -2.0)
    assert log_base.pair_of_bases(logp_N / np.log(2), logp_N) == ("2", "e")
    assert log_base.pair_of_bases(logp_N[1:] / np.log(2), logp_N[1:]) is None


def test_rounding_the_other_side_too_counts_only_if_it_makes_the_gap_smaller(rng):
    def stored(logq_N: np.ndarray, logp_N: np.ndarray) -> SimpleNamespace:
        places = np.arange(len(logq_N))
        return SampleColumns(logq_T=logq_N, logp_T=logp_N, index_N=places, d_N=logp_N - logq_N)

    exact_N = -rng.uniform(0.5, 5, 200)
    rounded_N = lm_head.as_rounded(exact_N)
    for sample, side in (
        (stored(rounded_N, exact_N), "rollout"),
        (stored(exact_N, rounded_N), "trainer"),
    ):
        assert np.abs(sample.d_N).sum() > 0
        assert not lm_head.left_by_rounding(sample, [side]).any()
    # −1.005 is between −1 and −1.0078: rounded, it is further away
    away = stored(np.full(200, -1.0), np.full(200, -1.005))
    assert lm_head.left_by_rounding(away, ["rollout"]) is None


def test_top_k_columns_settle_a_contradiction_only_if_they_show_the_same_gap():
    def settled(topk_d: float) -> bool:
        sample = SampleColumns(
            topk_d_T=np.full(50, topk_d),
            topk_logp_TK=None,
            index_N=np.arange(50),
            d_N=np.full(50, 0.3),
        )
        return columns_at_odds.settled(SimpleNamespace(sample=sample))

    assert settled(0.31)
    assert not settled(0.1)
    assert not settled(np.nan)


def test_tokens_that_other_weights_did_not_score_shrink_as_the_others_do():
    evidence = SimpleNamespace(sample=SimpleNamespace(d_N=np.array([0.4, -0.2, 0.6])))
    mean = Mean(0.1, 0.01, 3, 3)
    result = stale_weights.OtherWeightsFit(mean, mean, 0.5, True, np.array([0.1, np.nan, -0.3]))
    finding = stale_weights.finding_of("stale-weights", evidence, result, "times", (), "Stale.")
    assert finding.left_N.tolist() == [0.1, -0.1, -0.3]


def test_zeros_are_counted_by_side_and_only_in_the_loss():
    """Two tokens with log μ = 0, one of them outside the loss mask, and one with log π = 0."""
    batch = SimpleNamespace(
        offset_S1=np.array([0, 4]),
        num_responses=1,
        truncated_S=np.array([False]),
        loss_mask_T=np.array([True, False, True, True]),
        logp_rollout_T=np.array([0.0, 0.0, -3.0, -3.0]),
        logp_recomputed_T=np.array([-4.0, -4.0, 0.0, -5.0]),
    )
    counts = Counts()
    counts.update(SimpleNamespace(column_names=[]), batch, PAIRS["mismatch"])
    by_side = {side: (zeros.tokens, zeros.gap) for side, zeros in counts.zeros.items()}
    assert by_side == {"logp_rollout": (1, 4.0), "logp_trainer": (1, 3.0)}


def test_partners_in_other_groups_count_only_if_most_responses_without_one_have_them(rng):
    """Half of them may fit another response by chance."""
    logq_RH = -rng.exponential(1.0, (12, 40))
    logq_RH[0] = logq_RH[11]
    logp_RH = logq_RH.copy()
    logp_RH[0] = -rng.exponential(1.0, 40)

    def partners(logp_RH: np.ndarray) -> list[int]:
        zeros_R = np.zeros(12, dtype=int)
        unknown_RH = np.full_like(logq_RH, np.nan)
        heads = Heads(zeros_R, np.arange(12), zeros_R, logq_RH, logp_RH, unknown_RH)
        return find_exchanges(heads).partner_R.tolist()

    assert partners(logp_RH) == [11, *[-1] * 11]
    logp_RH[1] = -rng.exponential(1.0, 40)
    assert partners(logp_RH) == [-1] * 12


PENALTY = "repetition-penalty"


def test_once_the_gap_is_as_expected_no_second_cause_is_looked_for(monkeypatch):
    """A temperature leaves 0.02 of 0.1 nats, as expected; a penalty would explain that too. Older
    weights, which were scored, are named nonetheless.
    """

    def evidence(d_N: np.ndarray) -> SimpleNamespace:
        return SimpleNamespace(
            sample=SimpleNamespace(d_N=d_N, counts_T=np.ones(len(d_N), dtype=bool)),
            gap=SimpleNamespace(value=float(np.abs(d_N).mean())),
            expected=SimpleNamespace(high=0.03),
            gap_is_too_large=False,
        )

    def check(name: str, evidence: SimpleNamespace) -> Finding:
        whole = evidence.gap.value > 0.03
        later = 0.7 if whole else 0.0
        left = {"temperature": 0.2, PENALTY: later, "stale-weights": later}[name]
        return Finding(name, "found", left_N=left * evidence.sample.d_N)

    monkeypatch.setattr(diagnose, "run_check", check)
    for name, status, left in ((PENALTY, "clear", 0.02), ("stale-weights", "found", 0.0)):
        weighing = diagnose.Weighing(total=10.0)
        weighing.causes = ["temperature", name]
        weighing.undo = lambda finding, _: evidence(finding.left_N)
        present = weighing.compete(evidence(np.full(100, 0.1)))
        assert present.gap.value == pytest.approx(left), name
        first, second = (weighing.answers[cause] for cause in weighing.causes)
        assert first.status == "found" and first.explains == pytest.approx(0.8)
        assert second.status == status, name
        assert (second.reason == "explains only 30 % of the gap") == (status == "clear")
