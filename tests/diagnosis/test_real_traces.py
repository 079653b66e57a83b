"""The bundled traces of a real model, both healthy: no fault has a name."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.base.json_form import from_json, to_json
from mismatch_cli.base.places import bundled
from mismatch_cli.diagnosis.checks import biased_token
from mismatch_cli.studies.diagnosis import analyse_diagnosis
from mismatch_cli.studies.diagnosis_result import DiagnosisResult
from mismatch_cli.trace.reader import Trace


@pytest.mark.parametrize(
    ("name", "suspect", "is_explained"),
    [("smollm2", "rollout.dtype", True), ("smollm2-training", "trainer.rounded_weights", False)],
)
def test_a_healthy_real_model_has_no_fault(name, suspect, is_explained):
    """A few steps with a float32 trainer leave the engine behind by what rounding swallows."""
    study = analyse_diagnosis([Trace.open(bundled("traces") / name)])
    result = study.result
    assert result.first_cause is None
    assert result.suspects[0].setting == suspect
    assert (result.faults == []) == is_explained
    content = {key: study.to_json()[key] for key in study.to_json().keys() - {"format", "version"}}
    assert to_json(from_json(DiagnosisResult, content)) == content


@pytest.mark.parametrize(("prompts", "is_biased"), [(2, False), (8, True)])
def test_a_token_that_has_the_gap_of_its_context_is_not_biased(rng, prompts, is_biased):
    """Sixteen occurrences of one id, a nat higher: under few prompts, or under many."""
    gap_M = np.concatenate([rng.normal(0, 0.05, 400), np.ones(16)])
    id_M = np.concatenate([rng.integers(0, 20, 400), np.full(16, 99)])
    group_M = np.concatenate([rng.integers(0, 128, 400), np.arange(16) % prompts])
    bias = biased_token.largest_bias(gap_M, id_M, biased_token.frequent_ids(id_M, group_M))
    assert (bias is not None and bias.token == 99) == is_biased
