"""Recording a probe, from top to bottom: encode, sample, free the engine, score."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.metrics.sampled_with import paired_test
from mismatch_cli.models.adapters import read_adapter, same_adapter
from mismatch_cli.models.loading import check_model_folder, load_tokenizer
from mismatch_cli.models.rank_shares import ALL_HERE, Ranks
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.models.torch_settings import prepare_imports, set_threads
from mismatch_cli.probe.config import ProbeConfig
from mismatch_cli.probe.full_divergence import Distributions, check_room, vocabulary_of
from mismatch_cli.probe.rollouts import RecordingProgress, is_sampled, loaded_sampler, shards_of
from mismatch_cli.probe.score import (
    ScoringPass,
    evenly_spaced,
    load_trainer,
    passes,
    requests_of,
    score_shard,
    score_shards,
)
from mismatch_cli.probe.tasks.prompts import load_problems
from mismatch_cli.trace.manifest import library_versions, write_manifest
from mismatch_cli.trace.reader import table_to_batch
from mismatch_cli.trace.shards import open_shard


def record(
    config: ProbeConfig,
    run_folder: Path,
    manifest: dict[str, Any],
    progress: RecordingProgress,
    ranks: Ranks = ALL_HERE,
) -> None:
    """Record the trace of a probe into `run_folder/trace`; a manifest with a shard count means a
    run to resume.

    The caller holds the folder.

    The files show what is done, there are no notes: a missing shard is sampled, one without the
    trainer's columns is scored.
    """
    prepare_imports()
    folder = run_folder / "trace"
    threads = set_threads(config.cpu.threads, config.engine.model)
    manifest = manifest | {
        "config": config.to_json(),
        "top_logprobs": config.top_logprobs,
        "threads": threads,
        "libraries": library_versions(),
    }
    distributions = Distributions(run_folder / "distributions", config.extras.full_divergence)
    # Sampling takes an hour: a missing adapter is reported before it.
    check_unchanged(config, manifest)
    if not ranks.world.broadcast(is_sampled(folder, manifest)):
        manifest = _sample(config, run_folder, manifest, distributions, progress, ranks)
    _score(config, folder, manifest, distributions, progress, ranks)
    if ranks.world.first:
        distributions.remove()


def _sample(
    config: ProbeConfig,
    run_folder: Path,
    manifest: dict[str, Any],
    distributions: Distributions,
    progress: RecordingProgress,
    ranks: Ranks,
) -> dict[str, Any]:
    """Sample the missing shards; returns the completed manifest."""
    tokenizer = load_tokenizer(config.engine.model)
    problems = load_problems(config.prompt_source)
    # Everything that can be refused is refused now, not after an hour of sampling.
    full = distributions.count > 0
    if full:
        vocabulary = vocabulary_of(config.engine.model, tokenizer)
        check_room(config, vocabulary, run_folder, len(problems))
    if config.scoring_model != config.engine.model:
        check_model_folder(config.scoring_model)
    fresh = "shards" not in manifest
    with loaded_sampler(
        config, run_folder, problems, tokenizer, progress, fresh=fresh, full=full, ranks=ranks
    ) as sampler:
        return sampler.sample(config, run_folder / "trace", manifest, distributions=distributions)


def _score(
    config: ProbeConfig,
    folder: Path,
    manifest: dict[str, Any],
    distributions: Distributions,
    progress: RecordingProgress,
    ranks: Ranks,
) -> None:
    """Score the shards that lack a pass, with the trainer of that pass."""
    manifest["equal_weights"] = equal_weights(config)
    shards = shards_of(folder, manifest)
    for scoring in passes(manifest["equal_weights"]):
        done = ranks.world.broadcast([scoring.is_done(path) for path in shards])
        if all(done):
            continue
        adapter_check = None
        if config.engine_adapter and scoring.at_rollout_weights:
            adapter_check = AdapterCheck(config, shards[0], progress, ranks)
        trainer = _load_trainer(scoring, config, progress, ranks)
        if adapter_check is not None:
            manifest["adapter_check"] = adapter_check.finish(trainer)
        manifest[scoring.column.removeprefix("logp_")] = trainer.describe()
        if ranks.world.first:
            # A run may be killed while it scores: its manifest says what scored the first shards.
            write_manifest(folder, manifest)
        score = partial(
            score_shard,
            trainer=trainer,
            scoring=scoring,
            token_budget=config.scorer.token_budget,
            distributions=distributions,
            keep_routes=config.extras.keep_routes,
            ranks=ranks,
        )
        noise_responses = scoring.noise_of(config.scorer.noise_responses)
        score_shards(score, shards, done, noise_responses, progress, ranks)


def _load_trainer(
    scoring: ScoringPass, config: ProbeConfig, progress: RecordingProgress, ranks: Ranks
) -> Trainer:
    """The trainer of a pass: for `logp_recomputed` the model that sampled, else the trainer's."""
    model, adapter = config.scoring_model, config.scorer_adapter
    if scoring.column == "logp_recomputed":
        model, adapter = config.engine.model, config.engine_adapter
    return load_trainer(model, adapter, config.scorer, config.sampling, progress, ranks)


_RESPONSES = 32  # of the first shard


def equal_weights(config: ProbeConfig) -> bool:
    """Whether trainer and engine have the same weights: the same model, and equivalent adapters
    or none.
    """
    return config.scoring_model == config.engine.model and same_adapter(
        config.engine_adapter, config.scorer_adapter
    )


def check_unchanged(config: ProbeConfig, manifest: dict[str, Any]) -> None:
    """A `MismatchError` for an adapter that cannot be read, or has changed since the run began."""
    for role, adapter in (("rollout", config.engine_adapter), ("trainer", config.scorer_adapter)):
        if adapter is None:
            continue
        digest = read_adapter(adapter).digest
        if manifest.get(role, {}).get("adapter_digest", digest) != digest:
            raise MismatchError(
                f"The adapter {adapter} has changed since this run began, so it cannot be "
                "resumed. Start again in another --output, or with --force."
            )


class AdapterCheck:
    """Did the engine apply the adapter? Built before the trainer with the adapter loads: one
    model at a time.
    """

    def __init__(
        self, config: ProbeConfig, shard: Path, progress: RecordingProgress, ranks: Ranks
    ) -> None:
        self._config = config
        self._progress = progress
        self._logp_rollout: list[np.ndarray] = []
        self._requests: list[ScoreRequest] = []
        table = open_shard(shard).read()
        batch = table_to_batch(table.combine_chunks())
        assert batch.logp_rollout_T is not None
        logp_rollout = np.split(batch.logp_rollout_T, batch.offset_S1[1:-1])
        requests = requests_of(table)
        for row in filter(evenly_spaced(_RESPONSES, len(table)), range(len(table))):
            request = requests[row]
            self._logp_rollout.append(logp_rollout[row])
            self._requests.append(ScoreRequest(request.prompt_ids, request.response_ids))
        without_adapter = load_trainer(
            config.engine.model, None, config.scorer, config.sampling, progress, ranks
        )
        self._logp_without = self._logp(without_adapter)

    def finish(self, trainer: Trainer) -> dict[str, Any]:
        """The finding, for the manifest; a `MismatchError` if the engine's log μ fits the model
        without adapter.
        """
        adapter = self._config.engine_adapter
        fit = paired_test(self._logp_rollout, self._logp(trainer), self._logp_without)
        if fit.second_fits:
            raise MismatchError(
                f"The engine did not apply the adapter {adapter}: on "
                f"{len(self._requests)} of its own responses mean |π − μ| is {fit.first:.2g} "
                f"with the adapter and {fit.second:.2g} without. Nothing was scored. Read log/ "
                "in the run folder, or probe without an adapter on the engine."
            )
        if not fit.first_fits:
            self._progress.say(
                f"Cannot tell whether the engine applied the adapter {adapter}: "
                f"mean |π − μ| is {fit.first:.2g} with it and {fit.second:.2g} without, too "
                "close to distinguish."
            )
        return {
            "responses": len(self._requests),
            "abs_dp_with": fit.first,
            "abs_dp_without": fit.second,
            # Never False: an adapter that was not applied has raised above.
            "applied": fit.first_fits or None,
        }

    def _logp(self, trainer: Trainer) -> list[np.ndarray]:
        scores = trainer.score(self._requests, token_budget=self._config.scorer.token_budget)
        return [score.logp_T for score in scores]
