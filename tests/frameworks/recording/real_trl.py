"""TRL's own trainer with its colocated vLLM, recorded as it trains: `make test-trl`, outside CI.

`python -m tests.frameworks.recording.real_trl` renews the batches that tests/frameworks/recording/test_trl.py replays.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.models.torch_settings import prepare_imports
from tests.frameworks.recording.test_trl import (
    BATCHES,
    LOGGED,
    TUTORIAL,
    run_the_lines_of_the_page,
)
from tests.paths import ROOT
from tests.studies.compared import rows_of

MODEL = ROOT / "sample_data/model"
STEPS = 4


@dataclass
class Trained:
    folder: Path  # what was recorded
    logged: list[dict[str, float]]  # by TRL, one per step
    batches: list[dict[str, Any]]


def train(folder: Path) -> Trained:
    """Four steps of GRPO on the bundled model, recorded."""
    prepare_imports()
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_generation import VLLMGeneration

    VLLMGeneration.sync_weights = sync_as_a_cpu_needs
    prompts = []
    for line in (ROOT / "sample_data/perfectible.jsonl").read_text(encoding="utf-8").splitlines():
        prompts.append({"prompt": [{"role": "user", "content": json.loads(line)["problem"]}]})
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=48,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.1,
        reward_weights=[1.0, 0.5],
    )
    trainer = GRPOTrainer(
        model=str(MODEL),
        reward_funcs=[even_beginning, even_second],
        args=settings,
        train_dataset=Dataset.from_list(prompts),
    )
    sample, batches = trainer._generate_and_score_completions, []

    def generate(inputs: Any) -> Any:
        batches.append(sample(inputs))
        return batches[-1]

    trainer._generate_and_score_completions = generate
    with contextlib.chdir(folder):
        run_the_lines_of_the_page(*TUTORIAL, trainer=trainer)
    logged = [row for row in trainer.state.log_history if "reward" in row]
    return Trained(folder / "run", logged, batches)


def sync_as_a_cpu_needs(generation: Any) -> None:
    """TRL's own sync crashes on a CPU: `load_weights` gets weights that vLLM has packed there, and
    which have no `weight_loader`.
    """
    weights = iter(generation.model.state_dict().items())
    generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    generation.llm.reset_prefix_cache()


def even_beginning(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def even_second(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """None for some, like a reward that does not apply."""
    return [float(ids[1] % 2 == 0) if ids[0] % 3 else None for ids in completion_ids]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("trl"))


def test_everything_that_trl_samples_is_recorded(trained):
    rows = pd.DataFrame(rows_of(trained.folder))
    assert len(rows) == 8 * STEPS
    for step, (logged, batch) in enumerate(zip(trained.logged, trained.batches, strict=True)):
        of_step = rows[rows["step"] == step]
        assert of_step["reward"].mean() == pytest.approx(logged["reward"])
        lengths = of_step["response_ids"].map(len)
        assert lengths.mean() == pytest.approx(logged["completions/mean_length"])
        is_clipped = of_step["finish_reason"] == "length"
        assert is_clipped.mean() == pytest.approx(logged["completions/clipped_ratio"])
        advantages = of_step["advantage"].str[0].tolist()
        assert advantages == pytest.approx(batch["advantages"].tolist())


def test_its_dialect_reports_what_trl_logs(trained, tmp_path, capsys):
    for step, logged in enumerate(trained.logged):
        folder = tmp_path / str(step)
        folder.mkdir()
        manifest = json.loads((trained.folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | {"command": "import"}))
        for shard in trained.folder.glob("shard-*"):
            table = pq.read_table(shard)
            pq.write_table(table.filter(pc.equal(table["step"], step)), folder / shard.name)
        assert run(["report", str(folder), "--as", "trl", "--json"]) == 0
        metrics = json.loads(capsys.readouterr().out)["frameworks"]["trl"]["metrics"]
        of_framework = {line["name"]: line["value"] for line in metrics if line["name"] in LOGGED}
        assert {*of_framework} == {*LOGGED}
        for name, value in of_framework.items():
            assert value == pytest.approx(logged[name], abs=1e-6), name


@pytest.mark.parametrize(
    "command", ["report", "clipstats", "diagnose", "gate", "compare", "rescore"]
)
def test_every_command_reads_it(trained, command, tmp_path, capsys):
    trace, output = str(trained.folder), ["--output", str(tmp_path / "out")]
    flags = {
        "rescore": ["--trainer-model", str(MODEL), "--weights", "0", *output],
        "gate": ["--limits", "slime"],
        "compare": [trace, *output],
    }
    assert run([command, trace, *flags.get(command, output), "--full"]) == 0
    said = capsys.readouterr().out
    assert "bfloat16" in said and "float32" in said


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        training = train(Path(folder))
    arrays = {}
    for step, batch in enumerate(training.batches):
        for name, value in batch.items():
            arrays[f"{step}/{name}"] = value.numpy()
    logged = pd.DataFrame(training.logged)[list(LOGGED)].to_numpy()
    np.savez_compressed(BATCHES, logged=logged, **arrays)


if __name__ == "__main__":
    main()
