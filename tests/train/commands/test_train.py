"""`train` from the command line: several runs in one command, nothing overwritten, mistakes in
one sentence.
"""

from __future__ import annotations

import json
import os
import signal
import time
import tomllib

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.errors import MismatchError
from tests.warm import cli

SIZE = (
    "--steps 1 --prompts-per-step 2 --samples-per-prompt 4 --max-tokens 48 --num-problems 2 "
    "--eval-samples 1"
)
TRAIN = f"train --engine hf {SIZE} --eval-every 0 --trace-every 0 --threads 1".split()


@pytest.mark.slow
def test_algorithms_times_seeds_become_runs_and_none_is_overwritten(tmp_path, capfd):
    command = [
        *TRAIN,
        "-a",
        "pg-is",
        "-a",
        "dppo-binary-tv:max_tv=0.3",
        "--seeds",
        "2",
        "-o",
        str(tmp_path / "runs"),
    ]
    assert run(command) == 0
    out, err = capfd.readouterr()
    folders = sorted(
        path.name for path in (tmp_path / "runs").iterdir() if (path / "metrics.jsonl").is_file()
    )
    assert folders == [
        "dppo-binary-tv-max_tv=0.3-seed-0",
        "dppo-binary-tv-max_tv=0.3-seed-1",
        "pg-is-seed-0",
        "pg-is-seed-1",
    ]
    for name in folders:
        line = json.loads((tmp_path / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8"))
        assert line["step"] == 1 and 0 <= line["eval_accuracy"] <= 1
    assert "step 1/1  reward" in err
    assert "pg-is " in out and "NO CLEAR DIFFERENCE" in out  # one report for all
    assert {"report.html", "summary.json"} <= {path.name for path in (tmp_path / "runs").iterdir()}
    assert run(command) == 1
    assert "already exists. Continue it with --resume" in capfd.readouterr().err


def test_a_training_run_is_reported_again(tmp_path, capfd):
    assert run([*TRAIN, "-o", str(tmp_path / "run"), "--quiet"]) == 0
    first, said = capfd.readouterr()
    assert said == ""
    (tmp_path / "run" / "report.html").unlink()
    assert run(["report", str(tmp_path / "run"), "--quiet"]) == 0
    assert capfd.readouterr().out == first
    assert (tmp_path / "run" / "report.html").is_file()
    assert run(["report", str(tmp_path / "run"), "--json", "--quiet"]) == 0
    summary = json.loads(capfd.readouterr().out)
    assert [row["steps"] for row in summary["runs"]] == [1]


@pytest.mark.slow
def test_a_start_that_failed_can_be_repeated(tmp_path, capfd):
    assert run([*TRAIN, "-o", str(tmp_path / "run"), "-a", "nonsense"]) != 0
    assert "Unknown algorithm 'nonsense'" in capfd.readouterr().err
    assert run([*TRAIN, "-o", str(tmp_path / "run"), "--quiet"]) == 0


@pytest.mark.slow
def test_other_settings_are_not_resumed(tmp_path, capfd):
    assert run([*TRAIN, "-o", str(tmp_path / "run"), "--quiet"]) == 0
    assert run([*TRAIN, "-o", str(tmp_path / "run"), "--resume", "--learning-rate", "0.5"]) != 0
    assert "has different settings" in capfd.readouterr().err


def test_runs_that_would_share_a_folder_are_refused(tmp_path, capfd):
    for folder in ("v1", "v2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mask.py").touch()
    first, second = (str(tmp_path / folder / "mask.py") for folder in ("v1", "v2"))
    assert run([*TRAIN, "-a", first, "-a", second, "-o", str(tmp_path / "runs")]) == 2
    assert (
        f"-a {first} and -a {second} would both be called mask.py-seed-0" in capfd.readouterr().err
    )
    assert run([*TRAIN, "-a", "pg-is", "-a", "pg-is", "-o", str(tmp_path / "runs")]) == 2


def test_a_run_that_fails_does_not_end_the_others(tmp_path, capfd, monkeypatch):
    def train(config, folder, on_step, **_):
        (folder / "metrics.jsonl").write_text('{"step": 0, "eval_accuracy": 0.5}\n')
        if config.algorithm == "pg-is":
            raise MismatchError("The gradient is not finite.")
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"step": 1, "reward": 0.5}\n')
        if config.algorithm == "cispo":
            raise MismatchError("No memory is left.")
        return True

    monkeypatch.setattr("mismatch_cli.train.loop.train", train)
    several = [flag for name in ("pg-is", "cispo", "dppo-binary-tv") for flag in ("-a", name)]
    assert run([*TRAIN, *several, "-o", str(tmp_path / "runs")]) == 1
    out, err = capfd.readouterr()
    assert "pg-is-seed-0 failed: The gradient is not finite." in err
    assert "2 of 3 runs failed for the reasons above: pg-is-seed-0, cispo-seed-0." in err
    assert "dppo-binary-tv-seed-0" in out and "cispo-seed-0" in out and "pg-is" not in out
    assert (tmp_path / "runs" / "report.html").is_file()
    assert run([*TRAIN, "-a", "cispo", "-o", str(tmp_path / "one")]) == 1
    assert (
        "No memory is left." in capfd.readouterr().err
        and (tmp_path / "one" / "report.html").is_file()
    )
    assert run([*TRAIN, "-a", "pg-is", "-o", str(tmp_path / "none")]) == 1
    assert "mismatch-cli: The gradient is not finite." in capfd.readouterr().err
    assert not (tmp_path / "none" / "report.html").exists()


def test_a_second_ctrl_c_leaves_a_report_that_does_not_reload(tmp_path, monkeypatch):
    def train(config, folder, on_step, **_):
        (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
        raise KeyboardInterrupt

    monkeypatch.setattr("mismatch_cli.train.loop.train", train)
    assert run([*TRAIN, "-o", str(tmp_path)]) == 130
    assert 'http-equiv="refresh"' not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_foreign_folders_are_neither_resumed_nor_overwritten(tmp_path, capfd):
    (tmp_path / "results.csv").touch()
    assert run([*TRAIN, "--resume", "-o", str(tmp_path)]) == 1
    assert "contains no training run to resume" in capfd.readouterr().err
    for name, content in (
        ("report.html", ""),
        ("summary.json", '{"format": "mismatch-cli curation"}'),
    ):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_text(content)
        assert run([*TRAIN, "--seeds", "2", "-o", str(folder)]) == 1
        assert f"is not a folder of runs: it contains {name}" in " ".join(
            capfd.readouterr().err.split()
        )
    (tmp_path / "probe" / "trace").mkdir(parents=True)
    assert run([*TRAIN, "--seeds", "2", "-o", str(tmp_path / "probe")]) == 1


def test_training_runs_named_one_by_one_are_reported_as_traces_are(tmp_path, capfd, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    monkeypatch.chdir(tmp_path)
    assert run(["report", "a", str(tmp_path / "b"), "-q"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "report"]
    assert run(["report", "a", "b", "-q"]) == 0  # its own earlier report is overwritten
    (tmp_path / "report" / "summary.json").unlink()
    assert run(["report", "a", "b", "-q"]) == 1
    assert "report holds other files. Write the report beside them" in capfd.readouterr().err
    assert run(["report", ".", "-q"]) == 0  # a folder of several runs, as `train` writes it
    assert run(["report", ".", "-q"]) == 0


def test_the_default_learning_rate_is_pointed_out_for_another_model(tmp_path, capfd):
    run([*TRAIN, "--model", "/nowhere", "-o", str(tmp_path / "a")])
    assert "miniature, 0.0005, was chosen for the bundled model" in " ".join(
        capfd.readouterr().err.split()
    )
    run([*TRAIN, "--model", "/nowhere", "--learning-rate", "1e-6", "-o", str(tmp_path / "b")])
    assert "was chosen" not in capfd.readouterr().err


def test_a_wrong_number_of_ranks_comes_first_with_the_right_one(capfd, tmp_path, monkeypatch):
    """Before the data, which are not there; a run of torchrun has its ranks already."""
    words = ["train", "--preset", "moe-base", "--dataset", str(tmp_path / "missing.jsonl")]
    wrong = "1 rank cannot form engines of 4 (--tensor-parallel): add --nproc 4, or start any"
    assert run([*words, "--output", str(tmp_path / "run")]) == 2
    assert wrong in " ".join(capfd.readouterr().err.split())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert run([*words, "--output", str(tmp_path / "run")]) == 2
    assert "6 ranks cannot form engines of 4 (--tensor-parallel): add --nproc 8" in " ".join(
        capfd.readouterr().err.split()
    )


def test_show_config_says_a_wrong_number_of_ranks(capfd):
    """The settings are printed all the same: they can be read, copied and changed."""
    for words, said in (((), True), (("--nproc", "4"), False), (("--nproc", "8"), False)):
        assert run(["train", "--preset", "moe-base", *words, "--show-config"]) == 0
        out, err = capfd.readouterr()
        assert "tensor_parallel = 4" in out and ("add --nproc 4" in " ".join(err.split())) == said
    few = ["--tensor-parallel", "4", "--prompts-per-step", "2", "--minibatches", "1"]
    assert run(["train", "--engine", "hf", *few, "--show-config"]) == 0
    assert "Use --prompts-per-step 4, or a lower --tensor-parallel" in " ".join(
        capfd.readouterr().err.split()
    )


def test_show_config_prints_a_preset_file(capfd):
    assert run(["train", "--preset", "collapse", "--steps", "7", "--show-config"]) == 0
    shown = tomllib.loads(capfd.readouterr().out)
    assert shown["steps"] == 7 and shown["epochs"] == 4


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--samples-per-prompt", "1"], "a group of one response has no advantage"),
        (["--num-problems", "1"], "more than the 1 problems available"),
        (["--model", "/nowhere"], "There is no model folder"),
        (["--dataset", "/nowhere.jsonl"], "/nowhere.jsonl does not exist"),
        (["--trainer-dtype", "foo"], "Unknown dtype 'foo'"),
        (["--engine", "foo"], "Unknown engine 'foo'"),
        (["--aggregation", "foo"], "Unknown aggregation 'foo'"),
        (["--prompt-template", "foo"], "Unknown template 'foo'"),
    ],
)
def test_mistakes_are_reported_in_a_sentence(flags, said, tmp_path, capfd):
    assert run([*TRAIN, "-o", str(tmp_path / "run"), *flags]) in (1, 2)
    assert said in " ".join(capfd.readouterr().err.split())


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_and_says_how_to_continue(tmp_path):
    process = cli(
        *TRAIN, "--steps", "500", "-o", str(tmp_path / "run"), env=os.environ | {"COLUMNS": "200"}
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.is_file():
        assert process.poll() is None, process.said()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    errors = process.ended(within=120)
    assert process.returncode == 130
    assert "step 1/500  reward" in errors and "\x1b" not in errors  # lines in a log, no view
    assert errors.index("Finishing this step, then saving") < errors.index("--resume --output")
    done = metrics.read_text(encoding="utf-8").count("\n")
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:06d}" / "state.json").is_file()
