"""Run folders: complete, left by a kill, and damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.studies.watch_state import WatchState
from mismatch_cli.train.studies.common_steps import CommonSteps
from mismatch_cli.train.studies.runs import PartialRun, TrainingRun, read_runs


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


def run_of(*steps: int, planned: int | None = None, **more: Any) -> TrainingRun:
    config = {} if planned is None else {"steps": planned}
    return TrainingRun("x", "x", 0, [{"step": step, "reward": 0} for step in steps], config, **more)


def test_a_run_is_partial_if_steps_are_to_come_or_lost() -> None:
    """What was watched from the middle on has lost none before."""
    assert run_of(1, 2, 3).partial is None
    assert run_of(1, 2, 3, planned=3).partial is None
    watched = WatchState((), (), ())
    assert run_of(5, 6, watched=watched).partial is None
    for run, missing in (
        (run_of(1, 2, planned=3), []),
        (run_of(1, 3, planned=3), [2]),
        (run_of(5, 7, watched=watched), [6]),
    ):
        steps, planned = run.last_step, run.planned_steps
        assert run.partial == PartialRun(steps, planned, missing)


@pytest.mark.parametrize(
    ("best", "final", "collapsed"),
    [
        (5, 2.4, True),
        (5, 2.5, False),
        (5, -1, True),
        (0.8, 0.3, True),
        (0, 0, False),
        (0, -1, False),
        (-1, -1, False),
    ],
)
def test_a_run_has_collapsed_below_half_of_a_best_reward_above_0(
    best: float, final: float, collapsed: bool
) -> None:
    """Half of a negative reward is higher: a steady run would be below it."""
    records = [{"reward": reward} for reward in [best] * 20 + [final] * 20]
    assert TrainingRun("x", "x", 0, records).has_collapsed == collapsed


@pytest.mark.parametrize(
    ("runs", "shortest"),
    [
        ([(0,), (0, 1)], [0]),
        ([(1, 2), (1, 2, 3), (1, 2)], [0, 2]),
        ([(1, 2), (1, 2)], []),
        ([(1,), (2, 3)], []),
    ],
    ids=["at step 0", "two of three", "all", "nothing in common"],
)
def test_runs_that_end_at_the_last_common_step_are_the_shortest(runs, shortest) -> None:
    steps = CommonSteps([run_of(*numbers) for numbers in runs])
    assert [run.step_N.tolist() for run in steps.shortest] == [list(runs[i]) for i in shortest]


def test_different_files_of_one_name_stay_different_settings(tmp_path: Path) -> None:
    """Their last folder tells them apart; where it is equal, they are copies on two machines."""
    folders = ("/data/gsm8k", "/data/math", "/copy/math", "/copy/math")
    lines = [f'algorithm = "ppo"\ndataset = "{place}/train.jsonl"\nseed = 1' for place in folders]
    lines[3] += '\nmodel = "/models/base"'
    paths = [write(tmp_path / f"{n}", {"step": 1}, config=text) for n, text in enumerate(lines)]
    runs = read_runs(paths)
    names = ["…/gsm8k/train.jsonl", "…/math/train.jsonl", "…/math/train.jsonl"]
    assert [run.config["dataset"] for run in runs] == [*names, names[2]]
    assert (runs[3].config["model"], runs[3].config["seed"]) == ("…/base", 1)
    assert [run.config["dataset"] for run in read_runs(paths[1:2])] == ["…/train.jsonl"]


def test_a_slash_at_the_end_makes_no_other_folder(tmp_path: Path) -> None:
    paths = []
    for number, model in enumerate(("base/tuned", "base/tuned/", "/base/tuned/")):
        path = write(tmp_path / f"{number}", {"step": 1}, config=f'model = "{model}"')
        paths.append(path)
    assert [run.config["model"] for run in read_runs(paths)] == ["base/tuned"] * 2 + ["…/tuned"]


def test_every_evaluation_set_has_its_name(tmp_path: Path) -> None:
    paths = []
    for number, sets in enumerate(("/x/a.jsonl,/y/test.jsonl", "/x/c.jsonl,/z/test.jsonl")):
        path = write(tmp_path / f"{number}", {"step": 1}, config=f'eval_dataset = "{sets}"')
        paths.append(path)
    assert [run.config["eval_dataset"] for run in read_runs(paths)] == [
        "…/a.jsonl,…/y/test.jsonl",
        "…/c.jsonl,…/z/test.jsonl",
    ]


def test_masks_of_one_name_in_two_folders_are_two_algorithms(tmp_path: Path) -> None:
    paths = []
    for place in ("wide", "narrow"):
        config = f'algorithm = "/masks/{place}/mask.py:limit=2"'
        paths.append(write(tmp_path / place, {"step": 1}, config=config))
    names = ["…/wide/mask.py:limit=2", "…/narrow/mask.py:limit=2"]
    assert [run.algorithm for run in read_runs(paths)] == names
