"""TRL's GRPOTrainer on the bundled model and problems, in the shape of `mismatch-cli train`'s
default step.

A racer of `lab/race.py`: run it with a Python that has `rivals/requirements.txt`. It sets
what both sides share (problems, batch, lengths, temperature, two updates per step, AdamW, loss,
grading) and turns off what would only cost TRL time (checkpoints, logs, gradient checkpointing);
everything else is its default.
"""

from __future__ import annotations

from ready import ROOT

# isort: split
import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from lab.turns import Turn
from mismatch_cli.probe.tasks.grading import MathVerify


class Rewards:
    """mismatch-cli's grading, and a count of sampled tokens."""

    __name__ = "boxed"

    def __init__(self, tokenizer: Any) -> None:
        self._grader, self._end = MathVerify(), tokenizer.eos_token_id
        self.samples = self.tokens = 0
        self.reward = 0.0

    def __call__(
        self, completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        rewards = [
            self._grader.grade(text, right, "stop" if ids and ids[-1] == self._end else "length")
            for text, ids, right in zip(texts, completion_ids, answer, strict=True)
        ]
        self.samples, self.tokens = len(texts), sum(map(len, completion_ids))
        self.reward = sum(rewards) / len(rewards)
        return rewards


class TakesTurns(TrainerCallback):
    """A turn is a batch of responses with all its updates; it ends with the last optimiser step
    on them.
    """

    def __init__(self, rewards: Rewards, updates: int) -> None:
        self._rewards, self._updates, self._turn = rewards, updates, Turn()

    def on_train_begin(self, *given: Any, **_: Any) -> None:
        _, _, control = given
        control.should_training_stop = not self._turn.wait()

    def on_step_end(self, *given: Any, **_: Any) -> None:
        _, state, control = given
        if state.global_step % self._updates == 0:
            found = self._rewards
            self._turn.done(samples=found.samples, tokens=found.tokens, reward=found.reward)
            control.should_training_stop = not self._turn.wait()


def sync_as_a_cpu_needs(generation: Any) -> None:
    """What TRL's colocated vLLM lacks to run here: its own sync gives each weight to vLLM's
    `load_weights`, which dies (`'Parameter' object has no attribute 'weight_loader'`) because vLLM
    on a CPU has packed the weights.
    """
    weights = iter(generation.model.state_dict().items())
    generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    generation.llm.reset_prefix_cache()


def settings(options: argparse.Namespace, folder: str) -> GRPOConfig:
    """Two updates on every batch of responses, each accumulated over micro-batches."""
    parts = options.prompts * options.samples // (options.updates * options.micro_batch)
    sampler: dict[str, Any] = {}
    if options.sampler.startswith("vllm"):
        sampler = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.1}
    elif options.sampler == "continuous-batching":
        sampler = {"use_transformers_continuous_batching": True}
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=parts,
        steps_per_generation=parts * options.updates,
        num_generations=options.samples,
        max_completion_length=options.max_tokens,
        temperature=1.0,
        max_steps=100_000,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=0.05,
        loss_type="dr_grpo",
        scale_rewards="none",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        bf16=options.bf16,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        use_cpu=not torch.cuda.is_available(),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **sampler,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(ROOT / "sample_data/model"))
    parser.add_argument("--problems", default=str(ROOT / "sample_data/perfectible.jsonl"))
    parser.add_argument(
        "--sampler", choices=["hf", "vllm", "vllm-mended", "continuous-batching"], default="hf"
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--lora", action="store_true", help="rank 16, alpha 32, all linear modules")
    options = parser.parse_args()
    lines = Path(options.problems).read_text(encoding="utf-8").splitlines()
    rows = [
        {"prompt": [{"role": "user", "content": row["problem"]}], "answer": row["answer"]}
        for row in map(json.loads, lines)
    ]
    rewards = Rewards(AutoTokenizer.from_pretrained(options.model))
    if options.sampler == "vllm-mended":
        VLLMGeneration.sync_weights = sync_as_a_cpu_needs
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=options.model,
            reward_funcs=rewards,
            args=settings(options, folder),
            train_dataset=Dataset.from_list(rows),
            callbacks=[TakesTurns(rewards, options.updates)],
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
            if options.lora
            else None,
        )
        trainer.train()


if __name__ == "__main__":
    main()
