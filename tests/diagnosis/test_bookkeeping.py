"""Constants, orders, bases, copies and contradicting columns: what each check says, and where it
stays silent.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from lab import bookkeeping
from lab.pool import gather_tables
from mismatch_cli.diagnosis.alignment import HeadCollector, find_exchanges
from mismatch_cli.diagnosis.checks import repetition_penalty, temperature
from mismatch_cli.diagnosis.counts import ImprobableCopies, content_hashes
from mismatch_cli.diagnosis.diagnose import diagnose
from mismatch_cli.diagnosis.sample import seen_before
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.trace.reader import table_to_batch
from tests.diagnosis.conftest import finding_of, judged, sampled_alone, whole

PLANTS = {
    "constant-offset": (bookkeeping.constant_added, 0.4),
    "exchanged-responses": (bookkeeping.permuted, 0.5),
    "log-base": (bookkeeping.in_base("rollout"), 10),
    "repeated-responses": (bookkeeping.twice, 0.1),
}


@pytest.mark.parametrize("check", PLANTS)
def test_no_other_cause_is_named_and_plain_dumps_show_it_too(pools, check):
    plant, severity = PLANTS[check]
    for pool in pools.values():
        for form in (whole, lambda p: sampled_alone(whole(p))):
            broken = form(pool)
            plant(broken, severity, np.random.default_rng(5))
            diagnosis = judged(broken)
            assert diagnosis.first_cause.check == check
            assert [fault.check for fault in diagnosis.faults] == [check]


@pytest.mark.parametrize(("side", "base", "named"), [
    ("rollout", 2, "the rollout's are to base 2"), ("trainer", 2, "the trainer's are to base 2"),
    ("rollout", 10, "the rollout's are to base 10"),
    ("trainer", 10, "the trainer's are to base 10"),
])  # fmt: skip
def test_the_side_and_its_base_are_named(pools, side, base, named):
    broken = sampled_alone(whole(pools["fp8-kv"]))
    bookkeeping.in_base(side)(broken, base, np.random.default_rng(0))
    first = judged(broken).first_cause
    assert first.check == "log-base" and named in first.sentence and first.explains > 0.9


def test_another_base_in_some_responses_only(pools):
    broken = sampled_alone(whole(pools["fp8-kv"]))
    chosen_T = np.isin(broken.response_T, np.arange(0, broken.num_responses, 5))
    broken.tokens["logp_rollout"][chosen_T] /= np.float32(np.log(2))
    first = judged(broken).first_cause
    assert first.check == "log-base" and first.effect == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("nats", [-1.2, 0.25])
def test_the_constant_is_the_planted_one(pools, nats):
    broken = sampled_alone(whole(pools["fp8-kv"]))
    moved_T = np.isin(broken.response_T, np.arange(0, broken.num_responses, 3))
    # Above 0 where certain: such values are excluded
    broken.tokens["logp_trainer"][moved_T] += np.float32(nats)
    first = judged(broken).first_cause
    assert first.check == "constant-offset"
    assert dict(first.evidence)["median"] == pytest.approx(nats, abs=0.01)
    assert first.effect == pytest.approx(1 / 3, abs=0.01)


def test_a_column_of_another_stage_contradicts_and_explains_the_gap_if_it_makes_it(pools):
    broken = whole(pools["fp8-kv"])
    broken.tokens["logp_rollout"] += np.float32(0.05) * np.random.default_rng(0).normal(
        size=len(broken.response_T)
    )
    broken.tokens["logp_rollout"] = np.minimum(broken.tokens["logp_rollout"], 0).astype(np.float32)
    first = judged(broken).first_cause
    assert first.check == "columns-at-odds" and first.explains > 0.5
    broken = whole(pools["fp8-kv"])
    broken.ranks["topk_logp_trainer"] *= np.float32(1.2)
    finding = finding_of(judged(broken), "columns-at-odds")
    assert (
        finding.status == "found" and not finding.explains and "of the trainer" in finding.sentence
    )


def test_columns_stored_in_bfloat16_do_not_contradict(pools):
    import torch

    broken = whole(pools["fp8-kv"])
    column = torch.from_numpy(broken.ranks["topk_logp_rollout"]).to(torch.bfloat16).float()
    broken.ranks["topk_logp_rollout"] = column.numpy()
    assert finding_of(judged(broken), "columns-at-odds").status == "clear"


def test_a_reused_response_and_a_likely_one_are_not_copies(pools):
    """Another epoch of the same sample keeps its key; four nearly certain tokens recur by
    chance.
    """
    pool = whole(pools["float32"])
    again = whole(pools["float32"])
    again.rows["epoch"] = again.rows["epoch"] + 1
    copies = ImprobableCopies()
    for used in (pool, again):
        copies.update(table_to_batch(used.table()))
    assert copies.count()[0] == 0
    likely = whole(pools["float32"])
    likely.tokens["logp_rollout"][:] = -0.01
    likely.rows["sample_index"] = likely.rows["sample_index"] + 100
    copies.update(table_to_batch(likely.table()))
    assert copies.count()[0] == 0
    again.rows["prompt_id"] = again.rows["prompt_id"] + 10_000
    copies.update(table_to_batch(again.table()))
    repeated, looked_at = copies.count()
    assert 2 * repeated == looked_at and repeated > 80


def test_copies_are_found_in_bounded_memory(pools):
    """A long trace keeps the responses with the smallest hashes, a response and its copy
    together.
    """
    copies, copied = ImprobableCopies(most_responses=60), 0
    for shift in (0, 10_000):
        used = whole(pools["fp8-kv"])
        used.rows["prompt_id"] = used.rows["prompt_id"] + shift
        copies.update(table_to_batch(used.table()))
    copied, looked_at = copies.count()
    assert looked_at <= 60 and 2 * copied == looked_at > 40


def test_hashes_depend_on_the_order_of_the_tokens():
    ids_T, offset_S1 = np.array([1, 2, 3, 3, 2, 1, 1, 2, 3]), np.array([0, 3, 6, 9])
    first, turned, same = content_hashes(ids_T, offset_S1)
    assert first == same != turned


def test_exchanges_are_found_in_any_sharding_and_in_bounded_memory(pools):
    broken = whole(pools["fp8-kv"])
    bookkeeping.permuted(broken, 0.5, np.random.default_rng(1))
    table, findings = broken.table(), []
    for pieces, most in ((1, 2**12), (6, 2**12), (5, 40)):
        collector = HeadCollector(PAIRS["mismatch"], most)
        step = -(-len(table) // pieces)
        for start in range(0, len(table), step):
            collector.update(table_to_batch(table.slice(start, step).combine_chunks()))
        heads = collector.result()
        assert len(heads.step_R) <= most
        findings.append(find_exchanges(heads))
    assert findings[0].partner_R.tolist() == findings[1].partner_R.tolist()
    for exchanges in findings:
        assert exchanges.exchanged_R.sum() > 0.8 * exchanges.misfit_R.sum() > 0
        heads = exchanges.heads
        assert (heads.prompt_id_R[exchanges.partner_R] == heads.prompt_id_R)[
            exchanges.exchanged_R
        ].all()


def test_seen_tokens_are_those_that_a_plain_loop_finds(rng):
    for _ in range(20):
        prompt, response = rng.integers(0, 30, rng.integers(1, 9)), rng.integers(0, 30, 12)
        topk_TK = rng.integers(0, 40, (12, 4))
        repeats = seen_before(prompt, response, topk_TK)
        for t in range(12):
            context = {*prompt.tolist(), *response[:t].tolist()}
            assert repeats["seen_T"][t] == (response[t] in context)
            assert repeats["topk_seen_TK"][t].tolist() == [
                token in context for token in topk_TK[t].tolist()
            ]


@pytest.mark.parametrize("variant", ["temperature1.05", "weights0.1", "linear4"])
def test_other_faults_are_not_called_a_penalty(pools, variant):
    for pool in pools.values():
        for form in (whole, lambda p: sampled_alone(whole(p))):
            broken = form(pool)
            broken.engine_uses(variant)
            assert finding_of(judged(broken), "repetition-penalty").status != "found"


def test_what_top_p_adds_to_uncertain_tokens_is_not_called_a_constant(pools):
    """top-p 0.9 keeps 0.9 or a little more unless one token has it all: in some responses nearly
    everywhere.
    """
    broken, rng = sampled_alone(whole(pools["float32"])), np.random.default_rng(0)
    logq_T = broken.tokens["logp_rollout"]
    kept_T = np.maximum(0.9 + 0.1 * rng.uniform(size=len(logq_T)) ** 2, np.exp(logq_T))
    broken.tokens["logp_rollout"] = np.where(
        logq_T > np.log(0.9), 0, logq_T - np.log(kept_T)
    ).astype(np.float32)
    diagnosis = judged(broken)
    assert (
        diagnosis.first_cause.check == "truncated-support" and diagnosis.first_cause.explains > 0.9
    )
    assert finding_of(diagnosis, "constant-offset").status == "clear"


def test_a_penalty_on_sampled_tokens_alone_is_not_called_a_temperature(pools):
    """Both bend the log-odds, but a penalty only those of tokens that are in the context."""
    for variant, differs, status in (
        ("penalised1.1", True, "clear"),
        ("temperature1.05", False, "found"),
    ):
        broken = sampled_alone(whole(pools["float32"]))
        broken.engine_uses(variant)
        diagnosis = judged(broken)
        assert finding_of(diagnosis, "temperature").status == status
        assert temperature.differs_where_seen(diagnosis.evidence.sample) == differs


@pytest.mark.parametrize(
    ("nats", "z", "explains", "status"),
    [
        (0.011, 6.5, 0.21, "found"), (-0.011, -6.5, 0.21, "found"), (0.009, 6.5, 0.21, "clear"),
        (0.011, 5.5, 0.21, "clear"), (0.011, 6.5, 0.19, "clear"),
    ],
)  # fmt: skip
def test_a_penalty_is_found_from_the_limits_of_the_guide_on(monkeypatch, nats, z, explains, status):
    """0.01 nats, z > 6, a fifth of the gap: docs/constants.md."""
    d_N = np.full(100, 0.1)
    fit = repetition_penalty.PenaltyFit(nats, abs(nats / z), (1 - explains) * d_N, "a table")
    monkeypatch.setattr(repetition_penalty, "from_topk", lambda _: fit)
    evidence = SimpleNamespace(sample=SimpleNamespace(d_N=d_N))
    assert repetition_penalty.check(evidence).status == status


def test_a_penalty_in_the_trainer_is_named_with_its_side(pools):
    broken = whole(pools["float32"])
    broken.use("penalised1.1")
    evidence = gather_tables([broken.table()], PAIRS["mismatch"], {"temperature": 1.0})
    first = diagnose(evidence).first_cause
    assert (
        first.check == "repetition-penalty"
        and first.sentence.startswith("The trainer")
        and first.effect < -0.3
    )
