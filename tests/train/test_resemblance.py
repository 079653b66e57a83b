"""Whether a run begins like the one that its preset repeats: one sentence, and the run continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mismatch_cli.app.cli import run as cli
from mismatch_cli.base.errors import UsageError
from mismatch_cli.train.resemblance import Resemblance, Target, start_of
from mismatch_cli.train.train_config import changed_from, load_config, presets
from tests.train.small_runs import SHORT, SMALL

PAPER = Resemblance.of("paper")


def line(reward: float, gap: float, accuracy: float) -> dict[str, Any]:
    return {
        "reward": reward,
        "mismatch": {"abs_dp_mean": gap},
        "eval": {"aime_2024": accuracy},
    }


def test_the_start_of_figure_3():
    assert {value.name: value.value for value in PAPER.values} == {
        "start reward": 0.565,
        "mean |π − μ|": 0.0042,
        "AIME24": 0.195,
    }
    assert PAPER.in_words(line(0.571, 0.0044, 0.19)) == (
        "The start is like the paper: start reward 0.571 (paper 0.565), mean |π − μ| 0.00440 "
        "(paper 0.00420), AIME24 0.190 (paper 0.195)."
    )


@pytest.mark.parametrize(
    ("start", "off"),
    [
        (line(0.4, 0.0042, 0.195), "start reward"),
        (line(0.6, 0.0027, 0.195), "mean |π − μ|"),
        (line(0.6, 0.0064, 0.16), "mean |π − μ| and AIME24"),
    ],
)
def test_what_is_off_is_named(start, off):
    assert PAPER.in_words(start).startswith(f"The start is not like the paper in {off}: start")


def test_only_what_was_measured_is_said():
    assert "AIME24" not in PAPER.in_words({"reward": 0.57, "mismatch": {"abs_dp_mean": None}})
    assert PAPER.in_words({}) == ""


def test_no_other_preset_expects_anything():
    assert [name for name in presets() if Resemblance.of(name).values] == ["paper"]
    assert "expected" not in load_config("paper", {}).to_toml()


def test_settings_that_depart_from_the_preset_are_named():
    config = load_config(
        "paper", {"max_tokens": 100, "grader": "verl", "seed": 3, "algorithm": "pg-is"}
    )
    assert changed_from("paper", config) == ["grader", "--max-tokens"]
    assert PAPER.in_words(line(0.1, 0.1, 0.1), ["--max-tokens"]).endswith(
        " Changed from the preset: --max-tokens."
    )


def test_a_table_of_another_form_is_refused(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('[expected.values.reward]\nkey = "reward"\nvalue = 1\n', encoding="utf-8")
    with pytest.raises(UsageError, match=r"own\.toml: \[expected\] must have a source"):
        Resemblance.of(str(path))


def test_the_evaluation_before_the_first_step_counts(tmp_path):
    lines = [{"step": 0, "eval": {"a": 1}}, {"step": 1, "reward": 2, "eval": {"a": 3}}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
    assert start_of(path)["eval"] == {"a": 1} and start_of(path)["reward"] == 2


def test_a_run_says_it_once_and_goes_on(tmp_path, capsys):
    """A preset of the user's own, two steps of the bundled model."""
    settings = SMALL | SHORT | {"steps": 2, "average_decay": 0.0, "trace_every": 0, "eval_every": 2}
    rows = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    rows += ["[expected]", 'source = "guess"', "[expected.values]"]
    rows += ['reward = { key = "reward", value = 0.9, within = 0.05 }']
    rows += ['accuracy = { key = "eval.perfectible", value = 0, within = 1 }']
    preset = tmp_path / "own.toml"
    preset.write_text("\n".join(rows), encoding="utf-8")
    output = tmp_path / "run"
    assert cli(["train", "--preset", str(preset), "--no-plots", "--output", str(output)]) == 0
    said = capsys.readouterr().err
    assert said.count("The start is not like the guess in reward: reward 0") == 1
    assert "(guess 0.900), accuracy 0" in said and "Changed" not in said
    assert len(Path(output / "metrics.jsonl").read_text().splitlines()) == 3


def test_both_ends_of_what_a_target_allows_fit():
    near, times = Target("a", "b", 0.5, within=0.25), Target("a", "b", 0.5, factor=2.0)
    assert [near.fits(value) for value in (0.24, 0.25, 0.75, 0.76)] == [False, True, True, False]
    assert [times.fits(value) for value in (0.24, 0.25, 1.0, 1.01)] == [False, True, True, False]
    assert Target("a", "b", 0.5).fits(9.0)


@pytest.mark.parametrize("line", [
    "value = '0.5'", "value = 0.5\nfactor = 0", "value = 0.5\nwithin = 'a bit'", "value = 1\nkey = 3",
])  # fmt: skip
def test_a_target_that_no_number_can_be_compared_with_is_refused_before_the_run(tmp_path, line):
    path = tmp_path / "own.toml"
    key = "" if "key" in line else 'key = "reward"\n'
    text = f'[expected]\nsource = "us"\n[expected.values.reward]\n{key}{line}\n'
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"in values a key and a value each"):
        Resemblance.of(str(path))
