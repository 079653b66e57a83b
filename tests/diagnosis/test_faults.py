"""Every fault planted into healthy traces from real vLLM is named first; healthy traces have
none.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.faults import FAULTS, in_steps
from lab.pool import gather_tables
from mismatch_cli.diagnosis.diagnose import PRECISION_STAGE, diagnose, module, names
from mismatch_cli.metrics.pairs import PAIRS
from tests.diagnosis.conftest import judged, whole
from tests.diagnosis.planted import BY_NAME, SEVERITY, broken, first_steps

NEED_THE_MODEL = (
    "adapter-scale",
    "another-prompt",
    "attended-padding",
    "missing-tensor",
    "not-reproduced",
    "packed-responses",
    "position-encoding",
)
# What log-probabilities alone cannot tell from other weights
IN_THE_SET = {"linear RoPE scaling": 4}
MODEL_AT_HAND = {"linear RoPE scaling, model at hand": 4, "RoPE base, model at hand": 4}
NOT_SCORED_HERE = {
    name for name in BY_NAME if "prompt" in name or "padding" in name or "YaRN" in name
}


@pytest.mark.parametrize("pool", ["float32", "fp8-kv"])
@pytest.mark.parametrize("name", SEVERITY)
def test_a_planted_fault_is_the_first_cause(pools, pool, name):
    findings = judged(broken(pools[pool], name)).found
    assert [finding.check for finding in findings][:1] == [BY_NAME[name].check]
    assert findings[0].sentence and findings[0].evidence
    assert (findings[0].effect or 0) > 0


@pytest.mark.parametrize("pool", ["float32", "fp8-kv"])
@pytest.mark.parametrize("name", IN_THE_SET)
def test_what_tokens_alone_cannot_distinguish_is_named_as_a_set(pools, pool, name):
    broken = whole(pools[pool])
    BY_NAME[name].plant(broken, IN_THE_SET[name], np.random.default_rng(3))
    diagnosis = judged(broken)
    assert diagnosis.first_cause is None and diagnosis.unexplained.nats > 0.1
    assert {BY_NAME[name].check, "stale-weights"} <= {
        suspect.check for suspect in diagnosis.suspects
    }


@pytest.mark.parametrize("pool", ["float32", "fp8-kv"])
def test_a_healthy_trace_has_no_fault(pools, pool):
    healthy = whole(pools[pool])
    in_steps(healthy, np.random.default_rng(0))
    diagnosis = judged(healthy)
    assert diagnosis.faults == ()
    assert {f.check for f in diagnosis.found} <= ({"logit-lattice"} if pool == "fp8-kv" else set())
    untested = {f.check for f in diagnosis.findings if f.status == "untested"}
    # These need an earlier checkpoint, another manifest, or the model.
    needing = {"stale-weights", "rounded-weights", *NEED_THE_MODEL}
    # Without a gap there is nothing to explain; of these few prompts, few have different rewards
    assert untested - {"credit"} == (set() if pool == "float32" else needing)


def test_an_earlier_checkpoint_that_fits_better_means_stale_weights(pools):
    broken = whole(pools["fp8-kv"])
    earlier_T = broken.tokens["logp_trainer"].copy()
    broken.use("weights0.1")
    order = np.lexsort([broken.rows[name] for name in ("sample_index", "prompt_id", "step")])
    spans = [slice(broken.offset_S1[s], broken.offset_S1[s + 1]) for s in order]
    evidence = gather_tables([broken.table()], PAIRS["mismatch"], {})
    stale = replace(evidence, earlier_logp_T=np.concatenate([earlier_T[span] for span in spans]))
    assert diagnose(stale).found[0].check == "stale-weights"
    healthy = replace(evidence, earlier_logp_T=evidence.sample.logp_T)
    assert "stale-weights" not in [f.check for f in diagnose(healthy).found]


def test_the_fitted_temperature_is_the_planted_one(pools):
    broken = first_steps(pools["fp8-kv"])
    broken.use("temperature1.05")
    assert judged(broken).found[0].effect == pytest.approx(1 / 1.05, abs=0.015)
    for name in ("topk_logp_rollout", "topk_logp_trainer", "topk_ids"):
        del broken.ranks[name]
    broken.tokens.pop("entropy_trainer", None)
    only_sampled = judged(broken).found[0]
    assert only_sampled.check == "temperature"
    assert only_sampled.effect == pytest.approx(1 / 1.05, abs=0.02)


def test_the_lag_is_the_planted_one(pools):
    broken = pools["float32"].take(np.arange(96))
    for s in range(96):
        own = slice(broken.offset_S1[s], broken.offset_S1[s + 1])
        broken.tokens["logp_rollout"][own] = np.roll(broken.tokens["logp_rollout"][own], 2)
    assert dict(judged(broken).found[0].evidence)["lag, tokens"] == -2


def test_a_fault_that_spoils_the_rest_leaves_it_untested(pools):
    broken = pools["fp8-kv"].take(np.arange(192))
    BY_NAME["shifted by one"].plant(broken, 1.0, np.random.default_rng(0))
    diagnosis = judged(broken)
    later = [f for f in diagnosis.findings if module(f.check).STAGE > 2]
    assert {f.status for f in later} == {"untested"}
    assert all("fix" in f.reason and f.reason.endswith("first") for f in later)


def test_only_the_trainer_truncates(pools):
    broken = pools["fp8-kv"].take(np.arange(192))
    logp_T = broken.tokens["logp_trainer"]
    outside_T = logp_T < -4
    mass_T = 1 - 0.02 * np.random.default_rng(0).random(len(logp_T), dtype=np.float32)
    broken.tokens["logp_trainer"] = np.where(
        outside_T, -np.inf, np.minimum(logp_T - np.log(mass_T), 0)
    ).astype(np.float32)
    finding = judged(broken).found[0]
    assert (
        finding.check == "truncated-support" and "probability 0 in the trainer" in finding.sentence
    )


def test_two_faults_are_both_named_the_larger_first(pools):
    broken = pools["float32"].take(np.arange(96))
    broken.use("temperature1.05")
    BY_NAME["log-probs above 0"].plant(broken, 1e-3, np.random.default_rng(0))
    diagnosis = judged(broken)
    assert [f.check for f in diagnosis.faults] == ["temperature", "values"]
    assert diagnosis.first_cause.check == "temperature" and diagnosis.first_cause.explains > 0.5


def test_any_sharding_gives_the_same_findings(pools):
    pool = pools["fp8-kv"]
    whole, cut = (judged(pool, pieces=pieces).findings for pieces in (1, 5))
    for one, other in zip(whole, cut, strict=True):
        assert replace(one, left_N=None) == replace(other, left_N=None)


def test_every_check_says_what_it_is():
    assert len(names()) >= 17
    for name in names():
        check = module(name)
        assert name == check.NAME and check.STAGE in range(1, PRECISION_STAGE + 3)
        assert all(getattr(check, word).strip() for word in ("TITLE", "CAUSE", "CHANGE", "SOURCE"))
        assert check.check.__doc__
    not_planted = {"other weights on one side", *IN_THE_SET, *MODEL_AT_HAND, *NOT_SCORED_HERE}
    assert set(SEVERITY) | not_planted == set(BY_NAME)
    # `attention` in tests/app/commands, `rounded-weights` in test_model_at_hand.py, `credit` and
    # `not-as-sampled` in test_silent_faults.py, what a trainer's model tells in
    # test_trainers_side.py
    elsewhere = {
        "truncated-support",
        "logit-lattice",
        "unexplained-gap",
        "attention",
        "rounded-weights",
        "credit",
        "not-as-sampled",
        "adapter-scale",
        "context-parallel",
        "missing-tensor",
        "not-repeatable",
        "packed-responses",
    }
    assert {fault.check for fault in FAULTS} | elsewhere == set(names())
