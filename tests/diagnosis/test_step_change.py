"""A gap that changes at a step, causes that begin there, and what a group of responses shares."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from lab.faults import of_eight_steps, widened
from lab.pool import Pool, gather_tables
from mismatch_cli.diagnosis import by_step
from mismatch_cli.diagnosis.by_step import StepGaps, Windows, find_step_change
from mismatch_cli.diagnosis.checks import growth_over_steps, step_change, uneven_responses
from mismatch_cli.diagnosis.diagnose import diagnose
from mismatch_cli.diagnosis.evidence import Evidence, EvidenceCollector
from mismatch_cli.diagnosis.origins import Origin, Traces
from mismatch_cli.diagnosis.shared_origins import shared_by
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.trace.reader import table_to_batch
from tests.diagnosis.conftest import finding_of, judged, judged_with_earlier, sampled_alone, whole

STEPS = 8


@pytest.mark.parametrize(("times", "first", "stop", "words"), [
    (1.8, 4, 8, "From step 4 on"), (1.8, 0, 4, "Up to step 3"), (3.0, 5, 6, "In step 5"),
    (3.0, 2, 5, "In steps 2 to 4"), (3.0, 7, 8, "In the last step, 7"),
])  # fmt: skip
def test_the_steps_are_named_with_the_factor(bf16_pool, times, first, stop, words):
    broken = whole(bf16_pool)
    widened(broken, times, of_eight_steps(broken, first, stop))
    diagnosis = judged(broken)
    finding = finding_of(diagnosis, step_change.NAME)
    assert finding.status == "found" and finding.sentence.startswith(f"{words}, the gap is ")
    assert finding.sentence.endswith("The manifest records no change there.")
    change = diagnosis.evidence.step_change
    assert change.between[0] < times < change.between[1] and finding.effect > 0.8 * times
    assert [fault.check for fault in diagnosis.faults] == [step_change.NAME]


def test_healthy_steps_say_what_would_have_been_found(pools, bf16_pool, rng):
    for pool in (pools["fp8-kv"], bf16_pool):
        for _ in range(4):
            healthy = whole(pool)
            _, of_S = np.unique(healthy.rows["prompt_id"], return_inverse=True)
            healthy.rows["step"] = rng.permutation(of_S.max() + 1)[of_S] % 6
            finding = finding_of(judged(healthy), step_change.NAME)
            assert finding.status == "clear"
            assert "times from step 3 on, and" in finding.reason
            assert 1.1 < dict(finding.evidence)["found from step 3 on, if times"] < 1.8


def test_newer_weights_may_move_the_gap_at_any_step(bf16_pool):
    broken = whole(bf16_pool)
    widened(broken, 3.0, of_eight_steps(broken, 4, 8))
    evidence = replace(gather_tables([broken.table()], PAIRS["mismatch"], {}), pair=PAIRS["total"])
    assert step_change.check(evidence).status == "untested" and evidence.subsets == ()


def test_a_gap_that_rises_steadily_does_not_jump(bf16_pool):
    """And the other way round."""
    growing = whole(bf16_pool)
    of_eight_steps(growing, 0, 0)
    for step in range(STEPS):
        of_step_T = (growing.rows["step"] == step)[growing.response_T]
        widened(growing, 1.0 + 0.4 * step, of_step_T)
    assert judged(growing).first_cause.check == growth_over_steps.NAME
    jumping = whole(bf16_pool)
    widened(jumping, 3.0, of_eight_steps(jumping, 4, 8))
    diagnosis = judged(jumping)
    growth = finding_of(diagnosis, growth_over_steps.NAME)
    assert growth.status == "clear" and growth.effect > 2
    assert diagnosis.first_cause.check == step_change.NAME


def test_one_bad_step_is_found_however_little_of_the_gap_it_has(bf16_pool):
    broken = whole(bf16_pool)
    _, of_S = np.unique(broken.rows["prompt_id"], return_inverse=True)
    broken.rows["step"] = (of_S % 32).astype(np.int32)
    widened(broken, 4.0, (broken.rows["step"] == 9)[broken.response_T])
    finding = finding_of(judged(broken), step_change.NAME)
    assert finding.status == "found" and finding.explains < 0.1


def tempered(pool: Pool, where_T: np.ndarray) -> None:
    """Sharper log μ of the sampled tokens."""
    logp_T = pool.tokens["logp_rollout"].astype(np.float64)
    logit_T = logp_T - np.log(-np.expm1(np.minimum(logp_T, -1e-9)))
    sharper_T = -np.logaddexp(0, -1.6 * logit_T)
    pool.tokens["logp_rollout"][where_T] = sharper_T[where_T].astype(np.float32)


def test_a_temperature_that_changes_at_a_step_is_named_with_the_steps(bf16_pool):
    broken = sampled_alone(whole(bf16_pool))
    tempered(broken, of_eight_steps(broken, 5, 8))
    diagnosis = judged(broken)
    first = diagnosis.first_cause
    assert first.check == "temperature"
    assert "from step 5 on" in first.where or "all of steps 5 to 7 (3 of 8)" in first.where
    assert finding_of(diagnosis, step_change.NAME).status == "clear"


def test_a_cause_of_all_steps_is_not_named_as_that_of_some(bf16_pool):
    """A temperature everywhere, and a gap that is larger in some steps."""
    broken = sampled_alone(whole(bf16_pool))
    tempered(broken, np.ones(len(broken.response_T), dtype=bool))
    widened(broken, 2.0, of_eight_steps(broken, 5, 8))
    named = {finding.check: finding for finding in judged(broken).faults}
    assert named["temperature"].where == ""


def test_stale_weights_of_some_steps_are_named_with_them(pools):
    broken = whole(pools["fp8-kv"])
    earlier_T = broken.tokens["logp_trainer"].copy()
    broken.use("weights0.1", of_eight_steps(broken, 3, 6))
    without = judged(broken)
    assert without.first_cause.check == step_change.NAME
    assert without.first_cause.sentence.startswith("In steps 3 to 5, the gap is ")
    first = judged_with_earlier(broken, earlier_T).first_cause
    assert first.check == "stale-weights"
    assert "in steps 3 to 5" in first.where or "all of steps 3 to 5 (3 of 8)" in first.where


def evidence_of_ranks(pool: Pool, rank_S: np.ndarray, traces: Traces = Traces()) -> Evidence:
    """As four ranks of a recorder wrote it, each into a file, in any order; merged from pickles."""
    parts = []
    for rank in np.unique(rank_S).tolist():
        table = pool.take(np.flatnonzero(rank_S == rank)).table().combine_chunks()
        origin = Origin(rank if traces.names else 0, f"shard-{rank:05d}-000000.parquet")
        part = EvidenceCollector(PAIRS["mismatch"])
        part.update(table, table_to_batch(table), origin)
        parts.append(pickle.loads(pickle.dumps(part)))
    for part in parts[1:]:
        parts[0].merge(part)
    return parts[0].evidence({}, pool.about, traces)


def test_every_response_knows_its_file_rank_and_place_in_training(pools):
    table = pools["fp8-kv"].take(np.arange(3)).table().combine_chunks()
    batch = table_to_batch(table)
    columns = Origin(1, "shard-00002-000000.parquet").columns(table, batch)
    assert columns["rank"].tolist() == [2, 2, 2] and columns["trace"].tolist() == [1, 1, 1]
    for name in ("epoch", "minibatch"):
        assert columns[name].tolist() == getattr(batch, f"{name}_S").tolist()


def test_the_responses_of_a_stale_engine_are_named_with_what_they_share(pools):
    """One of four engines, whose responses a rank wrote, or that had one of the samples."""
    pool = pools["fp8-kv"]
    _, of_S = np.unique(pool.rows["prompt_id"], return_inverse=True)
    sample_S = pool.rows["sample_index"]
    for rank_S, words in (
        (of_S % 4, "all of rank 2 (1 of 4; shard-00002-000000.parquet)"),
        (sample_S % 4, "all of rank 2 (1 of 4; shard-00002-000000.parquet)"),
        (np.zeros(len(of_S), dtype=int), "all of sample number 2 and 6 (2 of 8)"),
    ):
        broken = whole(pool)
        broken.rows["step"][:] = 0
        stale_S = sample_S % 4 == 2 if not rank_S.any() else rank_S == 2
        broken.use("weights0.1", stale_S[broken.response_T])
        cause = diagnose(evidence_of_ranks(broken, rank_S)).first_cause
        assert cause.check == uneven_responses.NAME
        assert words.replace("number 2", "numbers 2") in cause.sentence


def by_response(pool: Pool, chosen_S: np.ndarray, changed: Callable[[np.ndarray], object]) -> None:
    """Log μ of the chosen responses, changed."""
    column_T = pool.tokens["logp_rollout"]
    for s in np.flatnonzero(chosen_S).tolist():
        own_T = pool.response_T == s
        column_T[own_T] = changed(column_T[own_T])


BOOKKEEPING: dict[str, Callable[[np.ndarray], object]] = {
    "index-shift": lambda own_T: np.roll(own_T, 1),
    "retokenised": lambda own_T: np.append(own_T[:10], np.roll(own_T[10:], 1)),
    "constant-offset": lambda own_T: own_T - 0.5,
    "log-base": lambda own_T: own_T / np.log(2),
    "another-quantity": lambda own_T: np.full(len(own_T), own_T.mean()),
    "placeholders": lambda own_T: np.where(np.arange(len(own_T)) % 2, 0.0, own_T),
    "stored-values": lambda own_T: np.where(np.arange(len(own_T)) == 4, -1e4, own_T),
}


@pytest.mark.parametrize("check", BOOKKEEPING)
def test_a_rank_with_broken_bookkeeping_is_named(bf16_pool, check):
    broken = sampled_alone(whole(bf16_pool))
    rank_S = np.arange(broken.num_responses) % 20
    by_response(broken, rank_S == 10, BOOKKEEPING[check])
    finding = finding_of(diagnose(evidence_of_ranks(broken, rank_S)), check)
    place = "all of rank 10 (1 of 20; shard-00010-000000.parquet)"
    assert finding.status == "found" and finding.where.endswith(f" responses, {place}")
    assert finding.sentence.endswith(f" The responses with it are {place}.")


def test_the_rank_whose_columns_contradict_each_other_is_named(bf16_pool):
    broken = whole(bf16_pool)
    rank_S = np.arange(broken.num_responses) % 20
    of_rank_T = (rank_S == 10)[broken.response_T]
    broken.ranks["topk_logp_rollout"][of_rank_T] *= 0.7  # from before a temperature
    finding = finding_of(diagnose(evidence_of_ranks(broken, rank_S)), "columns-at-odds")
    assert "all of rank 10 (1 of 20; " in finding.where


def test_the_rank_that_appends_an_end_is_named(bf16_pool):
    broken = sampled_alone(whole(bf16_pool))
    rank_S = np.unique(broken.rows["prompt_id"], return_inverse=True)[1] % 4
    broken.tokens["logp_rollout"][broken.last_T] = -2.0
    broken.tokens["logp_trainer"][broken.last_T] = -2.0
    by_response(broken, rank_S == 2, lambda own_T: np.append(own_T[:-1], 0.0))
    finding = finding_of(diagnose(evidence_of_ranks(broken, rank_S)), "end-of-sequence")
    assert "all of rank 2 (1 of 4; " in finding.where


def test_the_steps_of_exchanged_responses_are_named(bf16_pool):
    broken = sampled_alone(whole(bf16_pool))
    prompts, of_S = np.unique(broken.rows["prompt_id"], return_inverse=True)
    broken.rows["step"] = of_S * 4 // len(prompts)
    column_T, response_T = broken.tokens["logp_trainer"], broken.response_T
    recorded_T = column_T.copy()
    for s in np.flatnonzero(broken.rows["step"] == 1).tolist():
        own_T = response_T == s
        group = np.flatnonzero(of_S == of_S[s])
        other = group[(np.searchsorted(group, s) + 1) % len(group)]
        column_T[own_T] = np.resize(recorded_T[response_T == other], own_T.sum())
    finding = finding_of(judged(broken), "exchanged-responses")
    assert finding.where.endswith("responses, all of step 1 (1 of 4)")


def test_a_fault_in_any_or_in_all_responses_has_no_place(bf16_pool, rng):
    scattered_S = rng.random(bf16_pool.num_responses) < 0.3
    for chosen_S in (scattered_S, np.ones_like(scattered_S)):
        broken = sampled_alone(whole(bf16_pool))
        by_response(broken, chosen_S, BOOKKEEPING["constant-offset"])
        rank_S = np.unique(broken.rows["prompt_id"], return_inverse=True)[1] % 4
        finding = finding_of(diagnose(evidence_of_ranks(broken, rank_S)), "constant-offset")
        assert finding.status == "found" and "The responses with it" not in finding.sentence
        assert "all of" not in finding.where and bool(finding.where) != bool(chosen_S.all())


@pytest.mark.parametrize(("inside", "words"), [
    ([0, 1, *range(2, 42, 2)], ""),  # a pair, and half of ten others
    ([0, 1], ""),
    (range(0, 100, 5), ""),
    ([], ""),
    (range(100), ""),
    (range(20), "all of 10 of 50 prompts"),
])  # fmt: skip
def test_what_responses_share_by_chance_is_not_named(inside, words):
    """Of fifty prompts with two responses each."""
    sample = SimpleNamespace(
        prompt_id_S=np.arange(100) // 2,
        sample_index_S=np.arange(100) % 2,
        step_S=np.zeros(100, dtype=int),
        origin_S={},
    )
    inside_S = np.isin(np.arange(100), list(inside))
    assert shared_by(sample, inside_S, np.ones(100, dtype=bool), Traces()) == words


def test_few_responses_are_of_a_rank_by_chance():
    rank_S = np.arange(8) % 2
    columns = {"prompt_id_S": np.arange(8), "sample_index_S": np.zeros(8, dtype=int)}
    sample = SimpleNamespace(step_S=np.zeros(8, dtype=int), origin_S={"rank": rank_S}, **columns)
    assert shared_by(sample, rank_S == 1, np.ones(8, dtype=bool), Traces()) == ""


def test_an_engine_that_is_stale_from_a_step_on_is_named_with_its_rank(pools):
    broken = whole(pools["fp8-kv"])
    rank_S = broken.rows["sample_index"] % 4
    later_T = of_eight_steps(broken, 4, 8)
    broken.use("weights0.1", later_T & (rank_S == 1)[broken.response_T])
    cause = diagnose(evidence_of_ranks(broken, rank_S)).first_cause
    assert cause.check == step_change.NAME and cause.sentence.startswith("From step 4 on")
    assert cause.sentence.endswith(
        "In these steps, the far ones are all of rank 1 (1 of 4; shard-00001-000000.parquet)."
    )


def test_a_trace_among_several_is_named(pools):
    broken = whole(pools["fp8-kv"])
    broken.rows["step"][:] = 0
    _, of_S = np.unique(broken.rows["prompt_id"], return_inverse=True)
    broken.use("weights0.1", (of_S % 3 == 1)[broken.response_T])
    evidence = evidence_of_ranks(broken, of_S % 3, Traces(("a", "b", "c")))
    assert evidence.far_responses.shared == "all of b (1 of 3 traces)"


def test_what_changed_on_record_at_the_step_is_named(bf16_pool):
    broken = whole(bf16_pool)
    widened(broken, 3.0, of_eight_steps(broken, 4, 8))
    later_S = broken.rows["step"] >= 4
    broken.rows["version_rollout"] = np.where(later_S, 3, 4).astype(np.int32)
    broken.rows["version_trainer"] = np.full(len(later_S), 4, dtype=np.int32)
    broken.tokens["logp_recomputed"] = broken.tokens["logp_trainer"].copy()
    traces = Traces(("a", "b"), {"libraries.vllm": ("0.11", "0.12"), "rollout.seed": (1, 1)})
    finding = step_change.check(evidence_of_ranks(broken, later_S.astype(int), traces))
    assert finding.sentence.endswith(
        "On record there: version_trainer − version_rollout 1 instead of 0; libraries.vllm 0.12 "
        "instead of 0.11."
    )
    assert ("libraries.vllm", "0.12 instead of 0.11") in finding.evidence


def test_thousands_of_steps_are_put_together(bf16_pool):
    broken = whole(bf16_pool)
    broken.rows["step"] = (3 * np.arange(broken.num_responses)).astype(np.int32)
    broken.rows["prompt_id"] = np.arange(broken.num_responses)
    sample = judged(broken).evidence.sample
    assert StepGaps.of(sample) is None  # one prompt a step: no variance within
    by_step_of = by_step.MOST_STEPS
    try:
        by_step.MOST_STEPS = 16
        gaps = StepGaps.of(sample)
        widened(broken, 3.0, (broken.rows["step"] >= 384)[broken.response_T])
        change = find_step_change(judged(broken).evidence.sample)
    finally:
        by_step.MOST_STEPS = by_step_of
    assert len(gaps.first_K) == 16 and gaps.last_K[-1] == 3 * (broken.num_responses - 1)
    assert change.is_found and change.where == "from step 384 on"


def test_the_largest_window_is_that_of_a_plain_loop(rng):
    y_K, weight_K = rng.normal(size=7), rng.uniform(1, 2, 7)
    windows = Windows.of(y_K, weight_K)
    assert len(windows.start_W) == 7 * 8 // 2 - 1
    for start, stop, log, left in zip(
        windows.start_W, windows.stop_W, windows.log_W, windows.chi2_W, strict=True
    ):
        in_it_K = (np.arange(7) >= start) & (np.arange(7) < stop)
        means = [np.average(y_K[part], weights=weight_K[part]) for part in (in_it_K, ~in_it_K)]
        assert log == pytest.approx(means[0] - means[1])
        fit_K = np.where(in_it_K, *means)
        assert left == pytest.approx((weight_K * (y_K - fit_K) ** 2).sum())
    line = np.polyfit(np.arange(7), y_K, 1, w=np.sqrt(weight_K))
    of_line = (weight_K * (y_K - np.polyval(line, np.arange(7))) ** 2).sum()
    assert windows.chi2_of_line == pytest.approx(of_line)


def test_the_factor_that_would_be_found_is_at_the_limit():
    """A jump by it alone is found, and none by less."""
    weight_K = np.full(8, 100.0)
    nothing = Windows.of(np.zeros(8), weight_K)
    for start, stop in ((4, 8), (4, 5)):
        w = nothing.index(start, stop)
        smallest = nothing.smallest_factor(w, 1.0)
        for times, is_found in ((1.02, True), (0.98, False)):
            in_it_K = (np.arange(8) >= start) & (np.arange(8) < stop)
            windows = Windows.of(np.where(in_it_K, times * np.log(smallest), 0.0), weight_K)
            z = by_step.as_normal(windows.log_W[w] / windows.error_W[w], windows.degrees + 1)
            assert (z > windows.z_needed and windows.is_sudden(w)) == is_found


def test_a_drift_is_no_jump_however_certain(bf16_pool):
    """The gap rises by a third, and by half, from the first step to the last."""
    for times in (1.3, 1.5):
        drifting = whole(bf16_pool)
        of_eight_steps(drifting, 0, 0)
        for step in range(STEPS):
            of_step_T = (drifting.rows["step"] == step)[drifting.response_T]
            widened(drifting, times ** (step / (STEPS - 1)), of_step_T)
        assert finding_of(judged(drifting), step_change.NAME).status == "clear"


def test_steps_without_a_counted_token_are_in_no_window(bf16_pool):
    """One of eight steps holds placeholders alone: the others are compared as before."""
    broken = whole(bf16_pool)
    widened(broken, 3.0, of_eight_steps(broken, 5, 8))
    evidence = gather_tables([broken.table()], PAIRS["mismatch"], {})
    sample = evidence.sample
    empty_T = (sample.step_S == 2)[sample.response_T]
    change = find_step_change(replace(sample, counts_T=sample.counts_T & ~empty_T))
    assert change.is_found and change.where == "from step 5 on"
    assert not change.inside_S[sample.step_S == 2].any()
    assert find_step_change(replace(sample, counts_T=np.zeros_like(sample.counts_T))) is None


def test_the_spread_of_prompts_is_found_in_steps_with_two(rng):
    """Ten steps of two prompts with 50 tokens: Σ (sum/mean − tokens)² n/(n − 1) / Σ tokens²."""
    sum_U = 50 * rng.uniform(0.5, 1.5, 20)
    index_U = np.repeat(np.arange(10), 2)
    prompts = by_step.Prompts(index_U, sum_U, np.full(20, 50.0), 10)
    mean_K = sum_U.reshape(10, 2).sum(axis=1) / 100
    left_U = sum_U / mean_K[index_U] - 50
    relative = (left_U**2 * 2).sum() / (20 * 50**2)
    assert prompts.variance_K == pytest.approx(np.full(10, relative * 2 * 50**2 / 100**2))
