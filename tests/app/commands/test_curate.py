"""`curate` on the bundled model: what it keeps, what held-out means, and that it samples nothing
twice.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.app.commands.curate import training_flags
from mismatch_cli.base.errors import suggest
from mismatch_cli.base.options import replace_settings
from mismatch_cli.base.places import bundled
from mismatch_cli.metrics.population import accuracy_by_prompt
from mismatch_cli.probe.config import CurateConfig
from mismatch_cli.trace.reader import Trace

CURATE = (
    "curate --engine hf --num-prompts 6 --samples-per-prompt 6 --held-out-samples 5 --max-tokens "
    "96 --threads 1"
)
CURATE += " --rollout-dtype float32 --quiet --keep 0.1 0.9"


def rows_of(folder: Path) -> list[dict]:
    return [
        json.loads(line)
        for line in (folder / "perfectible.jsonl").read_text(encoding="utf-8").splitlines()
    ]


@pytest.fixture(scope="module")
def curated(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("curate") / "run"
    assert run([*CURATE.split(), "-o", str(folder)]) == 0
    return folder


def test_problems_in_the_range_are_kept_and_measured_again(curated):
    chosen, held_out = (
        accuracy_by_prompt(Trace.open(curated)),
        accuracy_by_prompt(Trace.open(curated / "held-out")),
    )
    in_range = {prompt: accuracy for prompt, accuracy in chosen.items() if 0.1 <= accuracy <= 0.9}
    assert 0 < len(in_range) < len(chosen) == 6
    rows = rows_of(curated)
    assert {row["row"]: row["accuracy"] for row in rows} == in_range
    assert {row["row"]: row["held_out_accuracy"] for row in rows} == held_out
    summary = json.loads((curated / "summary.json").read_text(encoding="utf-8"))
    assert (summary["count"], summary["kept"]) == (6, len(in_range))
    assert "figure-accuracy" in (curated / "report.html").read_text(encoding="utf-8")


def test_held_out_samples_are_different(curated):
    def samples(folder: Path) -> set[tuple[int, int]]:
        batches = Trace.open(folder).batches()
        return {
            (int(p), int(s))
            for b in batches
            for p, s in zip(b.prompt_id_S, b.sample_index_S, strict=True)
        }

    assert not samples(curated) & samples(curated / "held-out")


@pytest.mark.slow
def test_a_shard_that_is_missing_is_sampled_again(curated, tmp_path):
    folder = shutil.copytree(curated, tmp_path / "run")
    (folder / "perfectible.jsonl").unlink()
    for shard in [*folder.glob("held-out/shard-*.parquet"), *folder.glob("trace/shard-*.parquet")]:
        shard.unlink()
    assert run(["curate", "--resume", "--quiet", "-o", str(folder)]) == 0
    assert rows_of(folder) == rows_of(curated)


def test_a_finished_run_needs_no_engine(curated, tmp_path, monkeypatch):
    monkeypatch.setattr("mismatch_cli.probe.rollouts.create_engine", None)
    folder = shutil.copytree(curated, tmp_path / "run")
    (folder / "perfectible.jsonl").unlink()
    # The same command with the same --keep
    assert run([*CURATE.split(), "--resume", "-o", str(folder)]) == 0
    assert rows_of(folder) == rows_of(curated)


@pytest.mark.slow
def test_another_range_of_a_finished_run_measures_its_problems_again(curated, tmp_path, capfd):
    folder = shutil.copytree(curated, tmp_path / "run")
    assert run(["curate", "--resume", "--quiet", "--keep", "0", "1", "-o", str(folder)]) == 0
    assert len(rows_of(folder)) == 6 > len(rows_of(curated))
    after = {row["row"]: row["accuracy"] for row in rows_of(folder)}
    assert after.keys() == accuracy_by_prompt(Trace.open(folder / "held-out")).keys()
    assert all(after[row["row"]] == row["accuracy"] for row in rows_of(curated))
    assert run(["curate", "--resume", "--quiet", "--seed", "9", "-o", str(folder)]) == 2
    assert "--seed differs from the run" in capfd.readouterr().err


def test_a_run_is_not_overwritten_nor_resumed_as_something_else(curated, capfd):
    assert run([*CURATE.split(), "-o", str(curated)]) == 1
    assert "already exists. Continue it with --resume" in capfd.readouterr().err
    assert run(["probe", "--resume", "-o", str(curated)]) == 1
    assert "was not written by `probe`" in capfd.readouterr().err


def test_confirmed_problems_are_in_the_range_twice(curated, tmp_path):
    folder = shutil.copytree(curated, tmp_path / "run")
    assert run(["curate", "--resume", "--confirm", "--quiet", "-o", str(folder)]) == 0
    confirmed = [row for row in rows_of(curated) if 0.1 <= row["held_out_accuracy"] <= 0.9]
    assert rows_of(folder) == confirmed
    assert "confirmed on held-out samples were written." in (folder / "report.html").read_text(
        encoding="utf-8"
    )


def test_the_next_command_trains_as_it_was_measured():
    settings = {
        "model": "some/model",
        "engine": "hf",
        "prompts": "p.jsonl",
        "temperature": 0.7,
        "max_tokens": 3000,
        "prompt_template": "raw",
        "reward": "mine.py:f",
    }
    config = CurateConfig.of(settings)
    assert suggest(*training_flags(config, Path("a b.jsonl"))) == (
        "mismatch-cli train --dataset 'a b.jsonl' --max-tokens 3000 --model some/model "
        "--learning-rate 1e-6 --temperature 0.7 --prompt-template raw --reward mine.py:f"
    )
    ours = replace_settings(config, model=str(bundled("model")), prompt_template="chat", reward="")
    assert not {"--model", "--learning-rate", "--prompt-template"} & set(
        training_flags(ours, Path("p"))
    )


def test_what_it_writes_can_be_trained_on(curated, tmp_path):
    flags = (
        "--engine hf --steps 1 --prompts-per-step 1 --samples-per-prompt 2 --max-tokens 16 "
        "--eval-samples 1 -q"
    )
    dataset = str(curated / "perfectible.jsonl")
    assert (
        run(
            [
                "train",
                "--dataset",
                dataset,
                *flags.split(),
                "--eval-every",
                "0",
                "-o",
                str(tmp_path / "t"),
            ]
        )
        == 0
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--keep 0.8 0.2", "--keep 0.8 0.2 is not a range of accuracies"),
        ("--held-out-samples 0", "held_out_samples = 0 is too small"),
        ("--engine foo", "Unknown engine 'foo'"),
        ("--keep 0.01 0.02", "None of the 6 problems has an accuracy between 0.01 and 0.02"),
    ],
)
def test_mistakes_are_reported_in_a_sentence(flags, said, tmp_path, capfd):
    assert run([*CURATE.split(), "-o", str(tmp_path / "run"), *flags.split()]) in (1, 2)
    assert said in " ".join(capfd.readouterr().err.split())


def test_problems_without_answers_cannot_be_curated(tmp_path, capfd):
    (tmp_path / "p.jsonl").write_text('{"problem": "What?"}\n')
    assert (
        run([*CURATE.split(), "--prompts", str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "run")])
        == 1
    )
    assert "has no problem with an answer" in " ".join(capfd.readouterr().err.split())


@pytest.mark.slow
def test_a_custom_reward_needs_no_answers(tmp_path, capfd, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def even(response):\n    return 1 - len(response) % 2\ntwo = lambda: 2\n"
    )
    problems = [{"problem": f"Will has {n} kites. How many?"} for n in range(3)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, problems)))
    flags = [
        "--prompts",
        str(tmp_path / "p.jsonl"),
        "--reward",
        f"{tmp_path}/mine.py:even",
        "--keep",
        "0",
        "1",
    ]
    assert run([*CURATE.split(), *flags, "-o", str(tmp_path / "run")]) == 0
    rows = rows_of(tmp_path / "run")
    assert [row["problem"] for row in rows] == [problem["problem"] for problem in problems]
    assert {row["answer"] for row in rows} == {None}
    assert "mean reward, by " in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    flags[3] = f"{tmp_path}/mine.py:two"
    assert run([*CURATE.split(), *flags, "-o", str(tmp_path / "two")]) == 1
    assert "has a reward of 2, but an accuracy must be from 0 to 1" in " ".join(
        capfd.readouterr().err.split()
    )
    flags[3] = f"{tmp_path}/mine.py:typo"
    monkeypatch.setattr("mismatch_cli.probe.rollouts.create_engine", None)
    assert run([*CURATE.split(), *flags, "-o", str(tmp_path / "typo")]) == 1
    assert "has no function 'typo'" in " ".join(capfd.readouterr().err.split())


def test_ctrl_c_says_how_to_continue(monkeypatch, tmp_path, capfd):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("mismatch_cli.probe.curate.curate", interrupted)
    assert run([*CURATE.split(), "-o", str(tmp_path / "run")]) == 130
    assert "the same command with --resume" in capfd.readouterr().err


def test_a_reward_has_one_name_from_wherever_it_is_given(monkeypatch, tmp_path):
    configs = []
    monkeypatch.setattr(
        "mismatch_cli.probe.curate.curate",
        lambda config, *_, **__: exit(configs.append(config) or 3),
    )
    (tmp_path / "mine.py").write_text("def f(response):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    for where in ("mine.py:f", f"{tmp_path}/mine.py:f"):
        with pytest.raises(SystemExit):
            run([*CURATE.split(), "-o", str(tmp_path / "run"), "--reward", where])
    assert [config.task.reward for config in configs] == [f"{tmp_path}/mine.py:f"] * 2
