"""The sanity test from top to bottom: sample, grade, learn, sync, record, again."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_cli.algorithms.parse import find
from mismatch_cli.engines import Engine, EngineSettings, Request, create_engine
from mismatch_cli.engines._sampling import sample_checked, sample_seed
from mismatch_cli.models import load_tokenizer
from mismatch_cli.rl.checkpoint import METRICS_FILE, cut_back, latest_checkpoint, save_checkpoint
from mismatch_cli.rl.config import FILE_NAME, TrainConfig
from mismatch_cli.rl.learner import Learner, LearnerSettings, Sample
from mismatch_cli.rl.step import Step, Use, step_record, step_table
from mismatch_cli.rl.sync import prove_equal
from mismatch_cli.rl.task import Posed, Task
from mismatch_cli.sampling import SamplingSettings
from mismatch_cli.scoring.batches import ScoreRequest
from mismatch_cli.scoring.trainer import Trainer
from mismatch_cli.tasks.advantages import group_mean_advantages
from mismatch_cli.tasks.grading import Grader
from mismatch_cli.torch_settings import set_threads
from mismatch_cli.trace.files import write_atomically
from mismatch_cli.trace.manifest import library_versions, write_manifest
from mismatch_cli.trace.vocabulary import write_vocabulary
from mismatch_cli.trace.writer import shard_path, write_shard

Record = dict[str, Any]


def train(
    config: TrainConfig,
    run_folder: Path,
    on_step: Callable[[Record], None],
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Run the loop, or go on with it; every step is a line of metrics.jsonl before `on_step` hears of it.

    `stop` is asked after every step: True saves a checkpoint there and ends. Answers whether all steps are done.
    """
    run = _Run(config, run_folder)
    try:
        first = run.restore() if resume else 0
        for step in range(first, config.steps):
            seconds = _Seconds()
            posed = [p for p in run.task.of_step(step) for _ in range(config.samples_per_prompt)]
            with seconds("sample"):
                rollouts = run.sample(posed, step, config.samples_per_prompt)
            with seconds("grade"):
                reward_S = run.grade(posed, rollouts)
                advantage_S = group_mean_advantages(reward_S, np.array([p.problem.prompt_id for p in posed]))
            index = [i % config.samples_per_prompt for i in range(len(posed))]
            this = Step(step, run.learner.version, posed, index, rollouts, reward_S, advantage_S)
            with seconds("recompute"):
                this.recomputed = run.recompute(this)
            with seconds("update"):
                for epoch, minibatch, rows in run.minibatches(step, len(posed)):
                    version = run.learner.version
                    update = run.learner.update([run.sample_of(this, row) for row in rows])
                    this.uses.append(Use(epoch, minibatch, rows, version, update))
            with seconds("sync"):
                sync = run.prove_sync(this)
                run.engine.load_weights(run.learner.model)
            with seconds("record"):
                table = step_table(this)
                record = step_record(this, table, run.learner.algorithm) | {"sync": sync}
                record["back_offs"] = run.learner.loss_scale.back_offs
                if config.trace_every and step % config.trace_every == 0:
                    run.write_trace(step, table)
            last = step + 1 == config.steps
            if last or (config.eval_every and (step + 1) % config.eval_every == 0):
                with seconds("evaluate"):
                    record["eval_accuracy"] = run.evaluate(step)
            if last or (step + 1) % config.checkpoint_every == 0:
                with seconds("checkpoint"):
                    save_checkpoint(run_folder, step + 1, run.learner.state_dict())
            run.write(record | {"seconds": seconds.spent})
            on_step(record | {"seconds": seconds.spent})
            if stop() and not last:
                save_checkpoint(run_folder, step + 1, run.learner.state_dict())
                return False
        run.save_model()
        return True
    finally:
        run.close()


class _Seconds:
    """The wall time of every phase of a step."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spent[phase] = self.spent.get(phase, 0.0) + time.perf_counter() - began


class _Run:
    """Engine, learner, task and grader of a run, and the files that it writes."""

    def __init__(self, config: TrainConfig, run_folder: Path) -> None:
        self.config, self.folder = config, run_folder
        run_folder.mkdir(parents=True, exist_ok=True)
        write_atomically(run_folder / FILE_NAME, config.to_toml())
        self._threads = set_threads(config.threads or None, config.model)
        algorithm = find(config.algorithm)
        self._sampling = SamplingSettings(temperature=config.temperature, max_tokens=config.max_tokens)
        self._tokenizer = load_tokenizer(config.model)
        extra = {} if config.kv_cache_dtype == "auto" else {"kv_cache_dtype": config.kv_cache_dtype}
        settings = EngineSettings(
            config.model, self._sampling, algorithm.needs_top_k, config.rollout_dtype, config.seed,
            run_folder / "log" / f"{config.engine}.log", extra,
        )  # fmt: skip
        self.engine: Engine = create_engine(config.engine, settings)
        self.task = Task(config, self._tokenizer, self.engine.max_model_len)
        trainer = Trainer.load(
            config.model, sampling=self._sampling, dtype=config.trainer_dtype, attn_implementation=config.attn or None
        )
        self.learner = Learner(trainer, algorithm, self._sampling, _learner_settings(config))
        self._grader = Grader()

    def restore(self) -> int:
        """Go back to the newest checkpoint; the first step that is still to do."""
        state = latest_checkpoint(self.folder)
        first = 0 if state is None else int(state["step"])
        if state is not None:
            self.learner.load_state_dict(state)
            self.engine.load_weights(self.learner.model)
        cut_back(self.folder, first)
        return first

    def sample(self, posed: list[Posed], step: int, samples: int) -> list[Any]:
        seeds = [sample_seed(self.config.seed, p.problem.prompt_id, i % samples, step) for i, p in enumerate(posed)]
        requests = [Request(p.prompt_ids, seed) for p, seed in zip(posed, seeds, strict=True)]
        return sample_checked(self.engine, requests, [p.problem.prompt_id for p in posed], lambda _: None)

    def grade(self, posed: list[Posed], rollouts: list[Any]) -> np.ndarray:
        pairs = zip(posed, rollouts, strict=True)
        rewards = [self.task.reward(p, r.response_ids, r.finish_reason, self._grader) for p, r in pairs]
        return np.array(rewards, dtype=np.float32)

    def recompute(self, step: Step) -> list[np.ndarray] | None:
        """log π at the weights that sampled, where the algorithm or the user wants it."""
        if not (self.config.recompute or self.learner.algorithm.needs_recomputed):
            return None
        requests = [ScoreRequest(r.prompt_ids, r.response_ids) for r in step.rollouts]
        return [s.logp_T for s in self.learner.trainer.score(requests, token_budget=self.config.token_budget)]

    def minibatches(self, step: int, responses: int) -> Iterator[tuple[int, int, list[int]]]:
        """Epoch, number and rows of every minibatch, shuffled by seed, step and epoch."""
        for epoch in range(self.config.epochs):
            order = list(range(responses))
            random.Random(f"{self.config.seed}/{step}/{epoch}").shuffle(order)
            for minibatch, rows in enumerate(np.array_split(order, self.config.minibatches)):
                yield epoch, minibatch, rows.tolist()

    def sample_of(self, step: Step, row: int) -> Sample:
        recomputed = None if step.recomputed is None else step.recomputed[row]
        return Sample(step.rollouts[row], float(step.advantage_S[row]), recomputed)

    def prove_sync(self, step: Step) -> str:
        """The first minibatch was judged by the weights that sampled: there log π must be log μ."""
        if (self.config.trainer_dtype, self.config.rollout_dtype) != ("float32", "float32"):
            return "unproven"
        first = step.uses[0]
        return prove_equal([step.rollouts[row].logp_rollout_T for row in first.rows], first.update.logp)

    def evaluate(self, step: int) -> float:
        """Mean accuracy over every problem, `eval_samples` samples each, by the engine as it is now."""
        posed = [p for p in self.task.posed for _ in range(self.config.eval_samples)]
        rollouts = self.sample(posed, -1 - step, self.config.eval_samples)
        return float(self.grade(posed, rollouts).mean())

    def write(self, record: Record) -> None:
        with open(self.folder / METRICS_FILE, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")

    def save_model(self) -> None:
        """What was learnt, as a model folder that `probe` can read."""
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.learner.model.save_pretrained(self.folder / "model")
        self._tokenizer.save_pretrained(self.folder / "model")

    def write_trace(self, step: int, table: Any) -> None:
        folder = self.folder / "traces" / f"step-{step}"
        write_vocabulary(folder, self._tokenizer)
        write_manifest(folder, self._manifest())
        write_shard(shard_path(folder, 0), table)

    def _manifest(self) -> dict[str, Any]:
        sampling = vars(self._sampling)
        return {
            "rollout": self.engine.describe(),
            "trainer": self.learner.trainer.describe(),
            "config": {"sampling": dict(sampling), "seed": self.config.seed},
            "algorithm": self.config.algorithm,
            "libraries": library_versions(),
            "threads": self._threads,
        }

    def close(self) -> None:
        self._grader.__exit__(None, None, None)
        self.engine.close()


def _learner_settings(config: TrainConfig) -> LearnerSettings:
    return LearnerSettings(
        learning_rate=config.learning_rate,
        max_tokens=config.max_tokens,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        aggregation=config.aggregation,
        token_budget=config.token_budget,
    )
