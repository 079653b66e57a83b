"""The result of training runs is its JSON, and the JSON is the result."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mismatch_cli.base.json_form import from_json, to_json
from mismatch_cli.train.studies.training import TrainingAnalysis
from mismatch_cli.train.studies.training_result import TrainingResult
from tests.train.training_runs import evaluated, limit, make_run, watched

SEEDS = [make_run(name, seed, 12) for name in ("dppo-binary-tv", "pg-is") for seed in range(2)]
STALE = [make_run(seed=seed, steps=12, staleness=age) for age in (0, 4) for seed in range(2)]
GAP = limit("tv_binary_mean", "max", 1e-3)
STUDIES = {
    "seeds": TrainingAnalysis.of(SEEDS),
    "a claim": replace(TrainingAnalysis.of(SEEDS), claimed=("pg-is", "dppo-binary-tv")),
    "doses": TrainingAnalysis.of(STALE),
    "sets": TrainingAnalysis.of([evaluated(make_run(steps=12), ("one", "two"))]),
    "partial": TrainingAnalysis.of([replace(SEEDS[0], records=SEEDS[0].records[::2])]),
    "a watch": watched(GAP, alarms=((3, 5),)),
}


@pytest.mark.parametrize("name", STUDIES)
def test_the_json_is_read_back(name: str) -> None:
    study = STUDIES[name]
    content = json.loads(json.dumps(study.to_json()))
    read = from_json(TrainingResult, content)
    head = {"format": TrainingAnalysis.FORMAT, "version": 1}
    assert head | to_json(read) == content
    assert [run.final_reward for run in read.runs] == [
        row.final_reward for row in study.result.runs
    ]


def test_optional_parts_have_keys_only_where_there_are_some() -> None:
    optional = ("by_staleness", "watch")
    keys = {
        name: [key for key in optional if key in study.to_json()] for name, study in STUDIES.items()
    }
    assert keys["doses"] == ["by_staleness"] and keys["a watch"] == ["watch"]
    assert keys["seeds"] == keys["sets"] == []
    (alarm,) = STUDIES["a watch"].to_json()["watch"]["alarms"]
    assert (alarm["step"], alarm["last"], alarm["metric"]) == (3, 5, "tv_binary_mean")


def test_the_gap_of_a_run_is_that_of_its_first_and_last_steps() -> None:
    run = SEEDS[0]
    gaps = [record["mismatch"]["abs_dp_mean"] for record in run.records]
    row = TrainingAnalysis.of([run]).result.runs[0]
    assert row.abs_dp_mean_first == pytest.approx(sum(gaps[:5]) / 5)
    assert row.abs_dp_mean_last == pytest.approx(sum(gaps[5:]) / 7)
