"""`mismatch-cli curate`: the problems that a model solves sometimes, for the sanity test with it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mismatch_cli.bundled import bundled
from mismatch_cli.commands import _rollout_options as rollout
from mismatch_cli.commands._options import Debug, Force, Json, Output, Quiet, TrustRemoteCode
from mismatch_cli.suggest import suggest

if TYPE_CHECKING:
    from mismatch_cli.recording.config import CurateConfig

_CHOICE = "Choice"


def command(
    context: typer.Context,
    model: rollout.Model = None,
    prompts: rollout.Prompts = None,
    prompt_field: rollout.PromptField = None,
    answer_field: rollout.AnswerField = None,
    split: rollout.Split = "train",
    subset: rollout.Subset = None,
    num_prompts: Annotated[
        int | None, rollout.option(rollout.PROMPTS, "--num-prompts", min=1, help="How many to look at; by default all.")
    ] = None,
    shuffle: rollout.Shuffle = False,
    prompt_template: rollout.PromptTemplate = "chat",
    reward: rollout.Reward = None,
    keep: Annotated[
        tuple[float, float], rollout.option(_CHOICE, "--keep", help="Keep problems from this accuracy to that.")
    ] = (0.2, 0.8),
    samples_per_prompt: Annotated[
        int, rollout.option(_CHOICE, "--samples-per-prompt", help="Responses that decide about a problem.")
    ] = 40,
    held_out_samples: Annotated[
        int, rollout.option(_CHOICE, "--held-out-samples", help="Other responses that measure the kept ones again.")
    ] = 40,
    confirm: Annotated[
        bool, rollout.option(_CHOICE, "--confirm", help="Leave out what the held-out samples put outside the range.")
    ] = False,
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
    threads: rollout.Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    resume: rollout.Resume = False,
    output: Output = None,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Find the problems that a model solves sometimes: on them a sound algorithm must reach full accuracy.

    Every problem is sampled, those within --keep are kept, and measured again with samples that did not choose them:
    accuracies near an end of the range are partly luck, and regress to the mean.

    Examples:

      mismatch-cli curate --num-prompts 64

      mismatch-cli curate Qwen/Qwen2.5-Math-1.5B --prompts math.jsonl --max-tokens 3000

      mismatch-cli train --dataset curate-model/perfectible.jsonl
    """
    from mismatch_cli.commands._progress import TerminalProgress
    from mismatch_cli.commands._run import curate_config, prepared_run
    from mismatch_cli.commands._show import show
    from mismatch_cli.places import shown
    from mismatch_cli.recording.curate import PROBLEMS_FILE, curate
    from mismatch_cli.studies.curation import CurationAnalysis

    progress = TerminalProgress(quiet)
    with prepared_run(context, curate_config) as (config, folder, manifest):
        curation = curate(config, folder, manifest, progress, confirm=confirm)
        study = CurationAnalysis(curation, shown(config.to_json()), confirm, tuple(shown(sys.argv[1:])))
        show(study, folder, as_json=json, progress=progress)
    chosen = folder / PROBLEMS_FILE
    progress.say(f"Wrote {chosen}\nNext: {suggest(*_training(config, chosen))}")


def _training(config: CurateConfig, problems: Path) -> list[str | Path]:
    """The command that trains on them as they were measured: the default preset is made for the bundled model."""
    command: list[str | Path] = ["train", "--dataset", problems, "--max-tokens", str(config.sampling.max_tokens)]
    if Path(config.model).resolve() != bundled("model").resolve():
        command += ["--model", config.model, "--learning-rate", "1e-6"]
    if config.sampling.temperature != 1:
        command += ["--temperature", str(config.sampling.temperature)]
    if config.prompt_template != "chat":
        command += ["--prompt-template", config.prompt_template]
    return command + (["--reward", config.reward] if config.reward else [])
