"""What the trainer did to its numbers is told apart: each fault is made by really scoring with it,
in float32 and in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from lab.pool import Pool
from lab.variants import model_at_hand
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.diagnosis import other_weights
from mismatch_cli.diagnosis.hypotheses import other_prompts
from mismatch_cli.diagnosis.model import AS_RECORDED, Hypothesis
from mismatch_cli.models.scoring.trainer import Trainer
from tests.diagnosis.conftest import (
    MODEL,
    evidence_of,
    finding_of,
    healthy,
    imported,
    judged_with_model,
    scored,
    whole,
)
from tests.diagnosis.few import few_hypotheses
from tests.lora import save_adapter

PROMPTS = {h.name: h for h in other_prompts(type("Config", (), {}))}
PRECISIONS = ("float32", "bfloat16")


@pytest.fixture(autouse=True)
def _few_hypotheses(monkeypatch):
    few_hypotheses(monkeypatch)


@pytest.fixture(scope="module")
def recorded() -> dict[str, Pool]:
    """Whole prompts of the bundled traces."""
    return {name: imported(healthy(name)[1], np.arange(32), name) for name in PRECISIONS}


def with_trainer(pool: Pool, logp_T: np.ndarray) -> Pool:
    copy = whole(pool)
    copy.tokens["logp_trainer"] = logp_T
    return copy


def named(pool: Pool, check: str, side: str, trainer: Trainer | None = None) -> str:
    """The misreading that is the first cause, by this check and on this side."""
    diagnosis = judged_with_model(pool, trainer)
    assert diagnosis.first_cause is not None, [f.sentence for f in diagnosis.found]
    assert diagnosis.first_cause.check == check, diagnosis.first_cause.sentence
    assert diagnosis.faults[0].check == check
    rows = dict(diagnosis.first_cause.evidence)
    assert rows["the side that differs"] == side
    return str(rows["it read the responses with"])


def test_nothing_is_found_in_healthy_traces(recorded):
    for pool in recorded.values():
        diagnosis = judged_with_model(pool)
        assert diagnosis.faults == ()
        for check in ("another-prompt", "missing-tensor", "packed-responses"):
            assert "The model read" in finding_of(diagnosis, check).sentence


def test_a_doubled_token_that_hides_in_the_noise_is_named(recorded):
    """The first token twice makes about half of the gap in bfloat16."""
    for pool in recorded.values():
        broken = with_trainer(pool, scored(pool, PROMPTS["the first token twice"]))
        assert named(broken, "another-prompt", "trainer") == "the first token twice"


def test_a_run_of_placeholders_that_one_side_collapses(recorded):
    pool = recorded["bfloat16"].take(np.arange(16))
    ids = pool.rows["prompt_ids"]
    pool.rows["prompt_ids"][:] = [[*i[:4], *[300] * 16, *i[4:]] for i in ids.tolist()]
    pool.tokens["logp_rollout"] = scored(pool, AS_RECORDED)
    broken = with_trainer(pool, scored(pool, PROMPTS["each run of one token as one"]))
    assert named(broken, "another-prompt", "trainer") == "each run of one token as one"


def test_packs_that_leak(recorded):
    for pool in recorded.values():
        packs = Hypothesis("packs", before=lambda place: place % 4)
        broken = with_trainer(pool, scored(pool, packs))
        assert named(broken, "packed-responses", "trainer") == "packs of 4"


def test_norms_that_one_side_lacks(recorded):
    """Not the last norm's: of this model it is a constant, and its loss a temperature."""
    for lost in ("no norms of queries and keys", "input_layernorm weights never loaded"):
        pool = recorded["bfloat16"]
        model = model_at_hand(pool, evidence_of(pool).sample).loaded
        (hypothesis,) = (h for h in other_weights.missing_tensors(model) if h.name == lost)
        broken = with_trainer(pool, scored(pool, hypothesis))
        assert named(broken, "missing-tensor", "trainer") == lost


def test_an_adapter_that_the_engine_lacks_or_counts_twice(recorded, tmp_path):
    pool = recorded["float32"].take(np.arange(16))
    adapter = save_adapter(MODEL, tmp_path / "adapter", size=0.01)
    sampling = SamplingSettings()
    trainer = Trainer.load(MODEL, dtype="float32", sampling=sampling, adapter=adapter)
    adapted = with_trainer(pool, scored(pool, AS_RECORDED, trainer))
    without, _, twice = other_weights.adapter_scales(trainer.model)
    for hypothesis in (without, twice):
        adapted.tokens["logp_rollout"] = scored(pool, hypothesis, trainer)
        assert named(adapted, "adapter-scale", "rollout", trainer) == hypothesis.name


@contextmanager
def dropped(model: Any) -> Iterator[None]:
    """Dropout of a tenth in attention."""
    attentions = [m for m in model.modules() if hasattr(m, "attention_dropout")]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model.train()
        for module in attentions:
            module.attention_dropout = 0.1
        yield
    model.eval()


def test_dropout_is_named(recorded):
    pool = recorded["float32"]
    broken = with_trainer(pool, scored(pool, Hypothesis("dropout", changed=dropped)))
    first = judged_with_model(broken).first_cause
    assert first is not None and first.check == "not-repeatable"
    assert "the same tokens after the same context" in first.sentence
    assert "has no dropout, so the script may set one" in first.sentence


def test_labels_that_are_wrong_where_context_parallelism_cuts(recorded):
    """The last position of each quarter predicts another token: its own, instead of the next."""
    for pool in recorded.values():
        logp_T = pool.tokens["logp_trainer"].copy()
        for s, prompt in enumerate(pool.rows["prompt_ids"]):
            first, length = int(pool.offset_S1[s]), int(pool.length_S[s])
            part = -(-(len(prompt) + length) // 4)
            for cut in range(part, len(prompt) + length, part):
                if cut >= len(prompt):
                    logp_T[first + cut - len(prompt)] = -12.0 - 0.1 * (s % 7) - 0.01 * cut
        first_cause = judged_with_model(with_trainer(pool, logp_T)).first_cause
        assert first_cause is not None and first_cause.check == "context-parallel"
        assert "k/4 of the sequence" in first_cause.sentence
