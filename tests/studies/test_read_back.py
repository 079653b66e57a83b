"""A stored summary, read into its types and written again, is what it was."""

from __future__ import annotations

import json

import pytest

from mismatch_cli.base.json_form import from_json, to_json
from mismatch_cli.base.places import bundled
from mismatch_cli.metrics.population import Curation
from mismatch_cli.studies.curation import CurationAnalysis, CurationResult
from mismatch_cli.studies.study import Study
from mismatch_cli.studies.translation import Translation, TranslationResult
from mismatch_cli.trace.reader import Trace

CONFIG = {"model": "m", "prompts": {"location": "p", "limit": None}, "keep": [0.2, 0.8]}


def read_back(study: Study, kind: type) -> tuple[dict, dict]:
    """What a study writes without the format and its version, and the same after reading it."""
    stored = json.loads(json.dumps(study.to_json(), allow_nan=False))
    assert (stored.pop("format"), stored.pop("version")) == (study.FORMAT, study.VERSION)
    return to_json(from_json(kind, stored)), stored


@pytest.mark.parametrize("framework", ["all", "verl"])
@pytest.mark.parametrize("name", ["fp8-kv", "moe"])
def test_a_translation(name: str, framework: str) -> None:
    study = Translation.of([Trace.open(bundled("traces") / name)], framework)
    again, stored = read_back(study, TranslationResult)
    assert again == stored and stored["frameworks"]["verl"]["metrics"]


def test_a_curation() -> None:
    chosen = {number: number / 20 for number in range(21)}
    held_out = {number: 1 - chosen[number] for number in range(4, 17)}
    curation = Curation((0.2, 0.8), 20, 20, chosen, held_out)
    again, stored = read_back(CurationAnalysis(curation, CONFIG), CurationResult)
    assert again == stored and stored["kept"] == 13
    assert {"from", "to"} < stored["bins"][0].keys()
