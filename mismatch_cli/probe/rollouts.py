"""A trace of rollouts: load the engine, encode the problems, then sample and grade the missing
shards one by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.models.adapters import read_adapter
from mismatch_cli.models.engines import (
    Engine,
    Request,
    Sink,
    create_engine,
    engine_module,
    sample_checked,
    sample_seed,
)
from mismatch_cli.models.rank_shares import ALL_HERE, Ranks
from mismatch_cli.probe.config import RolloutConfig
from mismatch_cli.probe.full_divergence import Distributions
from mismatch_cli.probe.tasks.grading import Grader, group_mean_advantages
from mismatch_cli.probe.tasks.prompts import EncodedPrompts, Problem, encode_prompts
from mismatch_cli.rules.batch import Rollout
from mismatch_cli.trace.manifest import promised_rows, shard_entries, write_manifest
from mismatch_cli.trace.ownership import remove_results
from mismatch_cli.trace.recording_folder import final_folder
from mismatch_cli.trace.shards import open_shard
from mismatch_cli.trace.vocabulary import write_vocabulary
from mismatch_cli.trace.writer import rows_to_table, shard_path, with_counts, write_shard


class RecordingProgress(Protocol):
    """How a recording reports its progress."""

    def say(self, message: str) -> None:
        """Report one line."""
        ...

    def counting(
        self, phase: str, total: int, done: int = 0, *, unit: str = "responses"
    ) -> AbstractContextManager[Callable[[int], None]]:
        """A phase that counts units of work; its block calls what it gets with the number of
        newly finished ones.
        """
        ...

    def sampling(
        self, phase: str, total: int, done: int, most_tokens: int
    ) -> AbstractContextManager[Callable[[int], None]]:
        """A phase that samples responses of at most so many tokens; its block calls what it gets
        with the number of newly finished ones, and the engine reports the tokens by itself.
        """
        ...


@dataclass(frozen=True)
class Sampler:
    """A loaded engine, its prompts, and the grader of its responses."""

    engine: Engine
    encoded: EncodedPrompts
    tokenizer: Any
    grader: Grader
    progress: RecordingProgress
    ranks: Ranks

    def sample(
        self,
        config: RolloutConfig,
        folder: Path,
        manifest: dict[str, Any],
        *,
        phase: str = "Sampling",
        first_sample: int = 0,
        distributions: Distributions | None = None,
    ) -> dict[str, Any]:
        """Sample every missing shard into `folder`; returns the manifest, completed and written
        there.

        The files show what is done, there are no notes. Raises a `MismatchError` if the manifest
        describes other prompts. A response's seed follows from its prompt and number:
        `first_sample` skips those of earlier responses.
        """
        encoded = self.encoded
        samples = config.sampler.samples_per_prompt
        plans = plan_shards(encoded.problems, encoded.prompt_ids, config.prompts_per_shard)
        manifest = self._promise(config, folder, manifest, plans)
        todo = [plan for plan in plans if not plan.is_sampled(folder, samples)]
        total = samples * len(encoded.problems)
        done = total - samples * sum(len(plan.problems) for plan in todo)
        with self.progress.sampling(phase, total, done, config.sampler.max_tokens) as on_finished:
            for plan in self.ranks.own(todo):
                sample_shard(
                    plan,
                    self.engine,
                    self.grader,
                    folder=folder,
                    samples_per_prompt=samples,
                    first_sample=first_sample,
                    seed=config.sampler.seed,
                    on_finished=on_finished,
                    distributions=distributions,
                    first_response=plan.index * config.prompts_per_shard * samples,
                )
        self.ranks.world.barrier()
        return manifest

    def _promise(
        self,
        config: RolloutConfig,
        folder: Path,
        manifest: dict[str, Any],
        plans: Sequence[ShardPlan],
    ) -> dict[str, Any]:
        """Write the manifest before there are shards, so that a killed run can be resumed: with the
        engine, the prompts, and the shards to come.
        """
        # The prompts may have changed since the run began, and so may the server: both raise.
        prompts = describe_prompts(config, self.encoded, manifest)
        rollout = _describe(self.engine, config, manifest)
        samples = config.sampler.samples_per_prompt
        rows = {plan.path(folder).name: samples * len(plan.problems) for plan in plans}
        manifest = manifest | {"rollout": rollout, "prompts": prompts} | shard_entries(rows)
        with self.ranks.first_before_others() as first:
            if first:
                write_vocabulary(folder, self.tokenizer)
                write_manifest(folder, manifest)
        return manifest


@contextmanager
def loaded_sampler(
    config: RolloutConfig,
    run_folder: Path,
    problems: list[Problem],
    tokenizer: Any,
    progress: RecordingProgress,
    *,
    fresh: bool,
    full: bool = False,
    ranks: Ranks = ALL_HERE,
) -> Iterator[Sampler]:
    """The rollout engine of a configuration, with its log in the run folder; `full` if it will
    `sample_full`.

    Once it has loaded, a `fresh` run removes an old one from the folder. The engine and the grader
    end with the block.
    """
    with ExitStack() as stack:
        grader = stack.enter_context(
            Grader(
                tokenizer.decode,
                reward=config.task.reward,
                seconds=config.task.seconds,
                template=config.task.template,
                answer_format=config.task.answer_format,
                rule=config.task.grader,
                chat=getattr(tokenizer, "chat_template", None) is not None,
            )
        )
        if config.task.reward:
            # An engine takes minutes to load: a reward function that cannot be loaded fails before.
            grader.start()
        loaded = _load_engine(config, run_folder, len(tokenizer), progress, full, ranks)
        engine = stack.enter_context(closing(loaded))
        encoded = encode_prompts(
            problems, tokenizer, template=config.task.template, max_model_len=engine.max_model_len
        )
        with ranks.first_before_others() as first:
            if first and fresh:
                remove_results(run_folder)
        yield Sampler(engine, encoded, tokenizer, grader, progress, ranks)


def _load_engine(
    config: RolloutConfig,
    run_folder: Path,
    vocabulary: int,
    progress: RecordingProgress,
    full: bool,
    ranks: Ranks,
) -> Engine:
    config.check_vocabulary(vocabulary)
    if engine_module(config.engine.name).REMOTE:
        progress.say(f"Asking the server for {config.engine.model}")
    else:
        progress.say(
            f"Loading {config.engine.model} into the rollout engine ({config.engine.name})"
        )
    log_file = final_folder(run_folder) / "log" / f"{config.engine.name}{ranks.world.suffix}.log"
    settings = config.engine_settings(
        log_file=log_file, full=full, say=progress.say, world=ranks.world
    )
    return create_engine(config.engine.name, settings)


def _describe(engine: Engine, config: RolloutConfig, manifest: dict[str, Any]) -> dict[str, Any]:
    """The engine as resolved, and its adapter; a `MismatchError` for a different server from the
    one that the run began with.
    """
    described = engine.describe()
    if engine_module(config.engine.name).REMOTE:
        for name, before in manifest.get("rollout", {}).items():
            now = described.get(name)
            # A server does not report every setting: None and auto say nothing that could differ.
            is_reported = {before, now}.isdisjoint((None, "auto"))
            if is_reported and before != now:
                raise MismatchError(
                    f"The server is not the one that this run began with: {name} was {before} "
                    f"and is {now}. Start it with its old settings, or start the run again with "
                    "--force."
                )
    if config.engine_adapter is not None:
        described = described | read_adapter(config.engine_adapter).facts(merged=False)
    return described


def is_whole(path: Path, rows: int | None) -> bool:
    """Whether a shard exists, with all the responses that it was written with, if their number
    is known.
    """
    return path.is_file() and (rows is None or open_shard(path).metadata.num_rows == rows)


def is_sampled(folder: Path, manifest: dict[str, Any]) -> bool:
    """Whether every shard that a manifest promises exists and is complete; False for one that
    promises none.
    """
    promised = promised_rows(manifest)
    if promised is None:
        return False
    return all(is_whole(folder / name, rows) for name, rows in promised.items())


def shards_of(folder: Path, manifest: dict[str, Any]) -> list[Path]:
    """The shards that a manifest promises, whether they exist or not."""
    return [shard_path(folder, index) for index in range(manifest["shards"])]


def digest_of(encoded: EncodedPrompts) -> str:
    """A hash that distinguishes these prompts from others."""
    return hashlib.sha256(repr([encoded.problems, encoded.prompt_ids]).encode()).hexdigest()[:16]


def describe_prompts(
    config: RolloutConfig, encoded: EncodedPrompts, manifest: dict[str, Any]
) -> dict[str, Any]:
    """What a manifest says about its prompts; a `MismatchError` if this one has others."""
    digest = digest_of(encoded)
    before = manifest.get("prompts", {}).get("digest", digest)
    if before != digest:
        raise MismatchError(
            f"{config.problems.source} has changed since this run began, so it cannot be resumed. "
            "Start again in another --output, or with --force."
        )
    return {
        "source": config.problems.source,
        "count": len(encoded.problems),
        "template": encoded.template,
        "skipped": encoded.skipped,
        "digest": digest,
    }


@dataclass(frozen=True)
class ShardPlan:
    """The prompts of one shard: the unit of work, and the most that a kill can lose."""

    index: int
    problems: list[Problem]
    prompt_ids: list[list[int]]

    def path(self, folder: Path) -> Path:
        return shard_path(folder, self.index)

    def is_sampled(self, folder: Path, samples_per_prompt: int) -> bool:
        """Whether the shard exists with all of its responses."""
        return is_whole(self.path(folder), samples_per_prompt * len(self.problems))

    def requests(self, samples: Sequence[int], seed: int) -> tuple[list[Problem], list[Request]]:
        """The problem and the request of every response: all samples of a prompt, then the next."""
        problems: list[Problem] = []
        requests: list[Request] = []
        for problem, prompt_ids in zip(self.problems, self.prompt_ids, strict=True):
            for sample in samples:
                # A response has a seed of its own: a resumed run, whose batches differ, draws the
                # same.
                own_seed = sample_seed(seed, problem.prompt_id, sample)
                problems.append(problem)
                requests.append(Request(prompt_ids, own_seed))
        return problems, requests


def plan_shards(
    problems: list[Problem], prompt_ids: list[list[int]], prompts_per_shard: int
) -> list[ShardPlan]:
    """Cut the prompts into shards, in order."""
    plans: list[ShardPlan] = []
    for start in range(0, len(problems), prompts_per_shard):
        of_shard = slice(start, start + prompts_per_shard)
        plans.append(ShardPlan(len(plans), problems[of_shard], prompt_ids[of_shard]))
    return plans


def sample_shard(
    plan: ShardPlan,
    engine: Engine,
    grader: Grader,
    *,
    folder: Path,
    samples_per_prompt: int,
    first_sample: int = 0,
    seed: int,
    on_finished: Callable[[int], None],
    distributions: Distributions | None = None,
    first_response: int = 0,
) -> None:
    """Sample all responses of a shard, check and grade them, and write the shard.

    `distributions` take log μ of the run's first responses; the shard's first response is number
    `first_response`.
    """
    samples = range(first_sample, first_sample + samples_per_prompt)
    problems, requests = plan.requests(samples, seed)
    prompt_id_S = [problem.prompt_id for problem in problems]
    with ExitStack() as files:
        sinks: list[Sink] = []
        if distributions:
            sinks = files.enter_context(distributions.sinks(first_response, len(requests)))
        rollouts = sample_checked(engine, requests, prompt_id_S, on_finished, sinks)
    timeouts_before = grader.timeouts
    unstated_before = grader.unstated
    columns = {
        "prompt_id": prompt_id_S,
        "sample_index": list(samples) * len(plan.problems),
        **_rollout_columns(rollouts),
        **_grade_columns(problems, rollouts, grader),
    }
    table = with_counts(
        rows_to_table(columns),
        grading_timeouts=grader.timeouts - timeouts_before,
        unstated=grader.unstated - unstated_before,
    )
    write_shard(plan.path(folder), table)


_COUNTERS_OF_TRAINING = ("step", "epoch", "minibatch", "version_rollout")
# Columns, each with the attribute of a rollout that fills it
_COLUMNS_OF_ENGINE = {
    "finish_reason": "finish_reason",
    "prompt_ids": "prompt_ids",
    "response_ids": "response_ids",
    "logp_rollout": "logp_rollout_T",
    "rank_rollout": "rank_rollout_T",
    "topk_ids": "topk_ids_TK",
    "topk_logp_rollout": "topk_logp_rollout_TK",
    "routes": "routes_FMK",
}


def _rollout_columns(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """What the engine reported, without columns that are null for all responses; nothing trains, so
    the counters of training are 0.
    """
    zero_S = np.zeros(len(rollouts), dtype=np.int32)
    columns: dict[str, Any] = dict.fromkeys(_COUNTERS_OF_TRAINING, zero_S)
    columns["loss_mask"] = [np.ones(len(r.response_ids), dtype=bool) for r in rollouts]
    for name, attribute in _COLUMNS_OF_ENGINE.items():
        values = [getattr(rollout, attribute) for rollout in rollouts]
        if any(value is not None for value in values):
            columns[name] = values
    return columns


def _grade_columns(
    problems: Sequence[Problem], rollouts: Sequence[Rollout], grader: Grader
) -> dict[str, Any]:
    """Rewards, and the advantages that follow; null for problems that cannot be graded, and no
    column where none can.
    """
    if not any(map(grader.can_grade, problems)):
        return {}
    prompt_id_S = np.array([problem.prompt_id for problem in problems])
    reward_S = np.array(grader.rewards(problems, rollouts), dtype=np.float32)
    advantage_S = group_mean_advantages(reward_S, prompt_id_S)
    rewards: list[np.float32 | None] = [None] * len(rollouts)
    advantages: list[np.ndarray | None] = [None] * len(rollouts)
    # The advantage of a response is NaN exactly where its reward is.
    for row in np.flatnonzero(~np.isnan(reward_S)):
        tokens = len(rollouts[row].response_ids)
        rewards[row] = reward_S[row]
        advantages[row] = np.full(tokens, advantage_S[row], dtype=np.float32)
    return {"reward": rewards, "advantage": advantages}
