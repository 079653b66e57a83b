"""Nothing is lost: killed, failed or damaged, a resumed run ends with the bits of one that was
never interrupted.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mismatch_cli.app.cli import run as cli
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.models.engines.hf import HfEngine
from mismatch_cli.models.loading import load_causal_lm
from mismatch_cli.trace.run_folder import claim_folder
from mismatch_cli.train.checkpoint import cut_back, latest_checkpoint
from mismatch_cli.train.learner import Learner, LossScale
from tests.leftovers import leave_draft
from tests.train.small_runs import EVALUATED, SMALL, assert_same_run, numbers, run, weights


def test_stopped_and_resumed_equals_unbroken(unbroken, tmp_path):
    run(tmp_path / "run", stop_after=1, **EVALUATED)
    assert [line["step"] for line in numbers(tmp_path / "run")] == [0, 1]
    run(tmp_path / "run", resume=True, **EVALUATED)
    assert_same_run(tmp_path / "run", unbroken)


@pytest.mark.slow
def test_leftovers_of_a_kill_do_not_count(unbroken, tmp_path):
    """Half a line, lines and a trace after the checkpoint, and an unfinished checkpoint."""
    folder = tmp_path / "run"
    shutil.copytree(unbroken, folder)
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    for name in ("step-000003", "step-000004"):
        leave_draft(folder / "checkpoints", name)
    (folder / "traces" / "step-3").mkdir(parents=True)
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as lines:
        lines.write('{"step": 5, "rew')
    with claim_folder(folder, check=lambda: None):
        records = run(folder, resume=True, **EVALUATED)
    assert [record["step"] for record in records] == [3, 4]
    assert_same_run(folder, unbroken)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-000002",
        "step-000004",
    ]
    assert not list((folder / "traces").iterdir())


def test_a_run_without_a_checkpoint_begins_again(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "eval_accuracy": 0.5}\n{"step": 1}\n', encoding="utf-8"
    )
    cut_back(tmp_path, -1)
    assert not numbers(tmp_path)


@pytest.mark.slow
def test_a_step_on_record_without_its_checkpoint_is_repeated(tmp_path):
    """A kill or a full disk came between them; a complete run that has lost its checkpoints is
    left alone.
    """
    folder = tmp_path / "run"
    run(folder, steps=1)
    whole = numbers(folder), weights(folder)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(MismatchError, match="its checkpoints are gone"):
        run(folder, resume=True, steps=1)
    shutil.rmtree(folder / "model")
    run(folder, resume=True, steps=1)
    assert (numbers(folder), weights(folder)) == whole


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_resumes(unbroken, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(unbroken, folder)
    newest = folder / "checkpoints" / "step-000004"
    (tensors,) = (newest / "state").iterdir()
    state = tensors.read_bytes()
    tensors.write_bytes(state[: len(state) // 2])
    with pytest.raises(
        MismatchError, match=r"step-000004 is damaged. Delete it, then --resume continues"
    ):
        run(folder, resume=True, **EVALUATED)
    assert numbers(folder) == numbers(unbroken)
    shutil.rmtree(newest)
    run(folder, resume=True, **EVALUATED)
    assert_same_run(folder, unbroken)


def test_a_damaged_checkpoint_says_whether_there_is_one_before_it(tmp_path):
    for step, way_out in (
        (2, "Start again in another --output"),
        (4, "Delete it, then --resume continues from the one before"),
    ):
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        with pytest.raises(MismatchError, match=f"{folder.name} is damaged. {way_out}"):
            latest_checkpoint(tmp_path)


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_is_read(unbroken, tmp_path):
    """One file of lists, in the order of the model's parameters."""
    folder = tmp_path / "run"
    shutil.copytree(unbroken, folder)
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    newest = folder / "checkpoints" / "step-000002"
    facts = json.loads((newest / "state.json").read_text())
    (file,) = (newest / "state").iterdir()
    tensors = load_file(file)
    names = [name for name, _ in load_causal_lm(str(unbroken / "model")).named_parameters()]
    kinds = {
        kind: [tensors[f"{kind}.{name}"] for name in names]
        for kind in ("weight", "exp_avg", "exp_avg_sq")
    }
    moments = zip(kinds["exp_avg"], kinds["exp_avg_sq"], strict=True)
    step = torch.tensor(float(facts["learner"]["version"]))
    optimizer = {
        i: {"step": step, "exp_avg": m, "exp_avg_sq": v} for i, (m, v) in enumerate(moments)
    }
    learner = facts["learner"] | {
        "masters": kinds["weight"],
        "optimizer": {"state": optimizer, "param_groups": []},
    }
    sync = facts["sync"] | {"before": None}
    torch.save(
        {"step": 2, "learner": learner, "sync": sync, "judge": facts["judge"]}, newest / "state.pt"
    )
    shutil.rmtree(newest / "state")
    (newest / "state.json").unlink()
    run(folder, resume=True, **EVALUATED)
    assert_same_run(folder, unbroken)


def _train(folder: str) -> None:
    run(Path(folder), resume=True, **EVALUATED)


@pytest.mark.slow
def test_killed_at_random_moments_and_resumed_equals_unbroken(unbroken, tmp_path):
    """Real SIGKILL: while the first checkpoint is written, then at two random moments."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tests.train.small_runs", "transformers.models.qwen3.modeling_qwen3"]
    )
    seed = time.time_ns() % 10_000
    print("seed of the moments:", seed)
    chance = random.Random(seed)
    folder = tmp_path / "run"

    def start() -> Any:
        process = context.Process(target=_train, args=(str(folder),))
        process.start()
        return process

    def kill(process: Any) -> None:
        process.kill()
        process.join()
        steps = [line["step"] for line in _whole_lines(folder)]
        print(
            "killed with",
            steps,
            sorted(path.name for path in (folder / "checkpoints").glob("*step-*")),
        )

    process = start()
    while not list((folder / "checkpoints").glob(".step-*.part")):
        assert process.is_alive()
        time.sleep(0.001)
    kill(process)
    for _ in range(2):
        began = time.time()
        process = start()
        while (folder / "config.toml").stat().st_mtime < began:  # the first sign of life
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 5))
        kill(process)
    process = start()
    process.join()
    assert process.exitcode == 0
    assert_same_run(folder, unbroken)


def _whole_lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def fail_at(monkeypatch: Any, owner: type, method: str, call: int, error: Exception) -> None:
    """From its n-th call, a method raises what a library would."""
    real, calls = getattr(owner, method), []

    def failing(self: Any, *arguments: Any) -> Any:
        calls.append(method)
        if len(calls) >= call:
            raise error
        return real(self, *arguments)

    monkeypatch.setattr(owner, method, failing)


@pytest.mark.slow
def test_a_failure_midway_gives_a_message_and_loses_nothing(unbroken, tmp_path, monkeypatch, capfd):
    """The engine while sampling, then while loading weights, then the trainer: the run resumes
    each time.
    """
    folder = tmp_path / "run"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | EVALUATED).items()]
    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore about it.")
    failures = [
        (
            HfEngine,
            "sample",
            5,
            RuntimeError("no device"),
            "engine failed while sampling (RuntimeError: no device)",
        ),
        (
            HfEngine,
            "load_weights",
            3,
            KeyError("rank"),
            "engine failed while loading weights (KeyError: 'rank')",
        ),
        (
            Learner,
            "update",
            3,
            memory,
            "failed (OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB)",
        ),
    ]
    steps = []
    for owner, method, call, error, said in failures:
        with monkeypatch.context() as patch:
            fail_at(patch, owner, method, call, error)
            assert (
                cli(
                    [
                        "train",
                        "--quiet",
                        "--output",
                        str(folder),
                        *flags,
                        *["--resume"] * bool(steps),
                    ]
                )
                == 1
            )
        errors = " ".join(capfd.readouterr().err.split())
        assert said in errors and "--resume" in errors and "Traceback" not in errors
        steps.append(numbers(folder)[-1]["step"])
    assert steps == [2, 3, 3]  # the last run repeated step 3, from the checkpoint of step 2
    run(folder, resume=True, **EVALUATED)
    assert_same_run(folder, unbroken)


@pytest.mark.slow
def test_an_overflow_in_float16_is_on_record_and_the_run_resumes_to_the_same_bits(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("mismatch_cli.train.learner.LossScale", partial(LossScale, initial=2.0**24))
    changes = {
        "trainer_dtype": "float16",
        "steps": 2,
        "epochs": 2,
        "prompts_per_step": 2,
        "num_problems": 2,
    }
    run(tmp_path / "unbroken", **changes)
    first, second = numbers(tmp_path / "unbroken")
    assert 0 < first["back_offs"] <= second["back_offs"] < 8
    assert (
        first["updates"] == 4 - first["back_offs"] and second["updates"] == 8 - second["back_offs"]
    )
    assert second["grad_norm"] > 0
    run(tmp_path / "run", stop_after=1, **changes)
    run(tmp_path / "run", resume=True, **changes)
    assert_same_run(tmp_path / "run", tmp_path / "unbroken")
