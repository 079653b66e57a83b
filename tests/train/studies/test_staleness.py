"""What algorithms block by the age of the weights that sample, paired by seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mismatch_cli.train.studies.runs import TrainingRun
from mismatch_cli.train.studies.seeds import difference, over_seeds
from mismatch_cli.train.studies.staleness import dose_responses
from mismatch_cli.train.studies.training import TrainingAnalysis
from tests.train.training_runs import make_run


def aged(algorithm: str, seed: int, staleness: int, blocked: float, steps: int = 6) -> TrainingRun:
    """A run of two updates a step, which blocks nothing as long as its engine is not that old."""
    run = make_run(algorithm, seed, steps, staleness=staleness)
    records = [
        line | {"blocked": blocked if 2 * (line["step"] - 1) >= staleness else 0.0}
        for line in run.records
    ]
    return replace(run, records=records)


RUNS = [
    aged(algorithm, seed, staleness, share * (1 + staleness) + 0.01 * seed)
    for algorithm, share in (("grpo-clip-higher", 0.02), ("dppo-binary-tv", 0.001))
    for staleness in (0, 2, 8)
    for seed in (0, 1, 2)
]


def test_shares_by_dose_with_paired_differences():
    grpo, dppo = TrainingAnalysis.of(RUNS).by_staleness
    assert (grpo.algorithm, dppo.algorithm) == ("grpo-clip-higher", "dppo-binary-tv")
    assert [(dose.staleness, dose.seeds) for dose in grpo.doses] == [(0, 3), (2, 3), (8, 3)]
    assert grpo.doses[1].blocked == over_seeds([0.06, 0.07, 0.08])
    assert grpo.doses[0].more is None
    oldest = grpo.doses[2]
    more = difference([(0, 0.18), (1, 0.19), (2, 0.2)], [(0, 0.02), (1, 0.03), (2, 0.04)])
    assert (oldest.more, oldest.paired_seeds) == more and oldest.paired_seeds == 3


def test_only_steps_at_which_every_engine_is_that_old_count():
    """Eight updates are four steps: the mean is over steps 5 and 6."""
    (dose, _) = dose_responses([aged("grpo-clip-higher", 0, n, 0.1 if n else 0.3) for n in (0, 8)])[
        0
    ].doses
    assert dose.blocked.value == pytest.approx(0.3)
    (_, old) = dose_responses([aged("grpo-clip-higher", 0, n, 0.1) for n in (0, 8)])[0].doses
    assert old.blocked.value == pytest.approx(0.1)
    assert dose_responses([aged("grpo-clip-higher", 0, n, 0.1) for n in (0, 12)]) == []


def test_one_age_is_no_dose():
    assert dose_responses([aged("grpo-clip-higher", seed, 2, 0.1) for seed in (0, 1)]) == []
    older = make_run("grpo-clip-higher")  # from before the setting existed
    assert dose_responses([older, aged("grpo-clip-higher", 0, 0, 0.1)]) == []


def test_a_dose_is_no_part_of_the_name_but_other_settings_are():
    runs = [
        replace(run, config=dict(run.config) | {"learning_rate": rate})
        for run in RUNS[:9]
        for rate in (1e-4, 2e-4)
    ]
    assert [response.algorithm for response in dose_responses(runs)] == [
        "grpo-clip-higher · learning rate 0.0001",
        "grpo-clip-higher · learning rate 0.0002",
    ]


def test_the_summary_has_them_only_then():
    (grpo, _) = TrainingAnalysis.of(RUNS).to_json()["by_staleness"]
    assert [dose["staleness"] for dose in grpo["doses"]] == [0, 2, 8]
    assert grpo["doses"][1]["paired_seeds"] == 3 and "more" not in grpo["doses"][0]
    assert "by_staleness" not in TrainingAnalysis.of(RUNS[:3]).to_json()
