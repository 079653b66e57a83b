"""The adapters for verl, SkyRL, slime and OpenRLHF on real batches, with stand-ins for the imported
modules.

verl's batch is from tests/frameworks/recording/real_verl.py. SkyRL's (a9564572e) and OpenRLHF's (3c3be623) were
made by their own functions from the same lists: `convert_prompts_responses_to_batch_tensors`, and
`_process_response_into_experience` with `split_rollout_samples`. slime's follows its
`_convert_samples_to_train_data` (624b824a8).
"""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_cli.frameworks.trl.recorder import record
from mismatch_cli.studies.translation import Translation
from mismatch_cli.trace.reader import Trace
from tests.frameworks.recording.test_trl import run_the_lines_of_the_page
from tests.studies.compared import rows_of

VERL = Path(__file__).parent / "verl_batch.npz"
near = partial(pytest.approx, abs=1e-7)


def verl_metrics(folder: Path) -> dict[str, float]:
    """The trace's metrics in verl's dialect."""
    metrics = Translation.of([Trace.open(folder)], "verl").to_json()["frameworks"]["verl"][
        "metrics"
    ]
    return {line["name"]: line["value"] for line in metrics if line["value"] is not None}


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> ModuleType:
    """Install a stand-in module for a framework that is not installed here."""
    for end in range(name.count(".") + 1):
        part = ".".join(name.split(".")[: end + 1])
        monkeypatch.setitem(sys.modules, part, sys.modules.get(part) or ModuleType(part))
    vars(sys.modules[name]).update(content)
    return sys.modules[name]


def adapter(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    module = f"mismatch_cli.frameworks.{name}.recorder"
    monkeypatch.delitem(sys.modules, module, raising=False)
    return importlib.import_module(module)


class FakeTrainer:
    """The part of verl's trainer that its subclass uses: a configuration, and computing
    advantages.
    """

    config: Any = None
    tokenizer, global_steps = None, 7

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        metrics["done"] = True
        return batch

    def on_train_end(self) -> None:
        self.ended = True


def registry_of_verl(
    monkeypatch: pytest.MonkeyPatch,
    queue: dict[str, Any],
    external: str = "mismatch_cli.frameworks.verl.recorder",
) -> dict[str, Any]:
    """A stand-in for verl's trainers by mode, after it has imported an external module; `queue`
    is the columns of a batch.
    """
    registry: dict[str, Any] = {"sync": FakeTrainer}
    stand_in(monkeypatch, "transfer_queue", kv_batch_get=lambda *_: queue)
    base = stand_in(
        monkeypatch,
        "verl.trainer.ppo.v1.trainer_base",
        TRAINER_REGISTRY=registry,
        register_trainer=lambda name: lambda trainer: registry.setdefault(name, trainer),
    )
    stand_in(monkeypatch, "verl.trainer.ppo.v1", trainer_base=base)
    monkeypatch.delitem(sys.modules, external, raising=False)
    importlib.import_module(external)
    return registry


def verl_trainer(
    monkeypatch: pytest.MonkeyPatch, folder: Path, **algorithm: Any
) -> tuple[Any, Any]:
    """The recorded twin of a stand-in trainer, and a batch from verl, whose sixth response is
    padding.
    """
    columns: dict[str, list[torch.Tensor]] = defaultdict(list)
    with np.load(VERL) as arrays:
        for name in arrays.files:
            columns[name.partition("/")[0]].append(torch.from_numpy(arrays[name]))
    data = {
        name: SimpleNamespace(unbind=lambda values=values: values)
        for name, values in columns.items()
    }
    made = registry_of_verl(monkeypatch, data)["sync_recorded"]()
    actor = SimpleNamespace(
        rollout=SimpleNamespace(name="vllm", dtype="bfloat16", temperature=0.8),
        model=SimpleNamespace(path="some-model"),
    )
    made.config = SimpleNamespace(
        trainer=SimpleNamespace(default_local_dir=str(folder)),
        algorithm=algorithm,
        actor_rollout_ref=actor,
    )
    steps = {"min_global_steps": 6, "max_global_steps": 7}
    tags = [{"is_padding": number == 5} | steps for number in range(12)]
    return made, SimpleNamespace(tags=tags, keys=[], partition_id="train")


def test_verl(monkeypatch, tmp_path):
    made, batch = verl_trainer(monkeypatch, tmp_path)
    metrics: dict[str, Any] = {}
    assert made._compute_advantage(batch, metrics) is batch and metrics["done"]
    made.on_train_end()
    assert made.ended and not Trace.open(tmp_path / "recorded").completeness.partial
    rows = rows_of(tmp_path / "recorded")
    assert made._recorder.counts["written"] == len(rows) == 11
    with np.load(VERL) as arrays:
        for row, number in zip(rows, (n for n in range(12) if n != 5), strict=True):
            assert row["response_ids"] == arrays[f"responses/{number}"].tolist()
            assert row["prompt_ids"] == arrays[f"prompts/{number}"].tolist()
            assert row["loss_mask"] == arrays[f"loss_mask/{number}"].astype(bool).tolist()
            assert row["logp_rollout"] == near(arrays[f"rollout_log_probs/{number}"])
            assert row["logp_trainer"] == near(arrays[f"old_log_probs/{number}"])
            assert row["reward"] == number % 2 and row["step"] == 7
            assert row["version_rollout"] == row["version_trainer"] == 6
    manifest = Trace.open(tmp_path / "recorded").manifest
    assert manifest["rollout"]["dtype"] == "bfloat16" and manifest["config"]["sampling"] == {
        "temperature": 0.8
    }


def test_verl_in_bypass_mode_has_no_log_probs_of_the_trainer(monkeypatch, tmp_path):
    made, batch = verl_trainer(monkeypatch, tmp_path, rollout_correction={"bypass_mode": True})
    made._compute_advantage(batch, {})
    made.on_train_end()
    assert all("logp_trainer" not in row for row in rows_of(tmp_path / "recorded"))


def test_training_continues_if_verl_lacks_something(monkeypatch, tmp_path, caplog):
    made, batch = verl_trainer(monkeypatch, tmp_path)
    del made.config.actor_rollout_ref.rollout.dtype
    batch.tags = batch.tags[:3]
    assert made._compute_advantage(batch, {}) is batch
    # The manifest lacks it, and the batch is lost
    assert "dtype" in caplog.text and "zip()" in caplog.text


TWO_TURNS = {
    "prompt_ids": [5, 6],
    "response_ids": [11, 12, 90, 91, 13],
    "loss_mask": [True, True, False, False, True],
}
ONE_TURN = {"prompt_ids": [7, 8, 9], "response_ids": [14, 15], "loss_mask": [True, True]}


class Batch(dict[str, Any]):
    """The part of SkyRL's TensorBatch that is read: a dict with metadata."""

    metadata: dict[str, Any]


def test_skyrl(monkeypatch, tmp_path):
    stand_in(monkeypatch, "skyrl.train.utils.callbacks", TrainingCallback=object)
    batch = {
        "sequences": torch.tensor([[5, 6, 11, 12, 90, 91, 13], [0, 0, 7, 8, 9, 14, 15]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]]),
        "response_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]),
        "loss_mask": torch.tensor([[1.0, 1, 0, 0, 1], [0, 0, 0, 1, 1]]),
        "rollout_logprobs": torch.tensor([[-0.1, -0.2, 0, 0, -0.3], [0, 0, 0, -0.4, -0.5]]),
        "action_log_probs": torch.tensor([[-0.11, -0.21, -9, -9, -0.31], [0, 0, 0, -0.41, -0.51]]),
        "advantages": torch.tensor([[2.0, 2, 2, 2, 2], [0, 0, 0, -1, -1]]),
        "values": None,
    }  # fmt: skip
    batch = Batch(
        {
            name: None if value is None else torch.cat([value, value[:1]])
            for name, value in batch.items()
        }
    )
    batch.metadata = {"pad_size": 1}  # a copy of the first response pads the batch
    sampling = SimpleNamespace(temperature=0.7)
    cfg = SimpleNamespace(
        trainer=SimpleNamespace(policy=SimpleNamespace(model=SimpleNamespace(path="some-model"))),
        generator=SimpleNamespace(sampling_params=sampling),
    )
    recordings: list[Any] = []
    adapter(monkeypatch, "skyrl")
    monkeypatch.chdir(tmp_path)
    run_the_lines_of_the_page(
        "record.md", "SkyRL", trainer=SimpleNamespace(add_callback=recordings.append)
    )
    (recording,) = recordings
    recording.on_train_end(None, None, None)  # a run without a step
    step = SimpleNamespace(global_step=3, batch=batch)
    recording.on_step_end(SimpleNamespace(cfg=cfg, tokenizer=None), step, None)
    recording.on_train_end(None, None, None)
    first, second = rows_of(tmp_path / "recorded")
    assert {name: first[name] for name in TWO_TURNS} == TWO_TURNS
    assert {name: second[name] for name in ONE_TURN} == ONE_TURN
    assert first["logp_rollout"] == near([-0.1, -0.2, 0, 0, -0.3])
    assert second["logp_trainer"] == near([-0.41, -0.51])
    assert second["advantage"] == [-1, -1] and first["step"] == 3
    assert Trace.open(tmp_path / "recorded").manifest["config"]["sampling"] == {"temperature": 0.7}


SLIME_ARGUMENTS = SimpleNamespace(
    hf_checkpoint="some-model", rollout_temperature=1.0, rollout_top_p=1.0, bf16=True, fp16=False
)


def megatron(
    monkeypatch, data_rank: int = 0, last_stage: bool = True, tensor_rank: int = 0
) -> None:
    """Stand in for Megatron's groups of ranks."""
    mpu = SimpleNamespace(
        is_pipeline_last_stage=lambda: last_stage,
        get_tensor_model_parallel_rank=lambda: tensor_rank,
        get_data_parallel_rank=lambda **_: data_rank,
    )
    stand_in(monkeypatch, "megatron.core", mpu=mpu)


@pytest.mark.parametrize(("last_stage", "tensor_rank"), [(True, 0), (False, 0), (True, 1)])
def test_slime(monkeypatch, tmp_path, last_stage, tensor_rank):
    """Each data-parallel rank has its own responses; of ranks with the same ones, one records."""
    monkeypatch.setenv("MISMATCH_RECORD", str(tmp_path / "run"))
    record = adapter(monkeypatch, "slime")
    for rank in range(2):
        megatron(monkeypatch, rank, last_stage, tensor_rank)
        data = {
            "tokens": [torch.tensor([5, 6, 11, 12, 90, 91, 13]), torch.tensor([7, 8, 9, 14, 15])],
            "response_lengths": [5, 2], "truncated": [0, 1],
            "sample_indices": [2 * rank, 2 * rank + 1],
            "loss_masks": [torch.tensor([1, 1, 0, 0, 1]), torch.tensor([1, 1])],
            "local_raw_reward": [1.0, 0.0],
            "rollout_log_probs": [torch.tensor([-0.1, -0.2, 0, 0, -0.3]),
                                  torch.tensor([-0.4, -0.5])],
            "log_probs": [torch.tensor([-0.11, -0.21, 0, 0, -0.31]), torch.tensor([-0.41, -0.51])],
            "advantages": [torch.tensor([1.0] * 5), torch.tensor([-1.0] * 2)],
        }  # fmt: skip
        record.record(SLIME_ARGUMENTS, 4, data)
    if not last_stage or tensor_rank:
        assert not (tmp_path / "run").exists()
        return
    for recorder in record._RECORDERS.values():
        recorder.close()
    rows = rows_of(tmp_path / "run")
    assert [row["sample_index"] for row in rows] == [0, 1, 2, 3] and {
        row["step"] for row in rows
    } == {4}
    for row, expected in zip(rows, (TWO_TURNS, ONE_TURN) * 2, strict=True):
        assert {name: row[name] for name in expected} == expected
    assert [row["finish_reason"] for row in rows] == ["stop", "length"] * 2
    assert [row["reward"] for row in rows] == [1, 0] * 2
    assert rows[3]["logp_trainer"] == near([-0.41, -0.51])
    assert Trace.open(tmp_path / "run").manifest["trainer"]["dtype"] == "bfloat16"


def test_slime_with_an_empty_response(monkeypatch, tmp_path):
    """The prompt of a response without tokens is not recorded as its response."""
    monkeypatch.setenv("MISMATCH_RECORD", str(tmp_path / "run"))
    megatron(monkeypatch)
    record = adapter(monkeypatch, "slime")
    data = {
        "tokens": [torch.tensor([7, 8, 9]), torch.tensor([7, 8, 9, 14, 15])],
        "response_lengths": [0, 2],
        "truncated": [0, 0],
        "sample_indices": [0, 1],
        "loss_masks": [torch.tensor([]), torch.tensor([1, 1])],
        "rollout_log_probs": [torch.tensor([]), torch.tensor([-0.4, -0.5])],
        "log_probs": [torch.tensor([]), torch.tensor([-0.41, -0.51])],
    }
    record.record(SLIME_ARGUMENTS, 4, data)
    for recorder in record._RECORDERS.values():
        recorder.close()
    assert [row["response_ids"] for row in rows_of(tmp_path / "run")] == [[14, 15]]


def test_the_hook_of_miles_passes_no_data(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("MISMATCH_RECORD", str(tmp_path / "run"))
    megatron(monkeypatch)
    record = adapter(monkeypatch, "slime")
    record.record(SimpleNamespace())
    record.record(SimpleNamespace())
    assert caplog.text.count("Training continues") == 1 and "--dump-details" in caplog.text


def test_openrlhf_resumes_as_its_flags_say(monkeypatch, tmp_path):
    """`--ckpt.load_enable`, and `--load_checkpoint` before flags had sections; only with a
    checkpoint of the actor.
    """
    is_resumed = adapter(monkeypatch, "openrlhf").is_resumed
    folder = str(tmp_path)
    loads = [
        SimpleNamespace(ckpt=SimpleNamespace(load_enable=True, path=folder)),
        SimpleNamespace(load_checkpoint=True, ckpt_path=folder),
    ]
    starts = [
        SimpleNamespace(ckpt=SimpleNamespace(load_enable=False, path=folder)),
        SimpleNamespace(load_checkpoint=False, ckpt_path=folder),
        SimpleNamespace(),
        None,
    ]
    assert not any(map(is_resumed, loads))
    (tmp_path / "_actor").mkdir()
    assert all(map(is_resumed, loads)) and not any(map(is_resumed, starts))


def test_openrlhf(monkeypatch, tmp_path):
    experience = SimpleNamespace(
        sequences=torch.tensor([[5, 6, 11, 12, 90, 91, 13], [7, 8, 9, 14, 15, 0, 0]]),
        attention_mask=torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]),
        action_mask=torch.tensor([[0, 1, 1, 0, 0, 1], [0, 0, 1, 1, 0, 0]]),
        rollout_log_probs=torch.tensor([[0, -0.1, -0.2, 0, 0, -0.3], [0, 0, -0.4, -0.5, 0, 0]]),
        action_log_probs=torch.tensor([[0, -0.11, -0.21, 0, 0, -0.31], [0, 0, -0.41, -0.51, 0, 0]]),
        advantages=torch.tensor([[0.8] * 6, [-1.2] * 6]),
        rewards=torch.tensor([1.0, 0.0]),
        truncated=torch.tensor([False, True]),
    )

    class Maker:
        """The part of OpenRLHF's RemoteExperienceMaker that is wrapped."""

        tokenizer = None
        args = SimpleNamespace(
            ckpt=SimpleNamespace(load_enable=True, path=str(tmp_path / "checkpoints"))
        )

        def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
            return experiences

    name = "openrlhf.trainer.ppo_utils.experience_maker"
    stand_in(monkeypatch, name, RemoteExperienceMaker=Maker)
    monkeypatch.setenv("MISMATCH_RECORD", str(tmp_path / "run"))
    adapter(monkeypatch, "openrlhf").record()
    for _ in range(2):  # a run, and its continuation from a checkpoint
        maker = Maker()
        for _ in range(2):
            assert maker.compute_advantages_and_returns([experience])[0] is experience
        maker.recorder.close()
        (tmp_path / "checkpoints" / "_actor").mkdir(parents=True, exist_ok=True)
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    for row, expected in zip(rows, (TWO_TURNS, ONE_TURN) * 4, strict=True):
        assert {name: row[name] for name in expected} == expected
    assert rows[0]["logp_rollout"] == near([-0.1, -0.2, 0, 0, -0.3])
    assert rows[1]["logp_trainer"] == near([-0.41, -0.51])
    assert rows[1]["advantage"] == near([-1.2, -1.2])
    assert [row["reward"] for row in rows[:2]] == [1, 0]
    assert [row["finish_reason"] for row in rows[:2]] == ["stop", "length"]


def test_openrlhf_with_an_empty_response(monkeypatch):
    """Its prompt is all it has: no token of it becomes a response."""
    experience = SimpleNamespace(
        sequences=torch.tensor([[7, 8, 9, 0], [7, 11, 12, 13]]),
        attention_mask=torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
        action_mask=torch.tensor([[0, 0, 0], [1, 1, 1]]),
        rollout_log_probs=torch.zeros(2, 3),
        action_log_probs=torch.zeros(2, 3),
        advantages=torch.zeros(2, 3),
        rewards=torch.tensor([1.0, 0.0]),
        truncated=torch.tensor([False, True]),
    )
    matrices = adapter(monkeypatch, "openrlhf").columns(experience)
    assert matrices["prompt_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert matrices["response_mask"].tolist() == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(("steps_before", "resumes"), [(0, False), (1, True), (2, True)])
def test_a_run_that_begins_after_its_first_step_is_resumed(
    monkeypatch, tmp_path, steps_before, resumes
):
    """verl and SkyRL count the first step as 1, TRL as 0."""
    stand_in(monkeypatch, "skyrl.train.utils.callbacks", TrainingCallback=object)
    made, _ = verl_trainer(monkeypatch, tmp_path)
    made.global_steps = steps_before + 1
    skyrl = adapter(monkeypatch, "skyrl")
    modules = [sys.modules[f"mismatch_cli.frameworks.{name}.recorder"] for name in ("verl", "trl")]
    settings: list[dict[str, Any]] = []

    def keep_settings(*_: Any, **named: Any) -> Any:
        settings.append(named)
        return SimpleNamespace(add_padded=lambda **_: None)

    for module in (*modules, skyrl):
        monkeypatch.setattr(module, "Recorder", keep_settings)
    assert made._recorder is not None
    step = SimpleNamespace(global_step=steps_before + 1, batch={})
    skyrl.Recording(str(tmp_path)).on_step_end(None, step, None)
    state = SimpleNamespace(global_step=steps_before)
    accelerator = SimpleNamespace(process_index=0)
    record(
        SimpleNamespace(
            state=state, accelerator=accelerator, _generate_and_score_completions=lambda _: None
        ),
        str(tmp_path),
    )
    assert [bool(named["resume"]) for named in settings[:2]] == [resumes] * 2
    assert settings[2]["resume"]() == resumes


def test_verl_is_asked_for_the_columns_of_its_batch(monkeypatch, tmp_path):
    made, batch = verl_trainer(monkeypatch, tmp_path)
    queue = sys.modules["transfer_queue"]
    columns = queue.kv_batch_get()
    requests: list[tuple[Any, ...]] = []
    queue.kv_batch_get = lambda *request: requests.append(request) or columns
    made._compute_advantage(batch, {})
    ((keys, partition, names),) = requests
    assert keys is batch.keys and partition == "train"
    assert {"prompts", "responses", "rollout_log_probs", "old_log_probs"} < set(names)


def test_every_row_of_skyrl_counts_without_padding_rows(monkeypatch):
    """Padded on the right too, as before 0.4; columns as wide as the responses."""
    stand_in(monkeypatch, "skyrl.train.utils.callbacks", TrainingCallback=object)
    columns = adapter(monkeypatch, "skyrl").columns
    batch = {
        "sequences": torch.tensor([[0, 5, 11, 12], [7, 8, 13, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
        "loss_mask": torch.tensor([[1, 0], [1, 0]]),
    }
    without, empty = Batch(batch), Batch(batch)
    empty.metadata = {}
    for matrices in map(columns, (without, empty)):
        assert matrices["prompt_mask"].tolist() == [[0, 1, 0, 0], [1, 1, 0, 0]]
        assert matrices["response_ids"].tolist() == [[11, 12], [13, 0]]
        assert matrices["response_mask"].tolist() == [[1, 1], [1, 0]]
        assert matrices["loss_mask"].tolist() == [[1, 0], [1, 0]]
        assert "logp_rollout" not in matrices
