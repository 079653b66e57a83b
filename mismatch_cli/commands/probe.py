"""`mismatch-cli probe`: sample with the rollout engine, score with the trainer, report the gap."""

from __future__ import annotations

from typing import Annotated

import typer

from mismatch_cli.commands import _rollout_options as rollout
from mismatch_cli.commands import _trainer_options as trainer
from mismatch_cli.commands._options import Debug, Force, Json, Output, Quiet, TrustRemoteCode, Worst
from mismatch_cli.suggest import suggest


def command(
    context: typer.Context,
    model: rollout.Model = None,
    prompts: rollout.Prompts = None,
    prompt_field: rollout.PromptField = None,
    answer_field: rollout.AnswerField = None,
    split: rollout.Split = "train",
    subset: rollout.Subset = None,
    num_prompts: Annotated[
        int, rollout.option(rollout.PROMPTS, "--num-prompts", min=1, help="How many prompts to take.")
    ] = 64,
    shuffle: rollout.Shuffle = False,
    prompt_template: rollout.PromptTemplate = "chat",
    reward: rollout.Reward = None,
    samples_per_prompt: Annotated[
        int, rollout.option(rollout.SAMPLING, "--samples-per-prompt", help="Responses per prompt.")
    ] = 8,
    max_tokens: rollout.MaxTokens = 256,
    temperature: rollout.Temperature = 1.0,
    top_p: rollout.TopP = 1.0,
    top_k: rollout.TopK = 0,
    min_p: rollout.MinP = 0.0,
    seed: rollout.Seed = 0,
    engine: rollout.EngineName = "vllm",
    engine_url: rollout.EngineUrl = None,
    served_model: rollout.ServedModel = None,
    rollout_dtype: rollout.RolloutDtype = "auto",
    kv_cache_dtype: rollout.KvCacheDtype = None,
    tensor_parallel: rollout.TensorParallel = None,
    eager: rollout.Eager = None,
    prefix_caching: rollout.PrefixCaching = None,
    max_model_len: rollout.MaxModelLen = None,
    engine_arg: rollout.EngineArg = None,
    top_logprobs: Annotated[
        int,
        rollout.option(
            rollout.ENGINE, "--top-logprobs", help="Ranks of μ recorded per token, for the top-K divergences."
        ),
    ] = 20,
    full_divergence: Annotated[
        int,
        rollout.option(
            rollout.ENGINE,
            "--full-divergence",
            min=0,
            help="Also the exact TV and KL over the whole vocabulary, on the first N responses. For one at a time vllm "
            "takes 132 bytes × vocabulary × --max-tokens of memory, hf only one token's.",
        ),
    ] = 0,
    full_divergence_memory: Annotated[
        float | None,
        rollout.option(
            rollout.ENGINE, "--full-divergence-memory", min=0, help="GiB for it; by default half of what is free."
        ),
    ] = None,
    trainer_model: Annotated[
        str | None,
        rollout.option(
            trainer.TRAINER, "--trainer-model", help="Score with other weights too: mismatch and staleness apart."
        ),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option("--adapter", help="A LoRA adapter on both sides: folder or hub name.")
    ] = None,
    rollout_adapter: Annotated[
        str | None, rollout.option(rollout.ENGINE, "--rollout-adapter", help="A LoRA adapter on the engine alone.")
    ] = None,
    trainer_adapter: trainer.TrainerAdapter = None,
    merge_adapter: trainer.MergeAdapter = False,
    trainer_dtype: trainer.TrainerDtype = "auto",
    attn: trainer.Attn = None,
    float32_head: trainer.Float32Head = False,
    device_map: trainer.DeviceMap = None,
    token_budget: trainer.TokenBudget = 8192,
    noise_responses: trainer.NoiseResponses = 128,
    threads: rollout.Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    resume: rollout.Resume = False,
    output: Output = None,
    worst: Worst = 0,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Sample with the rollout engine, recompute with the trainer, and report how far they disagree.

    Without arguments it runs on the bundled model.

    Examples:

      mismatch-cli probe

      mismatch-cli probe Qwen/Qwen2.5-0.5B-Instruct --prompts problems.jsonl --num-prompts 128

      mismatch-cli probe ./checkpoint --trainer-dtype float32 --kv-cache-dtype fp8 --json

      mismatch-cli probe Qwen/Qwen2.5-0.5B-Instruct --adapter ./lora --merge-adapter
    """
    from mismatch_cli.commands._progress import TerminalProgress
    from mismatch_cli.commands._run import prepared_run, probe_config
    from mismatch_cli.commands._show import study_mismatch
    from mismatch_cli.recording.record import record
    from mismatch_cli.trace.reader import Trace

    progress = TerminalProgress(quiet)
    with prepared_run(context, probe_config) as (config, folder, manifest):
        record(config, folder, manifest, progress)
        study_mismatch([Trace.open(folder)], folder, worst=worst, as_json=json, progress=progress)
    progress.say(f"Next: {suggest('report', folder, '--worst', '10')}")
