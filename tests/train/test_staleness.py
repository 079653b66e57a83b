"""Staleness as a dose: the engine samples with weights that are exactly N updates old."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.train import checkpoint
from tests.train.checkpoints import model_after, responses_of
from tests.train.small_runs import SHORT, assert_same_run, numbers, reward_file, run

ONE_UPDATE: dict[str, Any] = SHORT | {
    "steps": 4, "minibatches": 1, "average_decay": 0.0, "trace_every": 1, "checkpoint_every": 1,
}  # fmt: skip
STALE = ONE_UPDATE | {"staleness": 2}


@pytest.fixture(scope="module")
def reward(tmp_path_factory) -> dict[str, str]:
    """Every response has an advantage, so that every update changes the weights."""
    return {"reward": reward_file(tmp_path_factory.mktemp("reward"))}


@pytest.fixture(scope="module")
def stale(tmp_path_factory, reward) -> Path:
    """Two updates behind, one update a step; every checkpoint is kept."""
    folder: Path = tmp_path_factory.mktemp("stale") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_RETAINED", 9)
        run(folder, **STALE | reward)
    return folder


def column(responses: pa.Table, name: str) -> np.ndarray:
    """A column of all tokens, laid flat."""
    return np.concatenate(responses.column(name).to_pylist())


def logp_after(folder: Path, step: int, responses: pa.Table) -> np.ndarray:
    """log π of these responses at the weights after a step, nats."""
    ids = (responses.column(name).to_pylist() for name in ("prompt_ids", "response_ids"))
    requests = [ScoreRequest(*pair) for pair in zip(*ids, strict=True)]
    trainer = Trainer(model_after(folder, step), SamplingSettings())
    return np.concatenate([s.logp_T for s in trainer.score(requests, token_budget=2048)])


def test_the_engine_samples_with_the_weights_of_two_updates_ago(stale):
    """At step 4, after 3 updates, those after 1; log π′ is theirs too, and log π is not."""
    responses = responses_of(stale, 4)
    logp_T = logp_after(stale, 1, responses)
    assert np.abs(column(responses, "logp_rollout") - logp_T).max() < 1e-4
    assert np.abs(column(responses, "logp_recomputed") - logp_T).max() < 1e-4
    newest_T = logp_after(stale, 3, responses)
    assert np.abs(column(responses, "logp_trainer") - newest_T).max() < 1e-4
    assert np.abs(newest_T - logp_T).max() > 1e-2


def test_versions_are_those_of_the_weights(stale):
    def versions(side):
        tables = [responses_of(stale, step) for step in range(1, 5)]
        return [set(table.column(f"version_{side}").to_pylist()) for table in tables]

    assert versions("rollout") == [{0}, {0}, {0}, {1}]
    assert versions("trainer") == [{0}, {1}, {2}, {3}]


def test_the_sync_is_proven_at_the_weights_that_sample(stale):
    """In float32 log μ must equal log π′, and the engine's tensors those of two updates ago."""
    lines = numbers(stale)
    assert {line["sync"] for line in lines} == {"proven"}
    assert all(line["mismatch"]["abs_dp_mean"] < 1e-6 for line in lines)
    assert lines[3]["current"]["abs_dp_mean"] > 1e-4


def test_evaluations_are_of_the_newest_weights(reward, tmp_path):
    """The first step is that of a run without staleness, and so is the accuracy after it."""
    for updates in (0, 1):
        changes = {"steps": 1, "staleness": updates, "eval_every": 1, "trace_every": 0}
        run(tmp_path / str(updates), **ONE_UPDATE | changes | reward)
    assert_same_run(tmp_path / "0", tmp_path / "1")


def test_a_resumed_run_samples_with_the_same_old_weights(stale, reward, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(stale, folder)
    for step in (3, 4):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:06d}")
    shutil.rmtree(folder / "model")
    assert [record["step"] for record in run(folder, resume=True, **STALE | reward)] == [3, 4]
    assert_same_run(folder, stale)


@pytest.mark.slow
def test_an_adapter_and_several_updates_a_step(reward, tmp_path):
    """Three updates behind with two a step: one of the steps' sets is from within a step."""
    changes = {"minibatches": 2, "staleness": 3, "lora": True, "steps": 3}
    run(tmp_path / "run", **STALE | changes | reward)
    sampled = [responses_of(tmp_path / "run", step).column("version_rollout") for step in (1, 2, 3)]
    assert [set(versions.to_pylist()) for versions in sampled] == [{0}, {0}, {1}]
    lines = numbers(tmp_path / "run")
    assert {line["sync"] for line in lines} == {"proven"}


@pytest.mark.slow
def test_in_lower_precision_too(reward, tmp_path):
    """The proof compares with weights as they were sent."""
    changes = {"rollout_dtype": "bfloat16", "trainer_dtype": "bfloat16"} | reward
    lines = run(tmp_path / "run", **STALE | changes)
    assert [line["sync"] for line in lines[:2]] == ["proven", "proven"]
    assert all("rounding" in line for line in lines[:2])
