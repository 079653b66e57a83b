"""With the trainer's model, what one side misread is named; without a fault nothing is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from lab.faults import FAULTS
from lab.pool import Pool
from lab.variants import model_at_hand
from mismatch_cli.diagnosis import hypotheses
from mismatch_cli.diagnosis.diagnose import diagnose
from mismatch_cli.diagnosis.model import AS_RECORDED, ModelAtHand, rounded_to
from mismatch_cli.diagnosis.readings import Readings
from tests.diagnosis.conftest import (
    MODEL,
    evidence_of,
    finding_of,
    imported,
    judged_with_model,
    scored,
    whole,
)
from tests.diagnosis.few import few_hypotheses
from tests.families import FAMILIES, config_of

PLAIN = FAMILIES["llama"].without
BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.fixture(autouse=True)
def _few_hypotheses(monkeypatch):
    few_hypotheses(monkeypatch)


@pytest.fixture(scope="module")
def few(pools) -> Pool:
    return imported(pools["float32"], np.arange(0, 96, 8), "float32")


@pytest.mark.parametrize(("name", "severity", "side"), [
    ("linear RoPE scaling, model at hand", 4, "rollout"),
    ("RoPE base, model at hand", 4, "trainer"),
])  # fmt: skip
def test_the_scaling_of_positions_is_named_with_its_side(few, name, severity, side):
    broken = whole(few)
    BY_NAME[name].plant(broken, severity, np.random.default_rng(0))
    first = judged_with_model(broken).first_cause
    assert first.check == "position-encoding" and first.explains > 0.95
    assert dict(first.evidence)["the side that differs"] == side
    assert f"{severity}" in dict(first.evidence)["it read the responses with"]


@pytest.mark.parametrize(("hypothesis", "check", "side"), [
    (hypotheses.padded(5, 2), "attended-padding", "logp_rollout"),
    (hypotheses.padded_to(64, 2), "attended-padding", "logp_trainer"),
    (hypotheses.other_prompts(type("Config", (), {}))[1], "another-prompt", "logp_rollout"),
])  # fmt: skip
def test_padding_and_a_prompt_with_an_extra_token_are_named(few, hypothesis, check, side):
    broken = whole(few)
    broken.tokens[side] = scored(few, hypothesis)
    first = judged_with_model(broken).first_cause
    assert first.check == check and first.explains > 0.95
    assert dict(first.evidence)["the side that differs"] == side.removeprefix("logp_")
    assert dict(first.evidence)["it read the responses with"] == hypothesis.name


def test_where_a_few_paddings_explain_the_gap_no_long_prompt_is_read(few):
    broken, padding = whole(few), hypotheses.padded(6, 2)
    broken.tokens["logp_trainer"] = scored(few, padding)
    evidence = evidence_of(broken)
    model = model_at_hand(broken, evidence.sample)
    survey = Readings(evidence.sample, model).search("padding")
    assert survey.reading.name == padding.name
    assert not [name for name, _ in model.scored if "padded to" in name]


def test_trainer_numbers_that_its_model_does_not_give_are_called_so(few):
    broken = whole(few)
    broken.use("weights0.1")
    first = judged_with_model(broken).first_cause
    assert first.check == "not-reproduced" and first.explains > 0.95


def test_a_model_reads_128_responses_from_the_first_to_the_last():
    zero_S = np.zeros(1000, dtype=int)
    sample = SimpleNamespace(
        num_responses=1000, step_S=zero_S, prompt_id_S=np.arange(1000), sample_index_S=zero_S,
        length_S=zero_S + 1,
    )  # fmt: skip
    prompts = {(0, number, 0): [1] for number in range(1000)}
    read = ModelAtHand(sample, prompts, load=lambda: None).responses
    assert len(read) == 128 and (read[0], read[-1]) == (0, 999)
    assert set(np.diff(read)) == {7, 8}


def test_other_weights_in_the_engine_stay_a_set(few):
    """The model confirms the trainer; for the engine it only shows that something differs."""
    broken = whole(few)
    broken.engine_uses("weights0.1")
    diagnosis = judged_with_model(broken)
    assert diagnosis.first_cause is None
    assert "stale-weights" in [suspect.check for suspect in diagnosis.suspects]


def moved(then: hypotheses.Hypothesis = AS_RECORDED) -> hypotheses.Hypothesis:
    """The model after a small step of all weights, which are numbers of bfloat16 before it."""

    @contextmanager
    def changed(model: Any) -> Iterator[None]:
        step(model, 1.0015)
        with then.changed(model):
            yield
        step(model, 1 / 1.0015)

    return hypotheses.Hypothesis(f"moved, {then.name}", changed=changed)


@torch.no_grad()
def step(model: Any, factor: float) -> None:
    for weight in model.parameters():
        weight.mul_(factor)


def test_rounded_weights_are_not_called_stale(few):
    """A float32 trainer, whose engine has its weights in bfloat16: after a small step those
    before are as near.
    """
    rounded = whole(few)
    rounded.about = few.about | {"rollout": {"dtype": "bfloat16", "model": MODEL}}
    rounded.tokens["logp_rollout"] = scored(few, moved(rounded_to("bfloat16")))
    rounded.tokens["logp_trainer"] = scored(few, moved())
    evidence = evidence_of(rounded)
    model = model_at_hand(rounded, evidence.sample)
    earlier = replace(evidence, earlier_logp_T=model.logp_T())
    model.scored.clear()
    step(model.loaded, 1.0015)
    answers = {
        finding.check: finding for finding in diagnose(replace(earlier, model=model)).findings
    }
    assert (
        answers["rounded-weights"].status == "found" and answers["rounded-weights"].explains > 0.9
    )
    assert answers["stale-weights"].status == "clear"
    alone = {finding.check: finding for finding in diagnose(earlier).findings}
    assert (
        alone["rounded-weights"].status == "untested"
        and alone["rounded-weights"].needs == "--trainer-model MODEL"
    )
    assert "--trainer-model tells the two apart" in alone["stale-weights"].sentence
    model.scored.clear()
    step(model.loaded, 1 / 1.0015)
    healthy = evidence_of(few, rounded.about)
    assert "rounded-weights" not in [
        fault.check for fault in diagnose(replace(healthy, model=model)).faults
    ]


def test_a_healthy_trace_is_read_too_and_clear_says_how(few):
    evidence = evidence_of(few)
    model = model_at_hand(few, evidence.sample)
    diagnosis = diagnose(replace(evidence, model=model))
    assert diagnosis.faults == ()
    assert finding_of(diagnosis, "another-prompt").sentence.startswith(
        "The model read 1 response after"
    )
    assert {"the first token twice", "no norms of queries and keys"} <= {n for n, _ in model.scored}
    assert model.spent < model.budget


def test_a_hypothesis_leaves_the_model_as_it_was(few):
    evidence = evidence_of(few)
    model = model_at_hand(few, evidence.sample)
    before = model.logp_T(AS_RECORDED, few=True).copy()
    for hypothesis in hypotheses.positions_of(model.config):
        assert np.nanmax(np.abs(model.logp_T(hypothesis, few=True) - before)) > 0.01
    model.scored.clear()
    np.testing.assert_array_equal(model.logp_T(AS_RECORDED, few=True), before)


def test_a_model_that_scales_its_positions_can_be_read_without_scaling():
    """Llama computes default frequencies without being given a device."""
    scaled, plain = (
        transformers.AutoModelForCausalLM.from_config(config_of("llama", **changes))
        for changes in ({}, PLAIN)
    )
    (hypothesis,) = (
        h for h in hypotheses.positions_of(scaled.config) if h.name == "RoPE without its scaling"
    )
    frequency_F = scaled.model.rotary_emb.inv_freq
    assert not torch.equal(frequency_F, plain.model.rotary_emb.inv_freq)
    with hypothesis.changed(scaled):
        assert torch.equal(scaled.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    assert torch.equal(scaled.model.rotary_emb.inv_freq, frequency_F)


def test_the_model_shows_the_scale_of_a_trace_without_top_k(bf16_pool):
    """At most 1.6 times what the top-K columns show: other logits of a token have finer steps."""
    plain = imported(bf16_pool, np.arange(bf16_pool.num_responses), "bfloat16")
    evidence = evidence_of(plain)
    assert not evidence.expected.of_this_trace
    with_ranks = evidence_of(bf16_pool, plain.about)
    at_hand = replace(evidence, model=model_at_hand(plain, evidence.sample))
    assert at_hand.expected.basis.endswith("read from the model")
    assert 1 <= at_hand.expected.high / with_ranks.expected.high < 1.6
