"""Options of every command that scores with the trainer's model."""

from __future__ import annotations

from typing import Annotated

from mismatch_cli.commands._rollout_options import option

TRAINER = "Trainer"

TrainerDtype = Annotated[str, option(TRAINER, "--trainer-dtype", help="auto, float32, bfloat16 or float16.")]
Attn = Annotated[str | None, option(TRAINER, "--attn", help="sdpa, eager, flash_attention_2, …")]
TrainerAdapter = Annotated[
    str | None, option(TRAINER, "--trainer-adapter", help="A LoRA adapter on the trainer alone: folder or hub name.")
]
MergeAdapter = Annotated[
    bool,
    option(
        TRAINER,
        "--merge-adapter/--no-merge-adapter",
        help="Add the trainer's adapter to its weights, which rounds in their dtype, or run it beside them.",
    ),
]
Float32Head = Annotated[bool, option(TRAINER, "--float32-head", help="The LM head in float32.")]
DeviceMap = Annotated[str | None, option(TRAINER, "--device-map", help="Such as auto, cuda:1, cpu.")]
TokenBudget = Annotated[int, option(TRAINER, "--token-budget", help="Tokens per scoring micro-batch.")]
NoiseResponses = Annotated[
    int, option(TRAINER, "--noise-responses", help="Responses scored twice for the noise floor; 0 = none.")
]
