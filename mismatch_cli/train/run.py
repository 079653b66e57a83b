"""The parts of a training run: engine, learner and problems, the phases of a step, and the files
it writes.
"""

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_cli.base.errors import MismatchError, suggest
from mismatch_cli.base.options import values_by_key
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.adapters import MergedAdapter, save_adapter, start_lora, target_names
from mismatch_cli.models.attention import attention_warning
from mismatch_cli.models.engines import (
    Engine,
    Request,
    create_engine,
    engine_has,
    engine_module,
    sample_checked,
    sample_seed,
)
from mismatch_cli.models.loading import checkpoint_layers, load_causal_lm, load_tokenizer
from mismatch_cli.models.positions import rescaling_warning
from mismatch_cli.models.scoring.requests import ScoreRequest
from mismatch_cli.models.scoring.trainer import ResponseScores, Trainer
from mismatch_cli.models.sharding import Sharding, gather_on_first, is_spread, whole_state
from mismatch_cli.models.torch_settings import set_threads
from mismatch_cli.probe.tasks.answers import no_answers, without_answer
from mismatch_cli.probe.tasks.grading import group_mean_advantages
from mismatch_cli.probe.tasks.rewards import needs_answer
from mismatch_cli.processes.ranks import ALONE, World
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.trace.files import (
    could_not_write,
    open_to_append,
    replacing_folder,
    write_atomically,
)
from mismatch_cli.trace.manifest import library_versions, shard_entries, write_manifest
from mismatch_cli.trace.vocabulary import write_vocabulary
from mismatch_cli.trace.writer import shard_path, write_shard
from mismatch_cli.train.bounds import FullReference, references
from mismatch_cli.train.checkpoint import (
    METRICS_FILE,
    cut_back,
    last_step,
    latest_checkpoint,
    save_checkpoint,
)
from mismatch_cli.train.coefficients import LearnedResponse
from mismatch_cli.train.environment import Environments
from mismatch_cli.train.episodes import Episodes
from mismatch_cli.train.learner import Learner, NotFiniteError, response_scale, unpublished
from mismatch_cli.train.metrics_table import renew_table
from mismatch_cli.train.run_engine import dtype_of_weights, engine_settings
from mismatch_cli.train.step import (
    Minibatch,
    Step,
    StepResponses,
    UsedMinibatch,
    join_responses,
    step_record,
    step_responses,
)
from mismatch_cli.train.sync import WeightSync, steps_between_checks
from mismatch_cli.train.task import EncodedProblem, Task, check_ranks
from mismatch_cli.train.train_config import FILE_NAME, TrainConfig

Record = dict[str, Any]


class RunInProgress:
    """A run in progress: `loop.train` calls its phases one after the other."""

    def __init__(
        self,
        config: TrainConfig,
        run_folder: Path,
        say: Callable[[str], None],
        on_phase: Callable[[str], None] = lambda _: None,
        world: World = ALONE,
    ) -> None:
        self.config = config
        self.folder = run_folder
        self.say = say
        self.world = world
        self._on_phase = on_phase
        self.framework = ""  # its names for the gap are in the lines too
        # Saved after the last step: it stays, with whatever the user has put beside it
        self._has_model = False
        self._answers = (0, 0)  # responses so far that state an answer, and that end without one
        self._warned_of_answers = False
        self._threads = set_threads(config.cpu.threads or None, config.engine.model)
        algorithm = parse_algorithm(config.algorithm, training=True)
        # An unknown aggregation fails here, before anything loads.
        response_scale(config.aggregation, np.ones(1), config.sampler.max_tokens)
        departure = unpublished(algorithm, config.aggregation)
        if departure:
            say(departure)
        self._sampling = SamplingSettings(
            temperature=config.sampler.temperature, max_tokens=config.sampler.max_tokens
        )
        check_ranks(config, world.size)
        self._tokenizer = load_tokenizer(config.engine.model)
        # Errors in the data are reported before a model loads.
        self.task = Task(config, self._tokenizer)
        self._check_same()
        self._load(algorithm)

    def _check_same(self) -> None:
        """Check that settings, problems and libraries are the same on every rank."""
        problems = hashlib.sha256(repr(self.task.problems).encode()).hexdigest()
        settings = values_by_key(self.config)
        self.world.check_same(
            [*settings.items(), ("problems", problems), *library_versions().items()]
        )

    def _load(self, algorithm: Algorithm) -> None:
        """Start the engine, and load the trainer beside it; after an error nothing is left open."""
        config = self.config
        self._on_phase("engine")
        settings = engine_settings(
            config, self._sampling, algorithm.needs_top_k, self.folder, self.say, self.world
        )
        self.engine: Engine = create_engine(config.engine.name, settings)
        try:
            self._on_phase("trainer")
            self._load_trainer(algorithm)
            if self.world.first:
                # A run that has loaded can be resumed.
                write_atomically(self.folder / FILE_NAME, config.to_toml())
        except BaseException:
            self.close()
            raise

    def _load_trainer(self, algorithm: Algorithm) -> None:
        """Encode the problems for the engine's context, and load the trainer, the learner and the
        sync.
        """
        config = self.config
        scorer = config.scorer
        self.task.pose(self.engine.max_model_len)
        for sentence in self.task.left_out:
            self.say(sentence)
        sharding = None
        if self.world.size > 1:
            sharding = Sharding(self.world, learns=True, cpu_offload=scorer.cpu_offload)
        trainer = Trainer.load(
            config.engine.model,
            sampling=self._sampling,
            dtype=scorer.dtype,
            attn_implementation=scorer.attn,
            sharding=sharding,
            replay_routes=scorer.replay_routes,
        )
        if scorer.gradient_checkpointing:
            checkpoint_layers(trainer.model)
        facts = trainer.describe()
        for warning in (attention_warning(facts), rescaling_warning(self.engine.describe(), facts)):
            if warning:
                self.say(warning)
        merged = self._start_adapter(trainer.model)
        self.learner = Learner(trainer, algorithm, self._sampling, config, self.world)
        self.sync = self._weight_sync(trainer, merged)

    def _start_adapter(self, model: Any) -> MergedAdapter | None:
        """Add a new adapter to the model, if the run trains one; the engine gets it merged."""
        lora = self.config.lora
        self.lora: Any = None
        if not lora.wanted:
            return None
        self.lora = start_lora(
            model,
            rank=lora.rank,
            alpha=lora.alpha,
            targets=lora.targets,
            seed=self.config.sampler.seed,
        )
        return MergedAdapter(model)

    def _weight_sync(self, trainer: Trainer, merged: MergedAdapter | None) -> WeightSync:
        config = self.config
        remote = engine_module(config.engine.name).REMOTE  # a server decides on its own dtype
        dtypes = config.scorer.dtype, config.engine.dtype, config.engine.kv_cache_dtype
        dtype, why = dtype_of_weights(self.engine)
        if why:
            self.say(why)
        problems = len(self.world.share(config.prompts_per_step))
        responses = problems * config.sampler.samples_per_prompt
        return WeightSync(
            self.engine,
            trainer,
            exact=dtypes == ("float32", "float32", None) and not remote,
            token_budget=config.scorer.token_budget,
            dtype=dtype,
            reads=engine_has(config.engine.name, "OPEN") and dtype is not None,
            every=steps_between_checks(responses, config.epochs),
            weights=merged,
            world=self.world,
        )

    def restore(self) -> int | None:
        """Go back to the newest checkpoint; returns the number of finished steps, None without a
        checkpoint.
        """
        checkpoint = latest_checkpoint(self.folder, self.world)
        if checkpoint is None:
            _check_not_begun(self.folder, self.config)
            self._cut_back(-1)
            return None
        self.learner.restore(checkpoint.facts["learner"], checkpoint.load)
        self.sync.restore(checkpoint.facts["sync"], checkpoint.load)
        # Every rank knows the given-up questions; only the first has the counts
        grader = checkpoint.facts["judge"]
        if not self.world.first:
            grader = grader | {"timeouts": 0, "unstated": 0}
        self.task.grader.load_state_dict(grader)
        # It counts on from there: without this, the first step would have all of them.
        self._answers = (0, grader.get("unstated", 0))
        self._cut_back(checkpoint.step)
        if checkpoint.step == self.config.steps:
            self._has_model = self.world.broadcast((self.folder / "model").is_dir())
        return checkpoint.step

    def _cut_back(self, step: int) -> None:
        self.world.barrier()  # until every rank has read the files
        if self.world.first:
            cut_back(self.folder, step, self.say)

    def save(self, step: int) -> None:
        """Save everything that the next step depends on.

        No random state is needed, and nothing depends on the number of ranks: there is no dropout,
        seed and step shuffle problems and minibatches, and a response is sampled from hash(seed,
        prompt, sample, step).
        """
        facts = {"learner": self.learner.facts(), "sync": self.sync.facts(), "judge": self._judge()}
        tensors = self.learner.tensors() | self.sync.tensors()
        save_checkpoint(self.folder, step, tensors, facts, self._save_adapter, self.world)
        if self.world.first:
            renew_table(self.folder / METRICS_FILE, self.say)

    def _judge(self) -> Record:
        """The responses that took too long to grade, on any rank."""
        given_up: set[Any] = set()
        for state in self.world.gather(self.task.grader.state_dict()):
            given_up.update(state["given_up"])
        counts = self.counts()
        return {
            "given_up": sorted(given_up),
            "timeouts": counts["grading_timeouts"],
            "unstated": counts["unstated"],
        }

    def _save_adapter(self, folder: Path) -> None:
        """Save the adapter as peft does, for the user: a resumed run reads the state instead."""
        if self.lora is not None:
            save_adapter(self.lora, folder / "adapter")

    def share(self, problems: Sequence[EncodedProblem]) -> list[EncodedProblem]:
        """The problems that this rank samples."""
        share = self.world.share(len(problems))
        return list(problems[share.start : share.stop])

    def sample(
        self,
        posed: list[EncodedProblem],
        step: int,
        samples: int,
        sampling: SamplingSettings | None = None,
    ) -> list[Any]:
        """A rollout for each posed problem; `samples` consecutive ones are of the same problem."""
        problems = [encoded.problem for encoded in posed]
        environments = self.task.grader
        if isinstance(environments, Environments):
            episodes = Episodes(self.engine, environments, self._tokenizer, self.config, self.world)
            return episodes.play(problems, step, samples, sampling)
        requests = []
        for i, encoded in enumerate(posed):
            prompt_id = encoded.problem.prompt_id
            seed = sample_seed(self.config.sampler.seed, prompt_id, i % samples, step)
            requests.append(Request(encoded.prompt_ids, seed, sampling))
        prompt_ids = [problem.prompt_id for problem in problems]
        return sample_checked(self.engine, requests, prompt_ids, lambda _: None)

    def grade(self, posed: list[EncodedProblem], rollouts: list[Any]) -> np.ndarray:
        problems = [encoded.problem for encoded in posed]
        return np.array(self.task.grader.rewards(problems, rollouts), dtype=np.float32)

    def graded(self, step: int, posed: list[EncodedProblem], rollouts: list[Any]) -> Step:
        """A step with the rewards and advantages of its responses; consecutive responses form a
        group.
        """
        reward_S = self.grade(posed, rollouts)
        prompt_id_S = np.array([encoded.problem.prompt_id for encoded in posed])
        # A response that nobody graded has no advantage.
        advantage_S = np.nan_to_num(group_mean_advantages(reward_S, prompt_id_S))
        index = [i % self.config.sampler.samples_per_prompt for i in range(len(posed))]
        version = self.learner.past.version(self.learner.version)
        return Step(step, version, posed, index, rollouts, reward_S, advantage_S)

    def recompute(self, step: Step) -> list[ResponseScores] | None:
        """log π at the weights that sampled, if the algorithm or the user asks for it, or if no
        update is made at these weights.
        """
        config = self.config
        if not (config.recompute or config.staleness or self.learner.algorithm.needs_recomputed):
            return None
        requests = list(map(ScoreRequest.of, step.rollouts))
        with self.learner.past.sampling_weights():
            return self.learner.trainer.score(requests, token_budget=config.scorer.token_budget)

    def references(self, step: Step) -> dict[int, FullReference]:
        """What a few tokens of the step are compared with; nothing if all updates are made at the
        weights that sampled.
        """
        config = self.config
        moves = config.staleness or config.minibatches * config.epochs > 1
        if not (config.bounds_share and moves):
            return {}
        trainer = self.learner.trainer
        with self.learner.past.sampling_weights():
            return references(
                step.rollouts, step.hash_S, trainer, self._sampling, config, self.world
            )

    def load_weights(self, step: int, *, at_start: bool = False) -> None:
        """Give the engine the weights with which it samples `step`: the newest, or older ones."""
        with self.learner.past.sampling_weights():
            self.sync.load(step, at_start=at_start)

    @contextmanager
    def newest_weights(self) -> Iterator[None]:
        """Let an engine that samples with older weights have the newest inside the block."""
        if not self.config.staleness:
            yield
            return
        self.sync.send()
        yield
        with self.learner.past.sampling_weights():
            self.sync.send()

    def minibatches(self, step: int) -> list[Minibatch]:
        """The minibatches of every epoch, shuffled by seed, step and epoch; each has this rank's
        rows only.

        A rule that looks at all samples of a prompt needs them in the same minibatch.
        """
        config = self.config
        samples = config.sampler.samples_per_prompt
        problems = self.world.share(config.prompts_per_step)
        own_rows = range(problems.start * samples, problems.stop * samples)
        together = samples if self.learner.algorithm.looks_at_groups else 1
        minibatches = []
        for epoch in range(config.epochs):
            order = list(range(config.prompts_per_step * samples // together))
            random.Random(f"{config.sampler.seed}/{step}/{epoch}").shuffle(order)
            for number, part in enumerate(np.array_split(order, config.minibatches)):
                rows = np.ravel(part[:, None] * together + np.arange(together)).tolist()
                own = [row - own_rows.start for row in rows if row in own_rows]
                minibatches.append(Minibatch(epoch, number, own))
        return minibatches

    def samples(self, step: Step, minibatch: Minibatch) -> list[LearnedResponse]:
        """A minibatch of a step for the learner; at the weights that sampled, its own log π is
        the recomputed one.
        """
        moved = self.learner.version > step.version
        samples = []
        for row in minibatch.rows:
            key = (
                step.number,
                minibatch.epoch,
                minibatch.number,
                step.posed[row].problem.prompt_id,
                step.sample_index[row],
            )
            sample = LearnedResponse(step.rollouts[row], float(step.advantage_S[row]), row_key=key)
            if moved:
                sample = replace(sample, reference=step.references.get(row))
            if moved and step.recomputed is not None:
                scores = step.recomputed[row]
                sample = replace(
                    sample,
                    logp_recomputed_T=scores.logp_T,
                    topk_logp_recomputed_TK=scores.logp_at_topk_TK,
                )
            samples.append(sample)
        return samples

    def learn(self, step: Step, minibatches: Sequence[Minibatch]) -> None:
        """An update with each minibatch; then memory for gradients is free until the next step
        learns.
        """
        for minibatch in minibatches:
            self._update(step, minibatch)
        self.learner.drop_gradients()

    def _update(self, step: Step, minibatch: Minibatch) -> None:
        """One optimiser step; if it is not finite, everything up to it is saved as a trace."""
        version = self.learner.version
        try:
            update = self.learner.update(self.samples(step, minibatch))
        except NotFiniteError as error:
            step.uses.append(UsedMinibatch(minibatch, version, error.update))
            updates = f"{len(step.uses)} of {self.config.epochs * self.config.minibatches} updates"
            why = f"step {step.number} ended at {updates}, whose gradient was not finite"
            responses = self._all_responses(step)
            folder = None
            if responses is not None:
                folder = self.write_trace("not-finite", responses.table, cut_short=why)
            self.world.barrier()  # a rank that ends takes the others down with it
            raise MismatchError(f"{error} The data behind it is in {folder}.") from error
        step.uses.append(UsedMinibatch(minibatch, version, update))

    def counts(self) -> Record:
        """Counts of failures so far that did not stop the run."""
        grader = self.task.grader
        return {
            "back_offs": self.learner.loss_scale.back_offs,
            "grading_timeouts": sum(self.world.gather(grader.timeouts)),
            "unstated": sum(self.world.gather(grader.unstated)),
        }

    def record(self, step: Step) -> Record:
        """The line of a step, without times, and its trace if one is due; {} on all ranks but
        the first.
        """
        counts = self.counts()
        responses = self._all_responses(step)
        stated = sum(self.world.gather(self.task.grader.stated))
        if responses is None:
            return {}
        self._warn_of_no_answers((stated, counts["unstated"]), responses)
        every = self.config.trace_every
        if every and step.number % every == 0:
            self.write_trace(f"step-{step.number}", responses.table)
        algorithm = self.learner.algorithm
        routers = self.learner.trainer.routing.describe()
        return step_record(step, responses, algorithm, routers, self.framework) | counts

    def _warn_of_no_answers(self, answers: tuple[int, int], responses: StepResponses) -> None:
        """Warn once if most responses graded since the last step state no answer: their reward
        is 0 for that, not for a wrong one.
        """
        counts_answers = needs_answer(self.config.task.reward) and not self.config.turns.environment
        if self._warned_of_answers or not counts_answers:
            return
        stated = answers[0] - self._answers[0]
        unstated = answers[1] - self._answers[1]
        self._answers = answers
        if stated == 0:
            truncated = int(responses.truncated_S.sum())
            self.say(no_answers(len(responses.reward_S), truncated, self.config.sampler.max_tokens))
        elif unstated > stated:
            self.say(without_answer(unstated, stated + unstated))
        self._warned_of_answers = stated == 0 or unstated > stated

    def _all_responses(self, step: Step) -> StepResponses | None:
        """The responses of all ranks, on the first one."""
        parts = self.world.gather_first(step_responses(step))
        return join_responses(parts) if parts else None

    def write(self, record: Record) -> None:
        """Append a line to metrics.jsonl, on the first rank."""
        if not self.world.first:
            return
        path = self.folder / METRICS_FILE
        try:
            with open_to_append(path) as lines:
                lines.write(json.dumps(record).encode() + b"\n")
                lines.flush()
                # A checkpoint that outlives a power cut must not outlive the lines before it
                os.fsync(lines.fileno())
        except OSError as error:  # readers skip a partial line
            raise could_not_write(path, error) from error

    def save_model(self) -> None:
        """Save the trained model as a folder that `probe` can read; an adapter both by itself
        and merged.
        """
        from transformers.utils import logging

        if self._has_model:
            return
        self._on_phase("model")
        logging.disable_progress_bar()
        trained = self.learner.model
        if self.lora is not None and self.world.first:
            with replacing_folder(self.folder / "adapter") as temporary:
                save_adapter(self.lora, temporary)
        if self.lora is not None or is_spread(trained):
            weights = trained if self.lora is None else MergedAdapter(trained)
            state = gather_on_first(whole_state(weights), self.world)
            if not self.world.first:
                return
            trained = load_causal_lm(
                self.config.engine.model, self.config.scorer.dtype, device_map="cpu"
            )
            trained.load_state_dict(state)
        with replacing_folder(self.folder / "model") as temporary:
            trained.save_pretrained(temporary)
            self._tokenizer.save_pretrained(temporary)

    def write_trace(self, name: str, table: Any, cut_short: str = "") -> Path:
        """Write one step as a trace of one shard; `cut_short` says why it has only part of the
        step.
        """
        folder = self.folder / "traces" / name
        path = shard_path(folder, 0)
        write_vocabulary(folder, self._tokenizer)
        manifest = self._manifest() | shard_entries({path.name: table.num_rows})
        if cut_short:
            manifest["cut_short"] = cut_short
        write_manifest(folder, manifest)
        write_shard(path, table)
        return folder

    def _manifest(self) -> dict[str, Any]:
        config = self.config
        manifest = {
            "command": "train",
            "rollout": self.engine.describe(),
            "trainer": self.learner.trainer.describe() | self._adapter_facts(),
            "config": {"sampling": dict(vars(self._sampling)), "seed": config.sampler.seed},
            "algorithm": config.algorithm,
        }
        if config.turns.environment:
            manifest["environment"] = config.turns.environment
        return manifest | {"libraries": library_versions(), "threads": self._threads}

    def _adapter_facts(self) -> dict[str, Any]:
        """The adapter in training, described like a saved one; the engine has the merged
        weights.
        """
        if self.lora is None:
            return {}
        peft_config = vars(self.lora.peft_config["default"])
        return {
            "adapter": "in training",
            "adapter_rank": self.config.lora.rank,
            "adapter_alpha": self.config.lora.alpha,
            "adapter_targets": ", ".join(target_names(peft_config)),
            "adapter_merged": False,
        }

    def close(self) -> None:
        self.task.grader.stop()
        with suppress(Exception):  # the engine may have died; what is on record is safe
            self.engine.close()


def _check_not_begun(folder: Path, config: TrainConfig) -> None:
    """Refuse to start a run again if its steps are on record but its checkpoints are gone."""
    recorded = last_step(folder)
    first = min(config.checkpoint_every, config.steps)
    # A step's line is written before its checkpoint, and a kill or a full disk can come between
    # them: then the first step of a checkpoint is on record without one.
    ended = recorded == first and (folder / "model").exists()
    if recorded > first or ended:
        raise MismatchError(
            f"{folder} has {recorded} steps on record, but its checkpoints are gone, so it cannot "
            "be resumed. Start again in another --output. To look at it: "
            f"{suggest('report', folder)}"
        )
