"""Runs of relaxed clipping by their α."""

from __future__ import annotations

from mismatch_cli.train.studies.relaxations import relaxation_of, relaxations
from mismatch_cli.train.studies.training import TrainingAnalysis
from tests.train.training_runs import make_run


def words_of(*names: str) -> dict[str, list[str]]:
    study = TrainingAnalysis([make_run(name, steps=2) for name in names])
    return {words: [run.algorithm for run in runs] for words, runs in relaxations(study).items()}


def test_alpha_of_an_algorithm():
    assert relaxation_of("relax-low:alpha=0.3") == (0.3, "relax-low")
    assert relaxation_of("relax-both") == (0.1, "relax-both")
    assert relaxation_of("grpo-clip-higher") == (0, "grpo-clip-higher")
    for other in ("pg-is", "relax-nothing", "relax-both:beta=1", "relax-mine.py"):
        assert relaxation_of(other) is None


def test_runs_are_in_the_order_of_alpha_and_equal_ones_together():
    names = ("relax-both:alpha=0.7", "relax-both", "pg-is", "relax-both:alpha=0.1")
    assert words_of(*names, "grpo-clip-higher") == {
        "α = 0 (grpo-clip-higher)": ["grpo-clip-higher"],
        "α = 0.1": ["relax-both", "relax-both:alpha=0.1"],
        "α = 0.7": ["relax-both:alpha=0.7"],
    }


def test_several_kinds_are_named():
    assert list(words_of("relax-high", "relax-low")) == [
        "α = 0.1 (relax-high)",
        "α = 0.1 (relax-low)",
    ]


def test_one_alpha_is_no_comparison():
    assert words_of("relax-both", "pg-is") == words_of("grpo-clip-higher") == {}


def test_settings_stay_apart():
    runs = [
        make_run(name, steps=2, model=model)
        for model in ("a/small", "a/large")
        for name in ("grpo-clip-higher", "relax-both")
    ]
    assert list(relaxations(TrainingAnalysis(runs))) == [
        "α = 0 (grpo-clip-higher) · small",
        "α = 0.1 · small",
        "α = 0 (grpo-clip-higher) · large",
        "α = 0.1 · large",
    ]


def test_other_parameters_make_other_kinds():
    """Means over both would be of no algorithm; the clip has an alias."""
    names = ("relax-both:alpha=0.3,ε_high=0.9", "relax-both:ε_high=0.9,α=0.3", "clip-higher")
    assert relaxation_of(names[0]) == relaxation_of(names[1]) == (0.3, "relax-both:ε_high=0.9")
    assert words_of(*names, "relax-both:alpha=0.3", "relax-both:relax=high") == {
        "α = 0 (grpo-clip-higher)": ["clip-higher"],
        "α = 0.1 (relax-both:relax=high)": ["relax-both:relax=high"],
        "α = 0.3 (relax-both)": ["relax-both:alpha=0.3"],
        "α = 0.3 (relax-both:ε_high=0.9)": list(names[:2]),
    }
