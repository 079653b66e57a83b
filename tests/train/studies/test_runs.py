"""Run folders: complete, left by a kill, and damaged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.train.studies.runs import TrainingRun, read_runs


def write(folder: Path, *lines: object, config: str = "", end: str = "") -> Path:
    folder.mkdir(parents=True)
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    (folder / "metrics.jsonl").write_bytes(text.encode() + end.encode())
    if config:
        (folder / "config.toml").write_text(config, encoding="utf-8")
    return folder


def test_reads_records_and_settings(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "a",
        {"step": 1},
        {"step": 2},
        config='algorithm = "pg-is"\nseed = 3\nsteps = 9\n',
    )
    (run,) = read_runs([folder])
    assert (run.name, run.algorithm, run.seed, run.folder) == ("a", "pg-is", 3, folder)
    assert run.records == [{"step": 1}, {"step": 2}]
    assert run.config["steps"] == 9


def test_without_settings_the_folder_names_the_algorithm(tmp_path: Path) -> None:
    runs = read_runs(
        [write(tmp_path / "one" / "x", {"step": 1}), write(tmp_path / "two" / "x", {"step": 1})]
    )
    assert [run.name for run in runs] == ["…/one/x", "…/two/x"]
    assert [(run.algorithm, run.seed) for run in runs] == [(run.name, None) for run in runs]


@pytest.mark.parametrize(
    "end", ['{"step": 3, "rew', '{"step": 3, "note": "\\u00e9', "\0\0\0", "[1, 2]", "[" * 100_000]
)
def test_a_half_written_last_line_is_left_out(tmp_path: Path, end: str) -> None:
    (run,) = read_runs([write(tmp_path / "a", {"step": 1}, {"step": 2}, end=end)])
    assert run.step_N.tolist() == [1, 2]


def test_a_run_without_a_step_is_left_out_of_several(tmp_path: Path) -> None:
    runs = read_runs([write(tmp_path / "empty"), write(tmp_path / "a", {"step": 1})])
    assert [run.name for run in runs] == ["a"]


def test_a_character_cut_in_two_is_a_half_written_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {"step": 1})
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write('{"note": "é'.encode()[:-1])
    assert len(read_runs([folder])[0].records) == 1


def test_refuses_in_one_sentence(tmp_path: Path) -> None:
    damaged = write(tmp_path / "damaged", {"step": 1}, "{", {"step": 3})
    with pytest.raises(MismatchError, match="line 2 is not a JSON object"):
        read_runs([damaged])
    with pytest.raises(MismatchError, match="has no steps yet"):
        read_runs([write(tmp_path / "empty"), write(tmp_path / "half", end='{"st')])
    with pytest.raises(MismatchError, match=r"metrics\.jsonl cannot be read"):
        read_runs([tmp_path / "absent"])
    with pytest.raises(MismatchError, match=r"config\.toml cannot be read"):
        read_runs([write(tmp_path / "config", {"step": 1}, config="algorithm = ")])


def test_anything_but_a_number_is_nan() -> None:
    values = [1, 0.5, True, None, "0.5", float("nan"), float("inf"), 10**400, {"k": 1}, [1]]
    run = TrainingRun(
        "x", "x", 0, [{"a": {"b": value}} for value in values] + [{}, {"a": None}, {"a": 3}]
    )
    expected = [1, 0.5, 1] + [np.nan] * 10
    np.testing.assert_array_equal(run.series("a", "b"), expected)
    assert run.step_N.tolist() == list(range(1, 14))


def test_not_a_number_survives_the_file(tmp_path: Path) -> None:
    (run,) = read_runs(
        [write(tmp_path / "a", '{"step": 1, "reward": NaN}', '{"step": 2, "reward": -Infinity}')]
    )
    assert np.isnan(run.series("reward")).all()
