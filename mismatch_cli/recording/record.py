"""Recording a probe, from top to bottom: encode, sample, free the engine, score."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.adapters import read_adapter, same_adapter
from mismatch_cli.errors import MismatchError
from mismatch_cli.metrics.estimate import paired_test
from mismatch_cli.models import check_model_folder, load_tokenizer
from mismatch_cli.recording.config import ProbeConfig
from mismatch_cli.recording.full_divergence import Distributions, check_room, vocabulary_of
from mismatch_cli.recording.ours import remove_results
from mismatch_cli.recording.rollouts import Progress, is_sampled, load_engine, sample_trace, shards_of, start_grader
from mismatch_cli.recording.score import evenly_spaced, load_trainer, requests_of
from mismatch_cli.scoring.trainer import ScoreRequest, Trainer
from mismatch_cli.tasks.prompts import encode_prompts, load_problems
from mismatch_cli.torch_settings import prepare_imports, set_threads
from mismatch_cli.trace.manifest import library_versions, write_manifest
from mismatch_cli.trace.reader import open_shard, table_to_batch

if TYPE_CHECKING:
    from mismatch_cli.recording.score import Pass
    from mismatch_cli.scoring.trainer import Trainer


def record(config: ProbeConfig, run_folder: Path, manifest: dict[str, Any], progress: Progress) -> None:
    """Record the trace of a probe into `run_folder/trace`; a manifest with a shard count is a run to go on with.

    The caller holds the folder.

    What is done is read from the files, not from notes: a shard that is missing is sampled again, one without the
    trainer's columns is scored.
    """
    prepare_imports()
    from mismatch_cli.recording.record import check_unchanged

    folder = run_folder / "trace"
    threads = set_threads(config.threads, config.model)
    manifest = manifest | {"config": config.to_json(), "top_logprobs": config.top_logprobs, "threads": threads}
    manifest["libraries"] = library_versions()
    distributions = Distributions(run_folder / "distributions", config.full_divergence)
    check_unchanged(config, manifest)  # also says before an hour of sampling that an adapter is not there
    if not is_sampled(folder, manifest):
        manifest = _sample(config, run_folder, manifest, distributions, progress)
    _score(config, folder, manifest, distributions, progress)
    distributions.remove()


def _sample(
    config: ProbeConfig, run_folder: Path, manifest: dict[str, Any], distributions: Distributions, progress: Progress
) -> dict[str, Any]:
    tokenizer = load_tokenizer(config.model)
    problems = load_problems(config.prompt_source)
    if full := distributions.count > 0:
        check_room(config, vocabulary_of(config.model, tokenizer), run_folder)
    if config.trainer.model != config.model:
        check_model_folder(config.trainer.model)  # before an hour of sampling, not after it
    with (
        start_grader(config, tokenizer) as grader,
        closing(load_engine(config, run_folder, len(tokenizer), progress, full=full)) as engine,
    ):
        template = config.prompt_template
        encoded = encode_prompts(problems, tokenizer, template=template, max_model_len=engine.max_model_len)
        if "shards" not in manifest:
            remove_results(run_folder)
        return sample_trace(
            config, run_folder / "trace", encoded, engine, tokenizer, grader, manifest, progress,
            distributions=distributions,
        )  # fmt: skip


def _score(
    config: ProbeConfig, folder: Path, manifest: dict[str, Any], distributions: Distributions, progress: Progress
) -> None:
    from mismatch_cli.recording.record import AdapterCheck, equal_weights
    from mismatch_cli.recording.score import load_trainer, passes

    manifest["equal_weights"] = equal_weights(config)
    for scoring in passes(manifest["equal_weights"]):
        recomputed = scoring.column == "logp_recomputed"
        shards = shards_of(folder, manifest)
        if not all(scoring.done(path) for path in shards):
            at_rollout = recomputed or manifest["equal_weights"]
            checked = config.engine_adapter and at_rollout and shards
            check = AdapterCheck(config, shards[0], progress) if checked else None
            model, adapter = config.model, config.engine_adapter
            if not recomputed:
                model, adapter = config.trainer.model, config.trainer.adapter
            trainer = load_trainer(model, config.trainer, config.sampling, progress, adapter)
            if check is not None:
                manifest["adapter_check"] = check.done(trainer)
            manifest["recomputed" if recomputed else "trainer"] = trainer.describe()
            write_manifest(folder, manifest)  # before the first shard is scored: a killed run says with what
            _score_shards(config, trainer, scoring, shards, distributions, progress)


def _score_shards(
    config: ProbeConfig,
    trainer: Trainer,
    scoring: Pass,
    shards: list[Path],
    distributions: Distributions,
    progress: Progress,
) -> None:
    from mismatch_cli.recording.score import evenly_spaced, score_shard

    rows = [open_shard(path).metadata.num_rows for path in shards]
    repeated = evenly_spaced(config.trainer.noise_responses, sum(rows))
    done = [scoring.done(path) for path in shards]
    on_scored = progress.start("Scoring", sum(r for r, d in zip(rows, done, strict=True) if d), sum(rows))
    try:
        for index, path in enumerate(shards):
            if not done[index]:
                first = sum(rows[:index])
                score_shard(
                    path,
                    trainer,
                    scoring,
                    token_budget=config.trainer.token_budget,
                    repeat=[repeated(first + row) for row in range(rows[index])],
                    on_scored=on_scored,
                    distributions=distributions,
                    first_response=first,
                )
    finally:
        progress.stop()


_RESPONSES = 32  # of the first shard


def equal_weights(config: ProbeConfig) -> bool:
    """Whether trainer and engine have the same weights: the same model, and adapters that change it alike, or none."""
    return config.trainer.model == config.model and same_adapter(config.engine_adapter, config.trainer.adapter)


def check_unchanged(config: ProbeConfig, manifest: dict[str, Any]) -> None:
    """A `MismatchError` for an adapter that cannot be read, or is not what it was when the run began."""
    for side, name in (("rollout", config.engine_adapter), ("trainer", config.trainer.adapter)):
        if name is not None:
            now = read_adapter(name).digest
            if manifest.get(side, {}).get("adapter_digest", now) != now:
                raise MismatchError(
                    f"The adapter {name} has changed since this run began, so it cannot be resumed. "
                    "Start anew in another --output, or with --force."
                )


class AdapterCheck:
    """Made before the trainer with the adapter loads, so that two models are never held at once."""

    def __init__(self, config: ProbeConfig, shard: Path, progress: Progress) -> None:
        self._config, self._progress = config, progress
        table = open_shard(shard).read()
        chosen = evenly_spaced(_RESPONSES, len(table))
        rows = [row for row in range(len(table)) if chosen(row)]
        batch = table_to_batch(table.combine_chunks())
        offset_S1 = batch.offset_S1.tolist()
        assert batch.logp_rollout_T is not None
        self._logp_rollout = [batch.logp_rollout_T[offset_S1[r] : offset_S1[r + 1]].numpy() for r in rows]
        requests = requests_of(table)
        self._requests = [ScoreRequest(requests[r].prompt_ids, requests[r].response_ids) for r in rows]
        self._without = self._logp(load_trainer(config.model, config.trainer, config.sampling, progress))

    def done(self, trainer: Trainer) -> dict[str, Any]:
        """What was found, for the manifest; a `MismatchError` where the engine's log μ is that of the model alone."""
        config = self._config
        fit = paired_test(self._logp_rollout, self._logp(trainer), self._without)
        if fit.second_fits:
            raise MismatchError(
                f"The engine did not apply the adapter {config.engine_adapter}: over {len(self._requests)} of its own "
                f"responses mean |π − μ| is {fit.first:.2g} with the adapter and {fit.second:.2g} without. Nothing was "
                "scored; look into log/ in the run folder, or probe the model without an adapter on the engine."
            )
        if not fit.first_fits:
            self._progress.say(
                f"Whether the engine applied the adapter {config.engine_adapter} cannot be told: mean |π − μ| is "
                f"{fit.first:.2g} with it and {fit.second:.2g} without, too near to each other."
            )
        return {
            "responses": len(self._requests),
            "abs_dp_with": fit.first,
            "abs_dp_without": fit.second,
            "applied": True if fit.first_fits else None,
        }

    def _logp(self, trainer: Trainer) -> list[np.ndarray]:
        scores = trainer.score(self._requests, token_budget=self._config.trainer.token_budget)
        return [score.logp_T for score in scores]
