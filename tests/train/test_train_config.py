"""Settings: every preset loads, a saved one is read back the same, and mistakes are named."""

from __future__ import annotations

import pytest

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.options import settings_of
from mismatch_cli.train.tracking import TrackSettings
from mismatch_cli.train.train_config import (
    TrainConfig,
    load_config,
    parsed,
    presets,
    shown_defaults,
)
from tests.paths import ROOT


@pytest.mark.parametrize("preset", presets())
def test_a_preset_survives_being_saved(preset, tmp_path):
    config = load_config(preset, {})
    (tmp_path / "saved.toml").write_text(config.to_toml(), encoding="utf-8")
    assert load_config(str(tmp_path / "saved.toml"), {}) == config


def test_text_with_quotes_and_backslashes_survives(tmp_path):
    config = load_config("miniature", {"model": 'a "b" \\ c'})
    (tmp_path / "saved.toml").write_text(config.to_toml(), encoding="utf-8")
    assert load_config(str(tmp_path / "saved.toml"), {}) == config


def test_the_file_of_an_earlier_run_may_have_settings_that_are_gone(tmp_path):
    """With the value that all runs have now: another one is a setting that does not exist."""
    config = load_config("miniature", {"steps": 7})
    earlier = tmp_path / "config.toml"
    earlier.write_text(f'{config.to_toml()}weight_transfer = "folder"\n', encoding="utf-8")
    assert parsed(earlier.read_text(encoding="utf-8")) == config
    assert load_config(str(earlier), {}) == config
    with pytest.raises(UsageError, match="Unknown setting 'weight_transfer'"):
        parsed(f'{config.to_toml()}weight_transfer = "nccl"\n')


@pytest.mark.parametrize("saved", sorted((ROOT / "lab" / "evidence").glob("*/config.toml"))[::10])
def test_the_settings_of_runs_on_record_are_read(saved):
    """They are those of several earlier versions."""
    assert parsed(saved.read_text(encoding="utf-8")).algorithm


def test_flags_win_over_the_preset():
    assert load_config("miniature", {"steps": 7}).steps == 7


def test_a_run_without_trackers_has_their_project_and_no_name():
    assert TrackSettings() == TrackSettings(track=None, project="mismatch-cli", name=None)


def test_every_setting_has_a_help_text():
    assert all(setting.about["help"].endswith(".") for setting in settings_of(TrainConfig))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"samples_per_prompt": 1}, "a group of one response has no advantage"),
        ({"steps": 0}, "Use at least 1"),
        ({"learning_rate": 0.0}, "above 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm = 0.0 is out of range"),
        ({"num_problems": -1}, "num_problems = -1 is too small. Use at least 0"),
        ({"eval_every": -1}, "eval_every = -1"),
        ({"minibatches": 1000}, "more than the responses"),
        ({"lerning_rate": 1.0}, "learning_rate"),
        ({"steps": "many"}, '"many" must be a whole number'),
        ({"steps": True}, "true must be a whole number"),
    ],
)
def test_invalid_settings_are_refused(changes, said):
    with pytest.raises(UsageError, match=said):
        load_config("miniature", changes)


def test_an_unknown_preset_lists_the_existing_ones():
    with pytest.raises(UsageError, match="miniature"):
        load_config("minature", {})


def test_a_file_that_is_not_toml_is_named(tmp_path):
    (tmp_path / "bad.toml").write_text("steps = = 3", encoding="utf-8")
    with pytest.raises(MismatchError, match=r"bad\.toml cannot be read"):
        load_config(str(tmp_path / "bad.toml"), {})


def test_a_default_is_shown_in_words_where_it_has_some():
    shown, preset = shown_defaults("miniature"), load_config("miniature", {})
    assert shown["model"] == "the bundled one"
    assert shown["steps"] == str(preset.steps)
    assert shown["algorithm"] == preset.algorithm
    assert not shown["replay_routes"], "a switch that is off has no default to show"
