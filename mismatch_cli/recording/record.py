"""Recording a probe, from top to bottom: encode, sample, free the engine, score."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mismatch_cli.compat import prepare_imports
from mismatch_cli.engines import Engine, EngineSettings, create_engine
from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.models import check_model_folder, load_tokenizer
from mismatch_cli.recording.config import ProbeConfig
from mismatch_cli.recording.folder import clear_run, locked
from mismatch_cli.recording.sample import ShardPlan, plan_shards, sample_shard
from mismatch_cli.tasks.grading import Grader
from mismatch_cli.tasks.prompts import EncodedPrompts, encode_prompts, load_problems
from mismatch_cli.torch_settings import set_threads
from mismatch_cli.trace.manifest import library_versions, write_manifest
from mismatch_cli.trace.reader import open_shard
from mismatch_cli.trace.vocabulary import write_vocabulary
from mismatch_cli.trace.writer import shard_path

if TYPE_CHECKING:
    from mismatch_cli.recording.score import Pass
    from mismatch_cli.scoring.trainer import Trainer


class Progress(Protocol):
    """What a recording tells whoever watches it."""

    def say(self, message: str) -> None:
        """One line of talk."""
        ...

    def start(self, phase: str, done: int, total: int) -> Callable[[int], None]:
        """Begin a phase that counts responses; the answer is called with how many more are finished."""
        ...

    def stop(self) -> None:
        """End the phase that was begun last."""
        ...


def record(config: ProbeConfig, run_folder: Path, manifest: dict[str, Any], progress: Progress) -> None:
    """Record the trace of a probe into `run_folder/trace`; a manifest with a shard count is a run to go on with.

    What is done is read from the files, not from notes: a shard that is missing is sampled again, one without the
    trainer's columns is scored.
    """
    prepare_imports()
    folder = run_folder / "trace"
    threads = set_threads(config.threads, config.model)
    manifest = manifest | {"config": config.to_json(), "top_logprobs": config.top_logprobs, "threads": threads}
    manifest["libraries"] = library_versions()
    with locked(run_folder):
        if "shards" not in manifest or not all(path.is_file() for path in _shards(folder, manifest)):
            _sample(config, run_folder, manifest, progress)
        _score(config, folder, manifest, progress)


def _shards(folder: Path, manifest: dict[str, Any]) -> list[Path]:
    return [shard_path(folder, index) for index in range(manifest["shards"])]


def _sample(config: ProbeConfig, run_folder: Path, manifest: dict[str, Any], progress: Progress) -> None:
    tokenizer = load_tokenizer(config.model)
    _check_top_logprobs(config.top_logprobs, len(tokenizer))
    problems = load_problems(config.prompts)
    if config.trainer.model != config.model:
        check_model_folder(config.trainer.model)  # before an hour of sampling, not after it
    progress.say(f"Loading {config.model} into the rollout engine ({config.engine})")
    engine = create_engine(config.engine, _engine_settings(config, run_folder / "log" / f"{config.engine}.log"))
    try:
        encoded = encode_prompts(
            problems, tokenizer, template=config.prompt_template, max_model_len=engine.max_model_len
        )
        plans = plan_shards(encoded.problems, encoded.prompt_ids, config.prompts_per_shard)
        prompts = _describe_prompts(config, encoded, manifest)
        if "shards" not in manifest:
            clear_run(run_folder)
        manifest |= {"rollout": engine.describe(), "prompts": prompts, "shards": len(plans)}
        write_vocabulary(run_folder / "trace", tokenizer)
        write_manifest(run_folder / "trace", manifest)
        _sample_shards(config, run_folder / "trace", engine, plans, tokenizer, progress)
    finally:
        engine.close()


def _check_top_logprobs(asked: int, vocabulary: int) -> None:
    if asked > vocabulary:
        raise UsageError(
            f"--top-logprobs {asked} is more than the {vocabulary} tokens there are. Use --top-logprobs 20."
        )


def _engine_settings(config: ProbeConfig, log_file: Path) -> EngineSettings:
    return EngineSettings(
        model=config.model,
        sampling=config.sampling,
        top_logprobs=config.top_logprobs,
        dtype=config.rollout_dtype,
        seed=config.seed,
        log_file=log_file,
        extra=config.engine_args,
    )


def _describe_prompts(config: ProbeConfig, encoded: EncodedPrompts, manifest: dict[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha256(repr([encoded.problems, encoded.prompt_ids]).encode()).hexdigest()[:16]
    before = manifest.get("prompts", {}).get("digest", digest)
    if before != digest:
        raise MismatchError(
            f"{config.prompts.location} has changed since this run began, so it cannot be resumed. "
            "Start anew in another --output, or with --force."
        )
    return {
        "source": config.prompts.location,
        "count": len(encoded.problems),
        "template": encoded.template,
        "skipped": encoded.skipped,
        "digest": digest,
    }


def _sample_shards(
    config: ProbeConfig, folder: Path, engine: Engine, plans: list[ShardPlan], tokenizer: Any, progress: Progress
) -> None:
    todo = [plan for plan in plans if not plan.path(folder).is_file()]
    total, remaining = (sum(len(plan.problems) for plan in some) * config.samples_per_prompt for some in (plans, todo))
    on_finished = progress.start("Sampling", total - remaining, total)
    try:
        with Grader() as grader:
            for plan in todo:
                sample_shard(
                    plan,
                    engine,
                    grader,
                    tokenizer.decode,
                    folder=folder,
                    samples_per_prompt=config.samples_per_prompt,
                    in_thought=config.prompt_template == "r1-distill",
                    seed=config.seed,
                    on_finished=on_finished,
                )
    finally:
        progress.stop()


def _score(config: ProbeConfig, folder: Path, manifest: dict[str, Any], progress: Progress) -> None:
    from mismatch_cli.recording.score import passes

    manifest["equal_weights"] = config.trainer.model == config.model
    for this in passes(manifest["equal_weights"]):
        recomputed = this.column == "logp_recomputed"
        if not all(this.done(path) for path in _shards(folder, manifest)):
            trainer = _load_trainer(config, config.model if recomputed else config.trainer.model, progress)
            manifest["recomputed" if recomputed else "trainer"] = trainer.describe()
            write_manifest(folder, manifest)  # before the first shard is scored: a killed run says with what
            _score_shards(config, trainer, this, _shards(folder, manifest), progress)


def _load_trainer(config: ProbeConfig, model: str, progress: Progress) -> Trainer:
    from mismatch_cli.scoring.trainer import Trainer

    progress.say(f"Loading {model} into the trainer ({config.trainer.dtype})")
    return Trainer.load(
        model,
        dtype=config.trainer.dtype,
        attn_implementation=config.trainer.attn_implementation,
        float32_head=config.trainer.float32_head,
        device_map=config.trainer.device_map,
        sampling=config.sampling,
    )


def _score_shards(config: ProbeConfig, trainer: Trainer, this: Pass, shards: list[Path], progress: Progress) -> None:
    from mismatch_cli.recording.score import evenly_spaced, score_shard

    rows = [open_shard(path).metadata.num_rows for path in shards]
    repeated = evenly_spaced(config.trainer.noise_responses, sum(rows))
    done = [this.done(path) for path in shards]
    on_scored = progress.start("Scoring", sum(r for r, d in zip(rows, done, strict=True) if d), sum(rows))
    try:
        for index, path in enumerate(shards):
            if not done[index]:
                first = sum(rows[:index])
                score_shard(
                    path,
                    trainer,
                    this,
                    token_budget=config.trainer.token_budget,
                    repeat=[repeated(first + row) for row in range(rows[index])],
                    on_scored=on_scored,
                )
    finally:
        progress.stop()
