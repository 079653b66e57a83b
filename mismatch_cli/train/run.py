"""The parts of a training run: engine, learner and problems, the phases of a step, and the files
it writes.
"""

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_cli.base.errors import MismatchError, suggest
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
        self.config, self.folder, self.say, self._on_phase, self.world = (
            config,
            run_folder,
            say,
            on_phase,
            world,
        )
        self.framework = ""  # its names for the gap are in the lines too
        # Saved after the last step: it stays, with whatever the user has put beside it
        self._has_model = False
        # Responses so far that state an answer, and that end without one
        self._answers, self._warned_of_answers = (0, 0), False
        self._threads = set_threads(config.cpu.threads or None, config.engine.model)
        algorithm = parse_algorithm(config.algorithm, training=True)
        # An unknown name fails first
        response_scale(config.aggregation, np.ones(1), config.sampler.max_tokens)
        sentence = unpublished(algorithm, config.aggregation)
        if sentence:
            say(sentence)
        self._sampling = SamplingSettings(
            temperature=config.sampler.temperature, max_tokens=config.sampler.max_tokens
        )
        check_ranks(config, world.size)
        self._tokenizer = load_tokenizer(config.engine.model)
        # First: errors in the data are reported before a model loads
        self.task = Task(config, self._tokenizer)
        self._check_same()
        self._on_phase("engine")
        settings = engine_settings(
            config, self._sampling, algorithm.needs_top_k, run_folder, say, world
        )
        self.engine: Engine = create_engine(config.engine.name, settings)
        try:
            self._on_phase("trainer")
            self._load(algorithm)
            if world.first:
                # A run that has loaded can be resumed
                write_atomically(run_folder / FILE_NAME, config.to_toml())
        except BaseException:
            self.close()
            raise

    def _check_same(self) -> None:
        """Check that settings, problems and libraries are the same on every rank."""
        problems = hashlib.sha256(repr(self.task.problems).encode()).hexdigest()
        self.world.check_same(
            [*asdict(self.config).items(), ("problems", problems), *library_versions().items()]
        )

    def _load(self, algorithm: Algorithm) -> None:
        """Encode the problems for the engine's context, and load the trainer beside the engine."""
        config, scorer = self.config, self.config.scorer
        self.task.pose(self.engine.max_model_len)
        for sentence in self.task.left_out:
            self.say(sentence)
        trainer = Trainer.load(
            config.engine.model,
            sampling=self._sampling,
            dtype=scorer.dtype,
            attn_implementation=scorer.attn,
            sharding=Sharding(self.world, True, scorer.cpu_offload)
            if self.world.size > 1
            else None,
            replay_routes=scorer.replay_routes,
        )
        if scorer.gradient_checkpointing:
            checkpoint_layers(trainer.model)
        scored = trainer.describe()
        for sentence in filter(
            None, (attention_warning(scored), rescaling_warning(self.engine.describe(), scored))
        ):
            self.say(sentence)
        self.lora = weights = None
        if config.lora.wanted:
            self.lora = start_lora(
                trainer.model,
                rank=config.lora.rank,
                alpha=config.lora.alpha,
                targets=config.lora.targets,
                seed=config.sampler.seed,
            )
            weights = MergedAdapter(trainer.model)
        self.learner = Learner(trainer, algorithm, self._sampling, config, self.world)
        self.sync = self._weight_sync(trainer, weights)

    def _weight_sync(self, trainer: Trainer, weights: MergedAdapter | None) -> WeightSync:
        config = self.config
        remote = engine_module(config.engine.name).REMOTE  # a server decides on its own dtype
        dtypes = config.scorer.dtype, config.engine.dtype, config.engine.kv_cache_dtype
        dtype, why = dtype_of_weights(self.engine)
        if why:
            self.say(why)
        responses = (
            len(self.world.share(config.prompts_per_step)) * config.sampler.samples_per_prompt
        )
        return WeightSync(
            self.engine,
            trainer,
            exact=dtypes == ("float32", "float32", None) and not remote,
            token_budget=config.scorer.token_budget,
            dtype=dtype,
            reads=engine_has(config.engine.name, "OPEN") and dtype is not None,
            every=steps_between_checks(responses, config.epochs),
            weights=weights,
            world=self.world,
        )

    def restore(self) -> int | None:
        """Go back to the newest checkpoint; returns the number of finished steps, None without a
        checkpoint.
        """
        found = latest_checkpoint(self.folder, self.world)
        if found is None:
            recorded, first = (
                last_step(self.folder),
                min(self.config.checkpoint_every, self.config.steps),
            )
            # A step's line is written before its checkpoint, and a kill or a full disk can come
            # between them.
            if recorded > first or (recorded == first and (self.folder / "model").exists()):
                look = suggest("report", self.folder)
                raise MismatchError(
                    f"{self.folder} has {recorded} steps on record, but its checkpoints are "
                    "gone, so it cannot be resumed. Start again in another --output. To look at "
                    f"it: {look}"
                )
            self._cut_back(-1)
            return None
        self.learner.restore(found.facts["learner"], found.load)
        self.sync.restore(found.facts["sync"], found.load)
        # Every rank knows the given-up questions; only the first has the counts
        judge = found.facts["judge"]
        own = judge if self.world.first else judge | {"timeouts": 0, "unstated": 0}
        self.task.grader.load_state_dict(own)
        self._cut_back(found.step)
        self._has_model = found.step == self.config.steps and self.world.told(
            (self.folder / "model").is_dir()
        )
        return found.step

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
        found = self.world.gather(self.task.grader.state_dict())
        given_up = sorted({question for state in found for question in state["given_up"]})
        counts = self.counts()
        timeouts, unstated = counts["grading_timeouts"], counts["unstated"]
        return {"given_up": given_up, "timeouts": timeouts, "unstated": unstated}

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
        if isinstance(environments := self.task.grader, Environments):
            episodes = Episodes(self.engine, environments, self._tokenizer, self.config, self.world)
            return episodes.play([p.problem for p in posed], step, samples, sampling)
        seeds = [
            sample_seed(self.config.sampler.seed, p.problem.prompt_id, i % samples, step)
            for i, p in enumerate(posed)
        ]
        requests = [
            Request(p.prompt_ids, seed, sampling) for p, seed in zip(posed, seeds, strict=True)
        ]
        return sample_checked(
            self.engine, requests, [p.problem.prompt_id for p in posed], lambda _: None
        )

    def grade(self, posed: list[EncodedProblem], rollouts: list[Any]) -> np.ndarray:
        return np.array(
            self.task.grader.rewards([p.problem for p in posed], rollouts), dtype=np.float32
        )

    def graded(self, step: int, posed: list[EncodedProblem], rollouts: list[Any]) -> Step:
        """A step with the rewards and advantages of its responses; consecutive responses form a
        group.
        """
        reward_S = self.grade(posed, rollouts)
        advantage_S = np.nan_to_num(
            group_mean_advantages(reward_S, np.array([p.problem.prompt_id for p in posed]))
        )
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
        with self.learner.past.in_place():
            return self.learner.trainer.score(requests, token_budget=config.scorer.token_budget)

    def references(self, step: Step) -> dict[int, FullReference]:
        """What a few tokens of the step are compared with; nothing if all updates are made at the
        weights that sampled.
        """
        config = self.config
        moves = config.staleness or config.minibatches * config.epochs > 1
        if not (config.bounds_share and moves):
            return {}
        trainer, sampling = self.learner.trainer, self._sampling
        with self.learner.past.in_place():
            return references(step.rollouts, step.hash_S, trainer, sampling, config, self.world)

    def load_weights(self, step: int, *, at_start: bool = False) -> None:
        """Give the engine the weights with which it samples `step`: the newest, or older ones."""
        with self.learner.past.in_place():
            self.sync.load(step, at_start=at_start)

    @contextmanager
    def newest_weights(self) -> Iterator[None]:
        """Let an engine that samples with older weights have the newest inside the block."""
        if not self.config.staleness:
            yield
            return
        self.sync.send()
        yield
        with self.learner.past.in_place():
            self.sync.send()

    def minibatches(self, step: int) -> list[Minibatch]:
        """The minibatches of every epoch, shuffled by seed, step and epoch; each has this rank's
        rows only.

        A rule that looks at all samples of a prompt needs them in the same minibatch.
        """
        config, problems = self.config, self.world.share(self.config.prompts_per_step)
        responses = config.prompts_per_step * config.sampler.samples_per_prompt
        local = range(
            problems.start * config.sampler.samples_per_prompt,
            problems.stop * config.sampler.samples_per_prompt,
        )
        batches = []
        for epoch in range(self.config.epochs):
            together = (
                config.sampler.samples_per_prompt if self.learner.algorithm.looks_at_groups else 1
            )
            order = list(range(responses // together))
            random.Random(f"{self.config.sampler.seed}/{step}/{epoch}").shuffle(order)
            parts = (
                np.ravel(part[:, None] * together + np.arange(together))
                for part in np.array_split(order, config.minibatches)
            )
            rows = ([row - local.start for row in part.tolist() if row in local] for part in parts)
            batches += [Minibatch(epoch, number, part) for number, part in enumerate(rows)]
        return batches

    def samples(self, step: Step, batch: Minibatch) -> list[LearnedResponse]:
        """A minibatch of a step for the learner; at the weights that sampled, its own log π is
        the recomputed one.
        """
        moved = self.learner.version > step.version
        rows = batch.rows
        recomputed = [
            step.recomputed[row] if step.recomputed is not None and moved else None for row in rows
        ]
        scores = [
            (None, None) if known is None else (known.logp_T, known.logp_at_topk_TK)
            for known in recomputed
        ]
        use = (step.number, batch.epoch, batch.number)
        keys = [(*use, step.posed[row].problem.prompt_id, step.sample_index[row]) for row in rows]
        references = step.references if moved else {}
        return [
            LearnedResponse(
                step.rollouts[row],
                float(step.advantage_S[row]),
                logp_T,
                topk_logp_TK,
                key,
                reference=references.get(row),
            )
            for row, (logp_T, topk_logp_TK), key in zip(rows, scores, keys, strict=True)
        ]

    def learn(self, step: Step, batches: Sequence[Minibatch]) -> None:
        """An update with each minibatch; then memory for gradients is free until the next step
        learns.
        """
        for batch in batches:
            self._update(step, batch)
        self.learner.drop_gradients()

    def _update(self, step: Step, batch: Minibatch) -> None:
        """One optimiser step; if it is not finite, everything up to it is saved as a trace."""
        version = self.learner.version
        try:
            update = self.learner.update(self.samples(step, batch))
        except NotFiniteError as error:
            step.uses.append(UsedMinibatch(batch, version, error.update))
            updates = f"{len(step.uses)} of {self.config.epochs * self.config.minibatches} updates"
            why = f"step {step.number} ended at {updates}, whose gradient was not finite"
            responses = self._all_responses(step)
            folder = (
                self.write_trace("not-finite", responses.table, cut_short=why)
                if responses
                else None
            )
            self.world.barrier()  # a rank that ends takes the others down with it
            raise MismatchError(f"{error} The data behind it is in {folder}.") from error
        step.uses.append(UsedMinibatch(batch, version, update))

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
        counts, responses, every = self.counts(), self._all_responses(step), self.config.trace_every
        answers = sum(self.world.gather(self.task.grader.stated)), counts["unstated"]
        if responses is None:
            return {}
        self._warn_of_no_answers(answers, responses)
        if every and step.number % every == 0:
            self.write_trace(f"step-{step.number}", responses.table)
        routers = self.learner.trainer.routing.describe()
        return (
            step_record(step, responses, self.learner.algorithm, routers, self.framework) | counts
        )

    def _warn_of_no_answers(self, answers: tuple[int, int], responses: StepResponses) -> None:
        """Warn once if most responses graded since the last step state no answer: their reward
        is 0 for that, not for a wrong one.
        """
        counts_answers = needs_answer(self.config.task.reward) and not self.config.turns.environment
        if self._warned_of_answers or not counts_answers:
            return
        stated, unstated = (
            now - before for now, before in zip(answers, self._answers, strict=True)
        )
        self._answers = answers
        if stated == 0:
            truncated = int(responses.truncated_S.sum())
            self.say(no_answers(len(responses.reward_S), truncated, self.config.sampler.max_tokens))
        elif unstated > stated:
            self.say(without_answer(unstated, stated + unstated))
        self._warned_of_answers = stated == 0 or unstated > stated

    def _all_responses(self, step: Step) -> StepResponses | None:
        """The responses of all ranks, on the first one."""
        found = self.world.gather_first(step_responses(step))
        return join_responses(found) if found else None

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
        if self.lora is not None or is_spread(trained):
            if self.lora is not None and self.world.first:
                with replacing_folder(self.folder / "adapter") as temporary:
                    save_adapter(self.lora, temporary)
            state = gather_on_first(
                whole_state(trained if self.lora is None else MergedAdapter(trained)), self.world
            )
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
        why = {"cut_short": cut_short} if cut_short else {}
        write_vocabulary(folder, self._tokenizer)
        write_manifest(folder, self._manifest() | shard_entries({path.name: table.num_rows}) | why)
        write_shard(path, table)
        return folder

    def _manifest(self) -> dict[str, Any]:
        sampling = vars(self._sampling)
        return {
            "command": "train",
            "rollout": self.engine.describe(),
            "trainer": self.learner.trainer.describe() | self._adapter_facts(),
            "config": {"sampling": dict(sampling), "seed": self.config.sampler.seed},
            "algorithm": self.config.algorithm,
            **(
                {"environment": self.config.turns.environment}
                if self.config.turns.environment
                else {}
            ),
            "libraries": library_versions(),
            "threads": self._threads,
        }

    def _adapter_facts(self) -> dict[str, Any]:
        """The adapter in training, described like a saved one; the engine has the merged
        weights.
        """
        config = self.config
        if self.lora is None:
            return {}
        return {
            "adapter": "in training",
            "adapter_rank": config.lora.rank,
            "adapter_alpha": config.lora.alpha,
            "adapter_targets": ", ".join(target_names(vars(self.lora.peft_config["default"]))),
            "adapter_merged": False,
        }

    def close(self) -> None:
        self.task.grader.stop()
        with suppress(Exception):  # the engine may have died; what is on record is safe
            self.engine.close()
