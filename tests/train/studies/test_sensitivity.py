"""Which runs are one algorithm with several thresholds, and their final values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mismatch_cli.train.studies.seeds import over_seeds
from mismatch_cli.train.studies.sensitivity import families
from mismatch_cli.train.studies.training import TrainingAnalysis
from tests.train.training_runs import make_run, run_of


def found(*names: str) -> dict[str, tuple[str, tuple[float, ...]]]:
    """The name, threshold and values of each family."""
    study = TrainingAnalysis.of([make_run(name, steps=2) for name in names])
    return {family.name: (family.threshold, family.values) for family in families(study)}


def test_a_threshold_goes_by_any_of_its_names_and_has_a_default() -> None:
    names = ("dppo-binary-tv:δ=0.2", "dppo-binary-tv", "dppo-binary-tv:max_tv=0.1")
    assert found(*names, "pg-is") == {"dppo-binary-tv": ("δ", (0.1, 0.15, 0.2))}
    assert found("grpo-clip-higher", "grpo-clip-higher:ratio_high=0.27") == {
        "grpo-clip-higher": ("ε_high", (0.27, 0.28))
    }
    assert found("relax-both:alpha=0.5", "relax-both:alpha=0.1") == {
        "relax-both": ("α", (0.1, 0.5))
    }
    assert found("pg-tis", "pg-tis:C=5") == {"pg-tis": ("C", (3.0, 5.0))}


@pytest.mark.parametrize(
    "names",
    [
        ("dppo-binary-tv",),
        ("dppo-binary-tv", "dppo-binary-kl"),
        ("dppo-binary-tv:max_tv=0.1,cap=5", "dppo-binary-tv"),  # two thresholds at once
        # Likewise, though the second one moves only in the last
        tuple(
            f"dppo-binary-tv:max_tv={tv},cap={cap}" for tv, cap in ((0.1, 5), (0.2, 5), (0.3, 6))
        ),
        ("dppo-binary-tv:cap=5", "dppo-binary-tv"),  # no cap has no place on an axis
        ("gone.py:max_drop=0.1", "gone.py:max_drop=0.2"),  # a mask file that no longer exists
        ("dppo-binary-tv:max_tv=0.15", "dppo-binary-tv"),  # the same value, typed and by default
    ],
)
def test_these_are_not_a_family(names: tuple[str, ...]) -> None:
    assert found(*names) == {}


def test_only_algorithms_that_differ_in_nothing_but_numbers_are_a_family() -> None:
    """Neither another anchor nor another word is a point on the axis of the threshold."""
    anchored = ("dppo-binary-tv:delta=0.1", "dppo-binary-tv:anchor=recomputed,delta=0.2")
    relaxed = ("relax-both:alpha=0.3", "relax-both:alpha=0.5,relax=high")
    for names in (anchored, relaxed):
        assert found(*names) == {}
    assert found(*anchored, "dppo-binary-tv:delta=0.3") == {"dppo-binary-tv": ("δ", (0.1, 0.3))}
    both = found(*anchored, "dppo-binary-tv:anchor=recomputed,delta=0.4")
    assert both == {"dppo-binary-tv": ("δ", (0.2, 0.4))}


def test_final_values_are_over_seeds_within_a_setting() -> None:
    runs = [
        make_run(name, seed, steps=20, model=model)
        for model in ("a", "b")
        for name in ("dppo-binary-tv:max_tv=0.1", "dppo-binary-tv", "pg-is")
        for seed in range(2 if model == "a" else 1)
    ]
    first, second = families(TrainingAnalysis.of(runs))
    assert (first.name, second.name) == ("dppo-binary-tv · a", "dppo-binary-tv · b")
    assert [ending.name for ending in first.others] == ["pg-is"]
    assert first.endings[0].reward == over_seeds(run.last("reward") for run in runs[:2])
    assert first.endings[1].accuracy == over_seeds(run.final_accuracy for run in runs[2:4])
    assert second.endings[0].reward.low is None


def test_a_family_needs_two_rewards_and_its_accuracy_one_evaluation() -> None:
    names = ("dppo-binary-tv:max_tv=0.1", "dppo-binary-tv")
    evaluated, plain = (make_run(name, steps=2) for name in names)
    for record in plain.records:
        record["eval_accuracy"] = None
    (family,) = families(TrainingAnalysis.of([evaluated, plain]))
    assert family.measured == ["reward", "accuracy"]
    for record in evaluated.records:
        record["eval_accuracy"] = None
    runs = [replace(evaluated), replace(plain)]
    (family,) = families(TrainingAnalysis.of(runs))
    assert family.measured == ["reward"]
    ungraded = run_of([None, None], "dppo-binary-tv:max_tv=0.1")
    assert families(TrainingAnalysis.of([ungraded, plain])) == []
