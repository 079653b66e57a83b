"""verl's own classes, recorded: `make test-verl`, which installs them, outside CI.

The trainer is verl's, with its TransferQueue on Ray; the queue already holds what a GPU would
compute. `python -m tests.frameworks.recording.real_verl` renews the batch that test_frameworks.py
replays, and the files that tests/frameworks/importing/test_verl.py reads.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_cli.app.cli import run
from mismatch_cli.trace.reader import Trace
from tests.frameworks.recording.test_frameworks import VERL, verl_metrics
from tests.paths import ROOT

# As users set it, before verl is imported
os.environ["VERL_USE_EXTERNAL_MODULES"] = "mismatch_cli.frameworks.verl.recorder"
SAMPLES, TURN = 12, (2, 5)


@pytest.fixture(scope="module")
def queue():
    import ray
    import transfer_queue

    # It requests more than this machine has
    ray.init(num_cpus=32, include_dashboard=False, log_to_driver=False)
    transfer_queue.init()
    yield transfer_queue
    ray.shutdown()


def samples() -> list[dict[str, Any]]:
    """The items that verl's agent loop puts into its queue, one response each, every third with
    a tool turn.
    """
    rng, rows = np.random.default_rng(0), []
    for number in range(SAMPLES):
        length = int(rng.integers(8, 20))
        mask = torch.ones(length, dtype=torch.int64)
        if number % 3 == 0:
            mask[TURN[0] : TURN[1]] = 0
        rollout = torch.from_numpy(-0.1 - rng.exponential(0.5, length).astype("f"))
        scores = torch.zeros(length)
        scores[-1] = float(number % 2)
        rows.append(
            {
                "uid": f"prompt-{number // 4}",
                "prompts": torch.arange(1, 4 + number // 4),
                "responses": torch.from_numpy(rng.integers(0, 1000, length)),
                "response_mask": mask,
                "loss_mask": mask,
                "rollout_log_probs": rollout,
                "rm_scores": scores,
                "old_log_probs": rollout
                + torch.from_numpy(rng.normal(0, 0.02, length).astype("f")),
            }
        )
    return rows


def trainer(folder: Path, **correction: Any) -> Any:
    """verl's synchronous trainer, recorded, without its workers on GPUs."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import get_trainer_cls

    made = object.__new__(get_trainer_cls("sync_recorded"))
    algorithm = {"adv_estimator": "grpo", "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False}
    model, rollout = (
        {"path": "some-model"},
        {"name": "vllm", "dtype": "bfloat16", "temperature": 1.0, "n": 4},
    )
    made.config = OmegaConf.create(
        {
            "trainer": {"default_local_dir": str(folder)},
            "algorithm": algorithm | ({"rollout_correction": correction} if correction else {}),
            "actor_rollout_ref": {"model": model, "rollout": rollout},
        }
    )
    made.tokenizer, made.global_steps = None, 7
    return made


def recorded(
    queue: Any, folder: Path, versions: tuple[int, int] = (5, 6), **correction: Any
) -> Any:
    """Let verl compute a batch's advantages, as in its step, and return its batch.

    `versions` of the weights that sampled, the least and the largest; the trainer's is 6.
    """
    from transfer_queue import KVBatchMeta
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    made, rows = trainer(folder, **correction), samples()
    keys = [f"{folder.name}-{number // 4}_{number % 4}_0" for number in range(SAMPLES)]
    least, largest = versions
    tag = {"is_padding": False, "min_global_steps": least, "max_global_steps": largest}
    tags = [tag | {"is_padding": number == 5} for number in range(SAMPLES)]
    queue.kv_batch_put(
        keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags
    )
    metrics: dict[str, Any] = {}
    made._compute_advantage(KVBatchMeta(keys=keys, tags=tags, partition_id="train"), metrics)
    made._recorder.close()
    assert made._recorder.counts["written"] == SAMPLES - 1
    names = [
        "prompts",
        "responses",
        "loss_mask",
        "rollout_log_probs",
        "old_log_probs",
        "advantages",
        "rm_scores",
    ]
    return queue.kv_batch_get(keys, "train", names), metrics


def test_every_mode_has_a_recorded_twin():
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    modes = {name for name in TRAINER_REGISTRY if not name.endswith("_recorded")}
    assert {"sync", "colocate_async", "separate_async"} <= modes
    assert set(TRAINER_REGISTRY) - modes == {f"{name}_recorded" for name in modes}


def test_verls_own_metrics_are_those_of_the_trace(queue, tmp_path):
    from verl.protocol import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
    from verl.utils.debug.metrics import calculate_debug_metrics

    data, _ = recorded(queue, tmp_path / "run", versions=(6, 6))
    keep = torch.arange(SAMPLES) != 5
    batch = {name: value[keep] for name, value in data.to_padded_tensor().items()}
    mask = batch["loss_mask"]
    logged = calculate_debug_metrics(DataProto.from_dict(tensors=batch | {"response_mask": mask}))
    correction = compute_offpolicy_metrics(batch["old_log_probs"], batch["rollout_log_probs"], mask)
    logged |= {f"rollout_corr/{name}": value for name, value in correction.items()}
    metrics = verl_metrics(tmp_path / "run/recorded")
    shared = metrics.keys() & logged.keys()
    assert len(shared) >= 12
    for name in shared:
        assert metrics[name] == pytest.approx(float(logged[name]), abs=1e-6), name


def test_bypassed_log_probs_are_not_the_trainers(queue, tmp_path, capsys):
    recorded(queue, tmp_path / "bypass", bypass_mode=True, rollout_is=None, rollout_rs=None)
    assert run(["report", str(tmp_path / "bypass/recorded")]) == 1
    assert "rescore" in capsys.readouterr().err


def saved(folder: Path) -> list[Path]:
    """The same samples padded into a DataProto, saved in both of verl's ways."""
    from torch.nn.utils.rnn import pad_sequence
    from verl.protocol import DataProto

    columns: dict[str, list[Any]] = {}
    for row in samples():
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    uids, prompts = columns.pop("uid"), columns.pop("prompts")
    tensors = {name: pad_sequence(rows, batch_first=True) for name, rows in columns.items()}
    tensors["token_level_scores"] = tensors.pop("rm_scores")
    tensors["prompts"] = pad_sequence(prompts, batch_first=True, padding_side="left")
    before = pad_sequence(
        list(map(torch.ones_like, prompts)), batch_first=True, padding_side="left"
    )
    after = pad_sequence(list(map(torch.ones_like, columns["responses"])), batch_first=True)
    tensors["attention_mask"] = torch.cat([before, after], 1).long()
    answers = [{"ground_truth": "1"}] * SAMPLES
    batch = DataProto.from_dict(
        tensors=tensors,
        non_tensors={
            "uid": np.array(uids, dtype=object),
            "reward_model": np.array(answers, dtype=object),
        },
        meta_info={"global_steps": 7, "temperature": 1.0},
    )
    paths = [folder / "verl_batch.dp", folder / "verl_batch_numpy.dp"]
    batch.save_to_disk(paths[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", "numpy")
        batch.save_to_disk(paths[1])
    return paths


def test_a_dataproto_of_this_verl_is_read(tmp_path):
    for path in saved(tmp_path):
        assert run(["import", str(path), "--output", str(tmp_path / path.stem)]) == 0
        assert Trace.open(tmp_path / path.stem).num_responses == SAMPLES


def main() -> None:
    import tempfile

    import ray
    import transfer_queue

    ray.init(num_cpus=32, include_dashboard=False, log_to_driver=False)
    transfer_queue.init()
    with tempfile.TemporaryDirectory() as folder:
        data, _ = recorded(transfer_queue, Path(folder))
    arrays = {}
    for name in data.keys():  # noqa: SIM118 - a TensorDict
        for number, value in enumerate(data[name].unbind()):
            arrays[f"{name}/{number}"] = value.numpy()
    np.savez_compressed(VERL, **arrays)
    saved(ROOT / "tests" / "frameworks" / "importing")
    ray.shutdown()


if __name__ == "__main__":
    main()
