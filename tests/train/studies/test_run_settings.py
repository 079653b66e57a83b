"""Which settings distinguish runs besides algorithm and seed, and their names."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import pytest

from mismatch_cli.studies.watch_state import WatchState
from mismatch_cli.train.studies.run_settings import BEFORE, settings_of_runs, task_of
from mismatch_cli.train.studies.training import TrainingAnalysis, steps_of, what_was_trained
from mismatch_cli.train.train_config import TrainConfig
from tests.train.training_runs import make_run, run_of

MOE, DENSE = "Qwen/Qwen3-30B-A3B-Base", "/models/Qwen3-8B-Base"

CASES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "one setting": ([{}, {"seed": 3}, {"steps": 7}], ["", "", ""]),
    "how the work is done": ([{"token_budget": 1024}, {"token_budget": 8192, "eval_samples": 32}],
                             ["", ""]),
    "who plays the episodes": ([{"environment_processes": 1}, {"environment_processes": 4}],
                               ["", ""]),
    "on or off": ([{"lora": True}, {"lora": False}], ["LoRA", "no LoRA"]),
    "an older run has it not": ([{"replay_routes": True}, {}],
                                ["router replay", "no router replay"]),
    "what an older run did without": (
        [{"dynamic_sampling": 3}, {}], ["dynamic sampling 3", "dynamic sampling by default"]
    ),
    "what was so before it could be set": ([{"eval_top_p": 1.0, "environment": ""}, {}], ["", ""]),
    "an environment": ([{"environment": "/x/simon.py:Simon"}, {}],
                       ["simon.py:Simon", "no environment"]),
    "unknown is not a difference": ([{"learning_rate": 1e-5}, {}], ["", ""]),
    "as few as tell apart": (
        [{"model": MOE, "max_tokens": 16384}, {"model": DENSE, "max_tokens": 8000}],
        ["Qwen3-30B-A3B-Base", "Qwen3-8B-Base"],
    ),
    "two that matter": (
        [{"model": MOE, "replay_routes": True}, {"model": MOE}, {"model": DENSE}],
        ["Qwen3-30B-A3B-Base, router replay", "Qwen3-30B-A3B-Base, no router replay",
         "Qwen3-8B-Base, no router replay"],
    ),
    "what came early follows from what came later": (
        [{"lora": True, "learning_rate": 1e-5}, {"lora": False, "learning_rate": 1e-6},
         {"lora": False, "learning_rate": 1e-7}],
        ["learning rate 1e-05", "learning rate 1e-06", "learning rate 1e-07"],
    ),
    "the same name in two folders": ([{"model": "/a/b/model"}, {"model": "/c/d/model"}],
                                     ["model", "model (2)"]),
    "several evaluation sets": (
        [{"eval_dataset": f"sets/{first}.jsonl,sets/b.jsonl"} for first in "ac"],
        ["a.jsonl,b.jsonl", "c.jsonl,b.jsonl"],
    ),
    "folders with a slash": ([{"model": "runs/a/base/"}, {"model": "runs/b/tuned/"}],
                             ["base", "tuned"]),
    "a long name": (
        [{"model": f"/{n}-of-a-family-with-a-long-name-{n}"} for n in "ab"],
        ["a-of-a-family-…a-long-name-a", "b-of-a-family-…a-long-name-b"],
    ),
    "an age of the weights": ([{"staleness": 4}, {}], ["staleness 4", "staleness 0"]),
    "a default": ([{"attn": ""}, {"attn": "eager"}], ["attn by default", "attn eager"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_setting_is_named_by_what_differs(case: str) -> None:
    configs, names = CASES[case]
    assert settings_of_runs([make_run(**{"steps": 1, **config}) for config in configs]) == names


def test_the_value_before_a_setting_existed_is_its_default() -> None:
    defaults = tomllib.loads(TrainConfig().to_toml())
    assert {name: defaults[name] for name in BEFORE} == BEFORE


def test_seeds_are_averaged_only_within_a_setting() -> None:
    runs = [
        make_run("pg-is", seed, steps=3, model=model) for model in (MOE, DENSE) for seed in range(2)
    ]
    study = TrainingAnalysis.of(runs)
    assert {name: len(part) for name, part in study.algorithms.items()} == {
        "pg-is · Qwen3-30B-A3B-Base": 2,
        "pg-is · Qwen3-8B-Base": 2,
    }
    assert {name: list(part.algorithms) for name, part in study.settings.items()} == {
        "Qwen3-30B-A3B-Base": ["pg-is"],
        "Qwen3-8B-Base": ["pg-is"],
    }
    assert [row["setting"] for row in study.to_json()["runs"]] == ["Qwen3-30B-A3B-Base"] * 2 + [
        "Qwen3-8B-Base"
    ] * 2
    assert list(TrainingAnalysis.of(runs[:2]).settings) == [""]


def test_the_decay_of_the_average_is_a_setting_only_where_updates_depend_on_it() -> None:
    decays = {"ppo": 0.0, "ppo-ewma": 0.9, "ppo-ewma:ε=0.1": 0.99, "pg-is": 0.5}
    runs = [make_run(name, steps=1, average_decay=decay) for name, decay in decays.items()]
    names = [f"average decay {decay}" for decay in (0.9, 0.9, 0.99, 0.9)]
    assert settings_of_runs(runs) == names
    assert settings_of_runs([runs[0], runs[1], runs[3]]) == ["", "", ""]
    assert settings_of_runs([runs[0], runs[3]]) == ["", ""]


def test_only_runs_of_one_task_are_rivals() -> None:
    runs = [
        make_run("pg-is", seed, steps=2, model=model, lora=lora)
        for model, lora in ((MOE, True), (MOE, False), (DENSE, False))
        for seed in (0, 1)
    ]
    study = TrainingAnalysis.of(runs)
    first, second, other = study.algorithms
    assert study.rivals(first) == [second] and study.rivals(other) == []


@pytest.mark.parametrize("key", ["reward", "environment", "episodes"])
def test_rewards_of_other_games_or_judges_are_not_compared(key: str) -> None:
    """An older run lacks the key, which is equivalent to an empty one."""
    older, plain, other = (
        {},
        {key: 0 if key == "episodes" else ""},
        {key: 64 if key == "episodes" else "mine.py:f"},
    )
    tasks = [task_of(make_run(steps=1, **config)) for config in (older, plain, other)]
    assert tasks[0] == tasks[1] != tasks[2]


@pytest.mark.parametrize(("number", "models", "problems"), [
    (1, "m0", "d0"), (3, "m0, m1, m2", "d0, d1, d2"), (4, "4 models", "4 sets of problems"),
])  # fmt: skip
def test_at_most_three_models_and_sets_of_problems_are_named(number, models, problems):
    """Each once, however many runs have it."""
    runs = [make_run(model=f"/models/m{n}", dataset=f"/data/d{n}") for n in (*range(number), 0)]
    assert what_was_trained(runs) == [models, problems]


def test_a_watched_run_that_counts_from_0_or_was_joined_late_has_the_steps_on_record():
    for first in (0, 100):
        records = [{"step": first + place, "reward": 0.5} for place in range(3)]
        run = replace(make_run(steps=1), records=records, watched=WatchState((), (), ()))
        assert steps_of([run]) == "3 steps"


@pytest.mark.parametrize(("steps", "words"), [
    ([1], "1 step"), ([7, 7], "7 steps"), ([30, 1100, 20], "20 to 1,100 steps"),
])  # fmt: skip
def test_the_shortest_and_the_longest_run_are_named(steps, words):
    assert steps_of([run_of([0.5] * number) for number in steps]) == words
