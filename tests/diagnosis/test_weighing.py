"""Causes compete: the one that explains most is first, one that leaves most of it is none, the
rest is reported.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from lab.faults import FAULTS
from mismatch_cli.diagnosis.diagnose import Findings, Unexplained, Weighing
from mismatch_cli.diagnosis.evidence import Finding
from mismatch_cli.diagnosis.sample import Sample
from mismatch_cli.limits.expected import Expected
from tests.diagnosis.conftest import finding_of, judged, judged_with_earlier, sampled_alone, whole

FLOAT32 = {
    "rollout": {"dtype": "float32"},
    "trainer": {"dtype": "float32", "architecture": "Qwen3ForCausalLM"},
}
FP8 = {
    "rollout": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "trainer": {"dtype": "bfloat16", "architecture": "Qwen3ForCausalLM"},
}


def test_stale_weights_that_explain_most_come_before_a_temperature(pools):
    """Other weights, and a temperature of 1.02 on top: the earlier checkpoint explains 95 %."""
    broken = whole(pools["float32"])
    cold_T = broken.tokens["logp_trainer"] * np.float32(0.98)
    broken.use("weights0.1")
    broken.tokens["logp_trainer"] *= np.float32(0.98)
    diagnosis = judged_with_earlier(broken, cold_T, FLOAT32)
    assert diagnosis.first_cause.check == "stale-weights" and diagnosis.first_cause.explains > 0.8
    assert diagnosis.unexplained.share < 0.2


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("pool", "about"), [("float32", FLOAT32), ("fp8-kv", FP8)])
def test_other_weights_without_the_earlier_model_are_unexplained(pools, pool, about, alone):
    broken = whole(pools[pool])
    broken.use("weights0.1")
    diagnosis = judged(sampled_alone(broken) if alone else broken, about)
    assert diagnosis.first_cause is None
    if alone and about is FP8:
        # Sampled tokens alone do not show how coarse the logits are, and other models had this gap
        assert diagnosis.faults == () and not diagnosis.is_at_own_scale
        return
    assert [fault.check for fault in diagnosis.faults] == ["unexplained-gap"]
    assert diagnosis.unexplained.nats > 0.04 and diagnosis.unexplained.share == pytest.approx(1.0)
    assert "stale-weights" in [suspect.check for suspect in diagnosis.suspects]
    assert "are expected of" in diagnosis.faults[0].sentence


@pytest.mark.parametrize(("pool", "about"), [("float32", FLOAT32), ("fp8-kv", FP8)])
def test_top_p_seen_in_the_sampled_tokens_only_is_not_called_a_temperature(pools, pool, about):
    """The nucleus is cut from both sides' top 20; tokens outside were not sampled."""
    broken = whole(pools[pool])
    log_mass_T, inside_T = nucleus(
        broken.ranks["topk_logp_rollout"], broken.tokens["logp_rollout"], 0.95
    )
    broken.tokens["logp_rollout"] = np.minimum(
        broken.tokens["logp_rollout"] - log_mass_T, 0
    ).astype(np.float32)
    broken.tokens["logp_trainer"] = np.where(
        inside_T, broken.tokens["logp_trainer"], np.nan
    ).astype(np.float32)
    diagnosis = judged(sampled_alone(broken), about)
    names = [finding.check for finding in diagnosis.found if finding.check != "values"]
    assert names[0] == "truncated-support" and "temperature" not in names


def nucleus(topk_TK: np.ndarray, logp_T: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """The log of the kept mass, and whether the sampled token is in it."""
    before_TK = np.cumsum(np.exp(topk_TK), axis=1) - np.exp(topk_TK)
    kept_TK = np.where(before_TK < top_p, topk_TK, -np.inf)
    log_mass_T = np.log(np.exp(kept_TK).sum(axis=1))
    lowest_T = kept_TK.min(axis=1, where=np.isfinite(kept_TK), initial=0.0)
    return log_mass_T, logp_T >= lowest_T - 1e-6


def test_another_base_of_the_logarithm_is_not_called_a_temperature(pools):
    broken = whole(pools["fp8-kv"])
    broken.tokens["logp_trainer"] /= np.float32(np.log(2))
    diagnosis = judged(sampled_alone(broken), FP8)
    assert "temperature" not in [finding.check for finding in diagnosis.found]


def test_the_lattice_is_never_the_cause(pools):
    diagnosis = judged(whole(pools["fp8-kv"]), FP8)
    assert finding_of(diagnosis, "logit-lattice").status == "found"
    assert diagnosis.first_cause is None and diagnosis.faults == ()


def test_undoing_leaves_less_and_shares_add_up(pools):
    broken, rng = whole(pools["float32"]), np.random.default_rng(0)
    broken.use("temperature1.05")
    next(f for f in FAULTS if f.name == "−1.0 for a missing log-prob").plant(broken, 0.01, rng)
    diagnosis = judged(broken, FLOAT32)
    assert {fault.check for fault in diagnosis.faults} == {"temperature", "placeholders"}
    explained = sum(fault.explains for fault in diagnosis.faults)
    assert explained + diagnosis.unexplained.share == pytest.approx(1.0, abs=1e-9)
    assert diagnosis.unexplained.nats < 0.02


def test_what_hides_a_tail_is_the_fault_that_explains_most(pools):
    broken = whole(pools["fp8-kv"])
    shifted = next(fault for fault in FAULTS if fault.name == "shifted by one")
    shifted.plant(broken, 0.5, np.random.default_rng(0))
    broken.tokens["logp_rollout"][:4] = 0.01
    diagnosis = judged(broken, FP8)
    assert {fault.check for fault in diagnosis.faults} == {"values", "index-shift"}
    tail = finding_of(diagnosis, "heavy-tail")
    assert tail.status == "untested"
    assert tail.reason.startswith("what is left of “Shifted by some tokens” looks like a tail")


def test_advantages_hide_no_tail(pools):
    weighing = Weighing(1.0)
    weighing.answers["credit"] = Finding("credit", "found")
    weighing.check_tails(judged(whole(pools["fp8-kv"])).evidence)
    assert "fix that first" not in weighing.answers["heavy-tail"].reason


@pytest.mark.parametrize(
    "name", ["shifted by one", "appended end-of-sequence, 0.0", "tool tokens in the loss"]
)
def test_what_repair_leaves_of_spoiled_tokens_is_not_explained(pools, name):
    """No later check sees these tokens, but their own gap is still part of the whole."""
    broken = whole(pools["fp8-kv"])
    next(f for f in FAULTS if f.name == name).plant(broken, 1.0, np.random.default_rng(0))
    diagnosis = judged(broken, FP8)
    explained = sum(fault.explains for fault in diagnosis.faults)
    assert diagnosis.unexplained.share > 0 and diagnosis.shares.explained == pytest.approx(
        explained, abs=1e-9
    )
    assert (
        diagnosis.shares.explained + diagnosis.shares.expected + diagnosis.shares.unexplained
        == pytest.approx(1)
    )


def test_a_shift_of_every_response_leaves_the_gap_before_it(pools):
    before = judged(whole(pools["fp8-kv"]), FP8).unexplained.nats
    broken = whole(pools["fp8-kv"])
    next(f for f in FAULTS if f.name == "shifted by one").plant(
        broken, 1.0, np.random.default_rng(0)
    )
    after = judged(broken, FP8).unexplained
    assert after.nats == pytest.approx(before, rel=0.2) and 0 < after.share < 0.2


def test_a_dense_model_has_no_experts_and_few_tokens_no_tail(pools):
    rng, fault = np.random.default_rng(0), next(f for f in FAULTS if f.name == "routing flips")
    broken = whole(pools["fp8-kv"])
    fault.plant(broken, 0.03, rng)
    tail = finding_of(judged(broken, FP8), "heavy-tail")
    assert tail.status == "found" and "expert" not in tail.cause + tail.change
    of_some_family = {"rollout": FP8["rollout"], "trainer": {"dtype": "bfloat16"}}
    unknown = finding_of(judged(broken, of_some_family), "heavy-tail")
    assert "In a mixture of experts" in unknown.cause
    few = judged(whole(pools["fp8-kv"]).take(np.arange(2)), FP8)
    assert finding_of(few, "heavy-tail").status == "untested"


def test_a_tail_of_tokens_that_makes_the_gap_too_large_is_a_fault(pools):
    """Whatever the family: no precision moves a few tokens so far."""
    broken = whole(pools["float32"])
    next(f for f in FAULTS if f.name == "routing flips").plant(
        broken, 0.03, np.random.default_rng(0)
    )
    experts = {"rollout": {"dtype": "float32", "num_experts": 8}, "trainer": {"dtype": "float32"}}
    for about in (FLOAT32, experts):
        diagnosis = judged(broken, about)
        assert [fault.check for fault in diagnosis.faults] == ["heavy-tail"]
        assert diagnosis.first_cause.beyond_expected and diagnosis.first_cause.explains > 0.9


def test_tiny_healthy_traces_have_no_cause(pools):
    rng = np.random.default_rng(1)
    for name, about in (("float32", FLOAT32), ("fp8-kv", FP8)):
        pool = pools[name]
        for _ in range(15):
            prompts = rng.choice(np.unique(pool.rows["prompt_id"]), 6, replace=False)
            few = pool.take(
                np.flatnonzero(np.isin(pool.rows["prompt_id"], prompts))[:: rng.integers(1, 4)]
            )
            diagnosis = judged(few, about)
            assert diagnosis.first_cause is None and diagnosis.faults == (), name


@pytest.mark.parametrize("alone", [False, True])
def test_a_few_tokens_that_make_the_gap_are_a_fault_with_their_values(bf16_pool, alone):
    """No constant that code is known to write: 12 tokens at −23.5, 9 at −60,000, 7 at −30."""
    for column, value, tokens in (
        ("logp_trainer", -23.5, 12),
        ("logp_trainer", -60_000.0, 9),
        ("logp_rollout", -30.0, 7),
    ):
        broken = whole(bf16_pool)
        places = np.random.default_rng(0).choice(len(broken.tokens[column]), tokens, replace=False)
        broken.tokens[column][places] = value
        diagnosis = judged(sampled_alone(broken) if alone else broken)
        (tail,) = diagnosis.faults
        assert tail.check == "heavy-tail" and tail.beyond_expected and tail.explains > 0.6
        assert f"{value:.4g}" in tail.sentence and "nats without them" in tail.sentence


def test_a_trace_without_a_fault_and_one_with_a_large_gap_are_decided(bf16_pool):
    healthy = judged(whole(bf16_pool))
    assert healthy.is_decided and healthy.is_at_own_scale and not healthy.is_unexplained
    # Sampled tokens alone do not show the logits, and the range of other models clears nobody
    alone = judged(sampled_alone(whole(bf16_pool)))
    assert alone.faults == () and alone.is_decided and not alone.is_at_own_scale


@pytest.mark.parametrize(("nats", "findings", "decided"), [
    (0.05, (), True), (0.07, (), False), (0.5, (Finding("unexplained-gap", "found"),), True),
])  # fmt: skip
def test_what_is_left_above_the_expected_without_certainty_is_undecided(nats, findings, decided):
    expected = Expected(0.01, 0.06, "bf16 against bf16", "logits on a grid", True)
    evidence = SimpleNamespace(expected=expected, gap=SimpleNamespace(value=1.0))
    diagnosis = Findings(evidence, findings, Unexplained(nats, 1.0))
    assert diagnosis.is_decided is decided and diagnosis.is_unexplained is bool(findings)
    assert diagnosis.shares.expected == pytest.approx(min(1, 0.06 / nats))


def test_two_temperatures_in_the_manifest_need_no_fit(pools):
    """On four prompts a fit has no error to speak of; the gap that they make is undone exactly."""
    broken = whole(pools["float32"])
    broken.use("temperature1.05")
    few = broken.take(np.flatnonzero(broken.rows["prompt_id"] < 3))
    about = {"rollout": {"dtype": "float32"}, "trainer": {"dtype": "float32"}}
    assert finding_of(judged(few, about), "temperature").status != "found"
    about["trainer"] = {"dtype": "float32", "temperature": 1.05}
    about["config"] = {"sampling": {"temperature": 1.0}}
    finding = finding_of(judged(few, about), "temperature")
    assert finding.status == "found" and finding.effect == pytest.approx(1 / 1.05)
    assert finding.sentence == "The engine's temperature is 1, and the trainer's 1.05."
    assert finding.explains > 0.9


def test_halves_of_nine_prompts_are_made_by_count(pools):
    pool = pools["float32"]
    prompts = np.unique(pool.rows["prompt_id"])[:9]
    nine = pool.take(np.flatnonzero(np.isin(pool.rows["prompt_id"], prompts)))
    sample = judged(nine, FLOAT32).evidence.sample
    tokens = np.bincount(sample.half_N, minlength=2)
    assert abs(int(tokens[0]) - int(tokens[1])) < 0.2 * tokens.sum()
    groups = [len(np.unique(sample.group_N[sample.half_N == half])) for half in (0, 1)]
    assert min(groups) >= 3


def test_halves_are_dealt_from_the_largest_group_to_the_half_with_fewer_tokens():
    """2 tokens to the first half, then 1 and 1 to the second; groups without a token change
    nothing.
    """
    half_G = Sample.half_G.func(SimpleNamespace(group_N=np.array([3, 7, 0, 3])))
    assert (half_G[3], half_G[0], half_G[7]) == (0, 1, 1)
    # After 3 and 3 tokens, a tie: the first half
    half_G = Sample.half_G.func(SimpleNamespace(group_N=np.repeat([1, 2, 3, 4], [3, 2, 1, 1])))
    assert half_G[1:5].tolist() == [0, 1, 1, 0]


class OfFixedShares(Weighing):
    """Each cause explains the same whatever else is undone."""

    def answer(self, name: str, _: object) -> Finding:
        return self.answers[name]

    def undo(self, _: Finding, evidence: object) -> object:
        return evidence


@pytest.mark.parametrize(("shares", "nats", "undone"), [
    ((0.25, 0.125), 0.06, ["temperature"]),
    ((0.2, 0.125), 0.06, ["temperature", "log-base"]),
    ((0.125, 0.25), 0.06, ["log-base"]),
    ((0.25, 0.125), 0.07, ["temperature", "log-base"]),
])  # fmt: skip
def test_causes_are_undone_until_half_is_explained_and_the_rest_is_expected(shares, nats, undone):
    """100 nats, after 100 others were repaired; shares are of all 200."""
    weighing = OfFixedShares(200.0)
    weighing.causes = ["temperature", "log-base"]
    for name, share in zip(weighing.causes, shares, strict=True):
        weighing.answers[name] = Finding(name, "found", explains=share)
    evidence = SimpleNamespace(gap=SimpleNamespace(value=nats), expected=SimpleNamespace(high=0.06))
    _, findings = weighing._undo_strongest(evidence, 100.0)
    assert [finding.check for finding in findings] == undone
