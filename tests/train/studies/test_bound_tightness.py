"""The share of the full TV that its lower bounds see, over training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mismatch_cli.train.studies.bound_tightness import bound_qualities, quality, tokens_per_step
from mismatch_cli.train.studies.training import TrainingAnalysis
from tests.train.training_runs import make_run, with_bounds


def test_the_share_of_each_run_and_the_range_of_seeds():
    runs = [
        with_bounds(make_run(seed=0, steps=3), 0.4),
        with_bounds(make_run(seed=1, steps=3), 0.6),
    ]
    curve = quality(runs, "tv_binary")
    assert curve.step_N.tolist() == [1, 2, 3]
    for part, expected in zip(
        (curve.value_N, curve.low_N, curve.high_N), (0.5, 0.4, 0.6), strict=True
    ):
        np.testing.assert_allclose(part, expected)


def test_what_was_not_measured_is_a_gap():
    run = with_bounds(make_run(steps=4))
    still = {"tv_full": 0.0, "tv_binary": 0.0, "tokens": 10}
    records = [run.records[0], {"step": 2}, run.records[2], {"step": 4, "bounds": still}]
    curve = quality([replace(run, records=records)], "tv_binary")
    assert np.isfinite(curve.value_N).tolist() == [True, False, True, False]
    assert tokens_per_step([replace(run, records=records)]) == 400


def test_only_bounds_that_were_measured():
    run = with_bounds(make_run(steps=2))
    for record in run.records:
        del record["bounds"]["tv_topk"]
    study = TrainingAnalysis([run, make_run("pg-is", steps=2)])
    assert {name: list(curves) for name, curves in bound_qualities(study).items()} == {
        "dppo-binary-tv": ["binary TV"]
    }
    assert tokens_per_step([make_run()]) == 0
