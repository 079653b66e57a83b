"""Readings of the model end with their budget in tokens, and say so."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import another_prompt
from mismatch_cli.diagnosis.hypotheses import padded
from mismatch_cli.diagnosis.model import AS_RECORDED, Hypothesis, ModelAtHand, SkippedReading
from mismatch_cli.diagnosis.readings import Readings
from tests.diagnosis.samples import SampleColumns

RESPONSES, LENGTH, PROMPT = 16, 10, 5
OF_ONE_READING = RESPONSES * (LENGTH + PROMPT)


class CountingTrainer:
    """Scores every token −1, and after a prompt that lacks its first token −2."""

    def __init__(self) -> None:
        self.tokens = 0
        config = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=None)
        self.model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))

    def score(self, requests, token_budget, on_scored):
        self.tokens += sum(len(r.prompt_ids) + len(r.response_ids) for r in requests)
        return [
            SimpleNamespace(
                logp_T=np.full(len(request.response_ids), -1.0 - (request.prompt_ids[0] == 11))
            )
            for request in requests
        ]


def sample_and_model(budget: int | None) -> tuple[SimpleNamespace, ModelAtHand, CountingTrainer]:
    """The trainer read prompts without their first token, 10; the rollout as recorded."""
    tokens = RESPONSES * LENGTH
    numbers = np.arange(RESPONSES)
    sample = SampleColumns(
        num_responses=RESPONSES,
        length_S=np.full(RESPONSES, LENGTH),
        step_S=np.zeros(RESPONSES, dtype=int),
        prompt_id_S=numbers,
        sample_index_S=np.zeros(RESPONSES, dtype=int),
        response_ids_T=np.arange(tokens) + 100,
        logq_T=np.full(tokens, -1.0),
        logp_T=np.full(tokens, -2.0),
        counts_T=np.ones(tokens, dtype=bool),
        index_N=np.arange(tokens),
        response_T=np.repeat(numbers, LENGTH),
        d_N=np.full(tokens, -1.0),
        group_N=np.repeat(numbers, LENGTH),
        spans=lambda: iter([slice(n * LENGTH, (n + 1) * LENGTH) for n in numbers]),
    )
    prompts = {(0, number, 0): list(range(10, 10 + PROMPT)) for number in range(RESPONSES)}
    trainer = CountingTrainer()
    return sample, ModelAtHand(sample, prompts, lambda: trainer, budget=budget), trainer


def evidence_of(sample: SimpleNamespace, model: ModelAtHand) -> SimpleNamespace:
    gap, expected = SimpleNamespace(value=1.0), SimpleNamespace(high=0.1)
    readings = Readings(sample, model)
    return SimpleNamespace(sample=sample, readings=readings, gap=gap, expected=expected)


def test_the_default_is_eight_readings_of_all_responses():
    _, model, trainer = sample_and_model(None)
    assert model.budget == 8 * OF_ONE_READING
    model.logp_T()
    model.logp_T()
    assert model.spent == trainer.tokens == OF_ONE_READING


def test_a_search_that_the_budget_ends_is_not_called_clear():
    sample, model, trainer = sample_and_model(OF_ONE_READING + 1)
    finding = another_prompt.check(evidence_of(sample, model))
    assert finding.status == "untested" and f"of {model.budget:,} tokens ended" in finding.reason
    assert f"reading-tokens = {2 * model.budget}" in finding.reason
    assert trainer.tokens <= model.budget
    with pytest.raises(SkippedReading):
        model.logp_T(Hypothesis("another"), few=True)
    # What has been read once is free
    assert len(model.logp_T(AS_RECORDED)) == RESPONSES * LENGTH


def test_within_the_budget_the_misreading_is_found():
    sample, model, _ = sample_and_model(None)
    finding = another_prompt.check(evidence_of(sample, model))
    assert finding.status == "found" and "without" in finding.sentence
    assert not finding.left_N.any()
    assert dict(finding.evidence)["the side that differs"] == "trainer"


def test_ctrl_c_ends_the_readings_and_not_the_diagnosis():
    sample, model, trainer = sample_and_model(None)
    readings = Readings(sample, model)
    assert readings.side == "trainer"

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    trainer.score = interrupted
    assert readings.search("prompt").unread == "interrupted"
    assert model.is_interrupted and readings.search("padding").unread == "interrupted"
    assert len(model.logp_T(AS_RECORDED)) == RESPONSES * LENGTH  # what was read remains


def test_a_budget_below_one_reading_reads_fewer_responses():
    _, model, trainer = sample_and_model(OF_ONE_READING // 2)
    model.logp_T()
    assert trainer.tokens == model.spent <= model.budget and len(model.responses) == RESPONSES // 2


def test_the_budget_is_spent_to_the_token():
    """A reading of all; then one of a few, which leaves two more of all."""
    backwards = Hypothesis("backwards", prompt=lambda ids: ids[::-1])
    budget = 3 * OF_ONE_READING + PROMPT + LENGTH
    _, model, _ = sample_and_model(budget)
    model.logp_T()
    model.logp_T(backwards, few=True)
    model.logp_T(backwards)
    model.logp_T(Hypothesis("another"))
    assert model.spent == budget
    _, model, _ = sample_and_model(budget - 1)
    model.logp_T()
    with pytest.raises(SkippedReading):
        model.logp_T(backwards, few=True)


def test_tokens_that_padding_adds_count():
    _, model, trainer = sample_and_model(None)
    model.logp_T()
    before = model.spent
    model.logp_T(padded(100, 2), few=True)
    assert model.spent - before == len(model.few) * (100 + PROMPT + LENGTH)
    assert model.spent == trainer.tokens
