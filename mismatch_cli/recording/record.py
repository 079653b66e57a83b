"""Recording a probe, from top to bottom: encode, sample, free the engine, score."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from mismatch_cli.compat import prepare_imports
from mismatch_cli.engines import Engine, EngineSettings, create_engine
from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.models import load_tokenizer
from mismatch_cli.recording.config import ProbeConfig
from mismatch_cli.recording.sample import plan_shards, sample_shard
from mismatch_cli.tasks.grading import Grader
from mismatch_cli.tasks.prompts import EncodedPrompts, encode_prompts, load_problems
from mismatch_cli.torch_settings import set_threads
from mismatch_cli.trace.manifest import library_versions, write_manifest
from mismatch_cli.trace.reader import open_shard
from mismatch_cli.trace.vocabulary import write_vocabulary
from mismatch_cli.trace.writer import shard_path


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


def record(config: ProbeConfig, run_folder: Path, previous: dict[str, Any] | None, progress: Progress) -> None:
    """Record the trace of a probe into `run_folder/trace`; `previous` is the manifest of the run to go on with."""
    prepare_imports()
    folder = run_folder / "trace"
    manifest = dict(previous or {}) | {
        "config": config.to_json(),
        "top_logprobs": config.top_logprobs,
        "libraries": library_versions(),
        "threads": set_threads(config.threads, config.model),
    }
    if not manifest.get("sampled"):
        _sample(config, folder, run_folder / "log" / f"{config.engine}.log", manifest, progress)
    if not manifest.get("scored"):
        _score(config, folder, manifest, progress)


def _sample(config: ProbeConfig, folder: Path, log_file: Path, manifest: dict[str, Any], progress: Progress) -> None:
    tokenizer = load_tokenizer(config.model)
    _check_top_logprobs(config.top_logprobs, len(tokenizer))
    problems = load_problems(config.prompts)
    progress.say(f"Loading {config.model} into the rollout engine ({config.engine})")
    engine = create_engine(config.engine, _engine_settings(config, log_file))
    try:
        encoded = encode_prompts(problems, tokenizer, raw=config.raw, max_model_len=engine.max_model_len)
        manifest |= {"rollout": engine.describe(), "prompts": _describe_prompts(config, encoded, manifest)}
        write_vocabulary(folder, tokenizer)
        write_manifest(folder, manifest)
        _sample_shards(config, folder, engine, encoded, tokenizer, progress)
    finally:
        engine.close()
    manifest["sampled"] = True
    write_manifest(folder, manifest)


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
        "chat_template": encoded.chat_template,
        "skipped": encoded.skipped,
        "digest": digest,
    }


def _sample_shards(
    config: ProbeConfig, folder: Path, engine: Engine, encoded: EncodedPrompts, tokenizer: Any, progress: Progress
) -> None:
    plans = plan_shards(encoded.problems, encoded.prompt_ids, config.prompts_per_shard)
    todo = [plan for plan in plans if not plan.path(folder).is_file()]
    total = len(encoded.problems) * config.samples_per_prompt
    remaining = sum(len(plan.problems) for plan in todo) * config.samples_per_prompt
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
                    seed=config.seed,
                    on_finished=on_finished,
                )
    finally:
        progress.stop()


def _score(config: ProbeConfig, folder: Path, manifest: dict[str, Any], progress: Progress) -> None:
    from mismatch_cli.recording.score import passes

    shards = [shard_path(folder, i) for i in range(len(list(folder.glob("shard-*.parquet"))))]
    equal_weights = config.trainer.model == config.model
    for this in passes(equal_weights):
        model = config.model if this.column == "logp_recomputed" else config.trainer.model
        described = _score_pass(config, model, this, shards, progress)
        if described:
            manifest["trainer" if this.column == "logp_trainer" else "recomputed"] = described
    manifest["equal_weights"] = equal_weights
    manifest["scored"] = True
    write_manifest(folder, manifest)


def _score_pass(config: ProbeConfig, model: str, this: Any, shards: list[Path], progress: Progress) -> dict[str, Any]:
    from mismatch_cli.recording.score import evenly_spaced, score_shard
    from mismatch_cli.scoring.trainer import Trainer

    progress.say(f"Loading {model} into the trainer ({config.trainer.dtype})")
    trainer = Trainer.load(
        model,
        dtype=config.trainer.dtype,
        attn_implementation=config.trainer.attn_implementation,
        float32_head=config.trainer.float32_head,
        device_map=config.trainer.device_map,
        sampling=config.sampling,
    )
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
    return trainer.describe()
