"""The loop on the bundled model: it repeats itself to the bit, goes on after a kill, and sees a broken weight sync."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mismatch_cli.engines.hf import HfEngine
from mismatch_cli.errors import MismatchError
from mismatch_cli.rl.config import load_config
from mismatch_cli.rl.loop import train
from mismatch_cli.trace.reader import Trace

SMALL = {
    "engine": "hf",
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "max_tokens": 96,
    "rollout_dtype": "float32",
    "learning_rate": 1e-3,
    "threads": 1,
    "num_problems": 8,
    "eval_samples": 1,
    "eval_every": 0,
    "checkpoint_every": 1,
    "trace_every": 0,
}


def run(folder: Path, *, resume: bool = False, stop_after: int = 0, **changes: Any) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    config = load_config("miniature", SMALL | {"steps": 4} | changes)
    train(config, folder, seen.append, resume=resume, stop=lambda: len(seen) == stop_after)
    return seen


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The metrics without the times of the phases."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("train") / "unbroken"
    torch.set_num_threads(1)
    run(folder)
    return folder


def test_every_step_is_a_line_with_a_proven_sync(unbroken):
    lines = numbers(unbroken)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert {line["sync"] for line in lines} == {"proven"}
    assert all(line["mismatch"]["abs_dp_mean"] < 1e-6 for line in lines)
    assert lines[0]["current"]["abs_dp_mean"] > 1e-4  # the second minibatch is judged by other weights
    assert 0 <= lines[-1]["eval_accuracy"] <= 1
    assert "eval_accuracy" not in lines[0]


@pytest.mark.parametrize("algorithm", ["pg-is", "grpo-clip-higher", "dppo-binary-tv-recompute", "gspo", "icepop"])
def test_other_algorithms_go_through_the_same_loop(algorithm, tmp_path):
    seen = run(tmp_path / "run", steps=1, algorithm=algorithm)
    assert seen[0]["blocked"] is not None
    assert seen[0]["seconds"]["recompute"] >= 0


def test_stopped_and_resumed_equals_unbroken(unbroken, tmp_path):
    run(tmp_path / "run", stop_after=2)
    assert len(numbers(tmp_path / "run")) == 2
    run(tmp_path / "run", resume=True)
    assert numbers(tmp_path / "run") == numbers(unbroken)
    assert weights(tmp_path / "run") == weights(unbroken)


def test_lines_after_the_checkpoint_are_cut_before_going_on(unbroken, tmp_path):
    run(tmp_path / "run", stop_after=2)
    with open(tmp_path / "run" / "metrics.jsonl", "a", encoding="utf-8") as lines:
        lines.write('{"step": 3, "reward": 0.1}\n{"step": 4, "rew')
    run(tmp_path / "run", resume=True)
    assert numbers(tmp_path / "run") == numbers(unbroken)


@pytest.mark.slow
def test_killed_and_resumed_equals_unbroken(tmp_path):
    """Real SIGKILL, at the first line and inside the steps after it."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | {"steps": 4}).items()]

    def start(folder: Path, *more: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "mismatch_cli", "train", "--quiet", "--output", str(folder), *flags, *more]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def finish(process: subprocess.Popen) -> None:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors

    finish(start(tmp_path / "unbroken"))
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for lines, pause in ((1, 0.0), (2, 0.3)):
        process = start(tmp_path / "killed", *["--resume"] * (lines > 1))
        while not metrics.is_file() or metrics.read_text(encoding="utf-8").count("\n") < lines:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finish(start(tmp_path / "killed", "--resume"))
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "unbroken")
    assert weights(tmp_path / "killed") == weights(tmp_path / "unbroken")


def _stale(self: HfEngine, model: Any) -> None:
    pass


def _partial(self: HfEngine, model: Any) -> None:
    state = model.state_dict()
    self._model.load_state_dict({name: state[name] for name in list(state)[::2]}, strict=False)


def _nan(self: HfEngine, model: Any) -> None:
    self._model.load_state_dict(
        {name: torch.full_like(weight, torch.nan) for name, weight in model.state_dict().items()}
    )


@pytest.mark.parametrize("broken", [_stale, _partial, _nan], ids=["stale", "partial", "nan"])
def test_a_broken_sync_stops_the_run(broken, tmp_path, monkeypatch):
    monkeypatch.setattr(HfEngine, "load_weights", broken)
    with pytest.raises(MismatchError, match=r"weight sync failed|logits are NaN"):
        run(tmp_path / "run")
    assert len(numbers(tmp_path / "run")) == 1


def test_a_trace_of_every_nth_step_can_be_opened(tmp_path):
    run(tmp_path / "run", steps=3, trace_every=2)
    assert sorted(path.name for path in (tmp_path / "run" / "traces").iterdir()) == ["step-2"]
    batch = next(iter(Trace.open(tmp_path / "run" / "traces" / "step-2").batches()))
    assert batch.num_responses == 16


@pytest.mark.slow
def test_float32_control_on_vllm_keeps_the_policies_equal(tmp_path):
    """Twenty updates of the weights inside vLLM, each proven by the tokens that it sampled with them."""
    seen = run(tmp_path / "run", engine="vllm", steps=20, checkpoint_every=20)
    assert {record["sync"] for record in seen} == {"proven"}
    assert max(record["mismatch"]["abs_dp_mean"] for record in seen) <= 1e-6
    assert max(record["current"]["abs_dp_mean"] for record in seen) > 1e-4


def test_a_low_precision_engine_is_asked_which_weights_it_agrees_with(tmp_path):
    seen = run(tmp_path / "run", rollout_dtype="bfloat16")
    assert [record["sync"] for record in seen] == ["undecidable", "proven", "proven", "proven"]


def test_a_low_precision_engine_with_old_weights_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(HfEngine, "load_weights", _stale)
    with pytest.raises(MismatchError, match="fit the weights of the step before better"):
        run(tmp_path / "run", rollout_dtype="bfloat16")


def test_a_low_precision_run_goes_on_to_the_same_proofs(tmp_path):
    run(tmp_path / "unbroken", rollout_dtype="bfloat16", trainer_dtype="bfloat16")
    run(tmp_path / "run", rollout_dtype="bfloat16", trainer_dtype="bfloat16", stop_after=2)
    run(tmp_path / "run", rollout_dtype="bfloat16", trainer_dtype="bfloat16", resume=True)
    assert numbers(tmp_path / "run") == numbers(tmp_path / "unbroken")


@pytest.mark.parametrize("algorithm", ["dppo-topk-tv", "dppo-topk-kl-recompute"])
def test_top_k_masks_judge_with_what_the_engine_reported(algorithm, tmp_path):
    seen = run(tmp_path / "run", steps=2, algorithm=algorithm, trace_every=1, learning_rate=3e-3)
    assert seen[0]["blocked"] is not None
    batch = next(iter(Trace.open(tmp_path / "run" / "traces" / "step-1").batches()))
    assert batch.topk_ids_TK is not None and batch.topk_ids_TK.shape[1] >= 20
    assert batch.topk_logp_trainer_TK is not None


def test_a_gradient_that_is_not_finite_leaves_its_batch_as_a_trace(tmp_path, monkeypatch):
    """An engine that reports an absurdly small μ: the weight overflows, and no scaler can help."""
    sample = HfEngine.sample

    def absurd(self: HfEngine, *arguments: Any) -> Any:
        rollouts = sample(self, *arguments)
        for rollout in rollouts:
            rollout.logp_rollout_T[0] = -200.0
        return rollouts

    monkeypatch.setattr(HfEngine, "sample", absurd)
    with pytest.raises(MismatchError, match=r"not finite.*What it was computed from is in"):
        run(tmp_path / "run", algorithm="pg-is")
    batch = next(iter(Trace.open(tmp_path / "run" / "traces" / "not-finite").batches()))
    assert float(batch.logp_rollout_T.min()) == -200.0
