"""The experiments of the paper as presets: each names its source, resolves, and runs with a tiny
model of its kind.
"""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest
import torch

from mismatch_cli.base.places import bundled
from mismatch_cli.probe.tasks.rewards import is_own
from mismatch_cli.train.loop import train
from mismatch_cli.train.run import RunInProgress
from mismatch_cli.train.task import evaluation_sets
from mismatch_cli.train.train_config import TrainConfig, load_config, presets
from tests.frameworks.importing.layouts import write_lines
from tests.paths import PACKAGE
from tests.tiny_models import saved_model
from tests.train.small_runs import numbers

# For the bundled model
OF_THE_PROJECT = {"collapse", "miniature", "rare-solutions", "rare-tokens"}
OF_THE_PAPER = sorted(set(presets()) - OF_THE_PROJECT)
FOLDER = PACKAGE / "train" / "presets"
# Table 1 of the paper (appendix E), column by column.
TABLE_1 = {
    "moe-base": ("Qwen/Qwen3-30B-A3B-Base", 256, 32, 16, 16384, 1e-6, 0.2, 5),
    "moe-base-replay": ("Qwen/Qwen3-30B-A3B-Base", 256, 32, 16, 16384, 1e-6, 0.2, 5),
    "moe-thinking": ("Qwen/Qwen3-30B-A3B", 256, 32, 16, 16384, 1e-6, 0.2, 5),
    "dense-base": ("Qwen/Qwen3-8B-Base", 128, 32, 8, 8000, 1e-6, 0.2, 10),
    "moe-base-lora": ("Qwen/Qwen3-30B-A3B-Base", 128, 16, 8, 8000, 1e-5, 0.15, 10),
}
# Settings that a small machine cannot afford, or that need the hub.
SMALL: dict[str, Any] = {
    "engine": "hf", "steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2, "minibatches": 2,
    "max_tokens": 4,
    "max_context_tokens": 400, "max_prompt_tokens": 200, "eval_samples": 1, "eval_every": 0,
    "trace_every": 0,
    "tensor_parallel": 1, "threads": 1, "trainer_dtype": "float32", "rollout_dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize("preset", TABLE_1)
def test_the_columns_of_table_1(preset):
    config = load_config(preset, {})
    model, batch, mini, samples, response, rate, threshold, every = TABLE_1[preset]
    assert (config.engine.model, config.prompts_per_step, config.sampler.samples_per_prompt) == (
        model,
        batch,
        samples,
    )
    assert config.prompts_per_step / config.minibatches == mini
    assert (config.problems.max_prompt_tokens, config.sampler.max_tokens) == (1024, response)
    assert (
        config.algorithm == f"dppo-binary-tv:max_tv={threshold:g},cap=5"
        and config.optimiser.learning_rate == rate
    )
    assert (
        config.evaluation.samples,
        config.evaluation.every,
        config.evaluation.temperature,
        config.evaluation.top_p,
    ) == (
        32,
        every,
        0.7,
        0.95,
    )
    assert evaluation_sets(config) == {
        "aime_2024": ("HuggingFaceH4/aime_2024", "train"),
        "aime25": ("math-ai/aime25", "test"),
    }
    assert config.scorer.replay_routes == (preset == "moe-base-replay")
    assert (config.lora.wanted, config.lora.rank, config.lora.alpha) == (
        preset == "moe-base-lora",
        32,
        64,
    )


@pytest.mark.parametrize("preset", ["rare-solutions", "rare-tokens"])
def test_a_preset_names_its_reward_and_no_file(preset, tmp_path):
    config = load_config(preset, {})
    assert config.minibatches * config.epochs == 16 and not is_own(config.task.reward)
    (tmp_path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    assert load_config(str(tmp_path / "config.toml"), {}) == config


def test_each_names_its_source_first():
    for preset in OF_THE_PAPER:
        first = (FOLDER / f"{preset}.toml").read_text(encoding="utf-8").splitlines()[0]
        assert (
            first.startswith("# ")
            and "arXiv 2602.04879" in first
            and re.search("[Ff]igure|Table|App\\.", first)
        ), preset


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    """Problems in the format of DAPO-Math-17k, each twice, and two sets that do not ask for an
    answer format.
    """
    folder = tmp_path_factory.mktemp("data")

    words = (
        "The last line of your response should be of the form Answer: $Answer (without quotes).\n\n"
    )
    dapo = [
        {
            "prompt": [{"role": "user", "content": f"{words}What is {i % 4} plus 1?"}],
            "reward_model": {"ground_truth": str(i % 4 + 1), "style": "rule"},
            "extra_info": {"index": str(i)},
        }
        for i in range(8)
    ]
    aime = [{"problem": f"What is {i} plus 2?", "answer": str(i + 2)} for i in range(2)]
    files = {"dapo": dapo, "aime_2024": aime, "aime25": aime[:1]}
    dataset, *sets = [
        str(write_lines(folder / f"{name}.jsonl", rows)) for name, rows in files.items()
    ]
    return {"dataset": dataset, "eval_dataset": ",".join(sets)}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[bool, str]:
    """A dense model, and a mixture of experts with the bundled tokenizer."""
    moe = saved_model(
        tmp_path_factory.mktemp("models"),
        "Qwen3Moe",
        vocab_size=2048,
        num_hidden_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    for file in bundled("model").iterdir():
        if file.name.startswith(("token", "chat", "special", "vocab", "merges", "generation")):
            shutil.copy(file, moe)
    return {False: str(bundled("model")), True: moe}


def small(preset: str, data: dict[str, str], models: dict[bool, str]) -> TrainConfig:
    of_experts = preset.startswith("moe")
    several = "," in load_config(preset, {}).evaluation.dataset
    sets = (
        {"eval_dataset": data["eval_dataset"]}
        if several
        else {"eval_dataset": data["eval_dataset"].split(",")[0]}
    )
    return load_config(
        preset, SMALL | {"model": models[of_experts], "dataset": data["dataset"]} | sets
    )


@pytest.mark.slow
def test_every_preset_runs(data, models, tmp_path, monkeypatch):
    """Two steps each, without saving the model."""
    torch.set_num_threads(1)
    monkeypatch.setattr(RunInProgress, "save_model", lambda _: None)
    for preset in OF_THE_PAPER:
        config, said, records = small(preset, data, models), list[str](), list[dict[str, Any]]()
        train(config, tmp_path / preset, records.append, say=said.append)
        assert [record["step"] for record in records] == [1, 2], preset
        assert numbers(tmp_path / preset)[-1]["eval"].keys() == evaluation_sets(config).keys()
        # Said once
        assert (
            records[0]["truncated"] == 1 and sum("states an answer" in words for words in said) == 1
        )
        warnings = [words for words in said if "states an answer" in words]
        assert "4 of them were cut at 4 tokens: raise --max-tokens" in warnings[0]
