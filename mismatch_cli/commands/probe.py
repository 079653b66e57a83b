"""`mismatch-cli probe`: sample with the rollout engine, score with the trainer, report the gap."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mismatch_cli.commands._options import Debug, Force, Json, Output, Quiet, Worst

_PROMPTS, _SAMPLING, _ENGINE, _TRAINER = "Prompts", "Sampling", "Rollout engine", "Trainer"


def _option(panel: str, *names: str, help: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


def command(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Model folder or hub name; without one, the bundled model.", show_default=False)
    ] = None,
    prompts: Annotated[
        str | None,
        _option(_PROMPTS, "--prompts", help="A .jsonl, .json, .parquet or .csv file, or a data set on the hub."),
    ] = None,
    prompt_field: Annotated[
        str | None, _option(_PROMPTS, "--prompt-field", help="Field that holds the prompt.")
    ] = None,
    answer_field: Annotated[
        str | None, _option(_PROMPTS, "--answer-field", help="Field that holds the answer.")
    ] = None,
    split: Annotated[str, _option(_PROMPTS, "--split", help="Split of a hub data set.")] = "train",
    subset: Annotated[str | None, _option(_PROMPTS, "--subset", help="Configuration of a hub data set.")] = None,
    num_prompts: Annotated[int, _option(_PROMPTS, "--num-prompts", min=1, help="How many prompts to take.")] = 64,
    shuffle: Annotated[bool, _option(_PROMPTS, "--shuffle", help="Take them in an order shuffled by --seed.")] = False,
    prompt_template: Annotated[
        str, _option(_PROMPTS, "--prompt-template", help="How a problem is put: chat, raw, or r1-distill.")
    ] = "chat",
    samples_per_prompt: Annotated[int, _option(_SAMPLING, "--samples-per-prompt", help="Responses per prompt.")] = 8,
    max_tokens: Annotated[int, _option(_SAMPLING, "--max-tokens", help="Longest response.")] = 256,
    temperature: Annotated[float, _option(_SAMPLING, "--temperature", help="Above 0.")] = 1.0,
    top_p: Annotated[float, _option(_SAMPLING, "--top-p", help="Nucleus; 1 = off.")] = 1.0,
    top_k: Annotated[int, _option(_SAMPLING, "--top-k", help="The sampler's top-k; 0 = off.")] = 0,
    min_p: Annotated[float, _option(_SAMPLING, "--min-p", help="0 = off.")] = 0.0,
    seed: Annotated[
        int, _option(_SAMPLING, "--seed", min=0, max=2**32 - 1, help="Seed of sampling and shuffling.")
    ] = 0,
    engine: Annotated[str, _option(_ENGINE, "--engine", help="vllm or hf.")] = "vllm",
    rollout_dtype: Annotated[
        str, _option(_ENGINE, "--rollout-dtype", help="auto, float32, bfloat16 or float16.")
    ] = "auto",
    kv_cache_dtype: Annotated[
        str | None, _option(_ENGINE, "--kv-cache-dtype", help="Such as fp8; a strong source of mismatch.")
    ] = None,
    tensor_parallel: Annotated[
        int | None, _option(_ENGINE, "--tensor-parallel", min=1, help="GPUs to shard over.")
    ] = None,
    eager: Annotated[
        bool | None, _option(_ENGINE, "--eager/--compiled", help="Without or with compilation and CUDA graphs.")
    ] = None,
    prefix_caching: Annotated[
        bool | None, _option(_ENGINE, "--prefix-caching/--no-prefix-caching", help="Share the prompts' KV cache.")
    ] = None,
    max_model_len: Annotated[
        int | None, _option(_ENGINE, "--max-model-len", min=2, help="Context of the engine.")
    ] = None,
    engine_arg: Annotated[
        list[str] | None, _option(_ENGINE, "--engine-arg", help="Any other engine setting, as key=value.")
    ] = None,
    top_logprobs: Annotated[
        int, _option(_ENGINE, "--top-logprobs", help="Ranks of μ recorded per token, for the top-K divergences.")
    ] = 20,
    trainer_model: Annotated[
        str | None,
        _option(_TRAINER, "--trainer-model", help="Score with other weights too: mismatch and staleness apart."),
    ] = None,
    trainer_dtype: Annotated[
        str, _option(_TRAINER, "--trainer-dtype", help="auto, float32, bfloat16 or float16.")
    ] = "auto",
    attn: Annotated[str | None, _option(_TRAINER, "--attn", help="sdpa, eager, flash_attention_2, …")] = None,
    float32_head: Annotated[bool, _option(_TRAINER, "--float32-head", help="The LM head in float32.")] = False,
    device_map: Annotated[str | None, _option(_TRAINER, "--device-map", help="Such as auto, cuda:1, cpu.")] = None,
    token_budget: Annotated[int, _option(_TRAINER, "--token-budget", help="Tokens per scoring micro-batch.")] = 8192,
    noise_responses: Annotated[
        int, _option(_TRAINER, "--noise-responses", help="Responses scored twice for the noise floor; 0 = none.")
    ] = 128,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads; by default 1 for a small model, else all.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --output where it was stopped.")
    ] = False,
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
    """
    from mismatch_cli.commands._present import present
    from mismatch_cli.commands._progress import TerminalProgress
    from mismatch_cli.commands._run import prepare_run
    from mismatch_cli.recording.record import record
    from mismatch_cli.trace.reader import Trace

    config, folder, manifest = prepare_run(context.params, _explicit(context))
    progress = TerminalProgress(quiet)
    record(config, folder, manifest, progress)
    present([Trace.open(folder)], folder, worst=worst, as_json=json, progress=progress)
    progress.say(f"Next: mismatch-cli report {folder} --worst 10")


def _explicit(context: typer.Context) -> set[str]:
    """The parameters that were typed: with --resume the others come from the run."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
