"""The sanity test from top to bottom: sample, grade, learn, sync, record, again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mismatch_cli.base.errors import MismatchError, first_line
from mismatch_cli.base.memory import release
from mismatch_cli.processes.ranks import ALONE, World
from mismatch_cli.processes.ranks.joined import is_lost_rank, lost_rank
from mismatch_cli.train.dynamic import with_other_problems
from mismatch_cli.train.evaluation import evaluate, evaluate_before
from mismatch_cli.train.run import Record, RunInProgress
from mismatch_cli.train.step import Step
from mismatch_cli.train.train_config import TrainConfig


def train(
    config: TrainConfig,
    run_folder: Path,
    on_step: Callable[[Record], None],
    *,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda _: None,
    on_phase: Callable[[str], None] = lambda _: None,
    world: World = ALONE,
    framework: str = "",
) -> bool:
    """Run the loop, or resume it; every step is a line of metrics.jsonl before `on_step` is called.

    `stop` is called after every step: True saves a checkpoint there and ends. `say` gets what the
    user should know before the first step, `on_phase` the name of each phase that begins. With
    `framework`, every line also has that framework's metrics of the gap, by its names. Returns
    whether all steps are done.

    Every rank of a `world` runs it: alone until its problems have advantages, then with the others.
    Only the first rank writes files and calls the callbacks.
    """
    with _running(config, run_folder, say, on_phase, world) as run:
        run.framework = framework
        seconds = _Seconds(on_phase)
        first_step = _begin(run, resume, seconds)
        for step in range(first_step, config.steps + 1):
            record = _take_step(run, step, seconds)
            record["seconds"] = seconds.spent
            run.write(record)
            if world.first:
                on_step(record)
            release()
            seconds = _Seconds(on_phase)
            last = step == config.steps
            ends_here = world.broadcast(stop())
            if last or ends_here or step % config.checkpoint_every == 0:
                # After the line, which no kill loses; its time is in the next one.
                with seconds("checkpoint"):
                    run.save(step)
            if ends_here and not last:
                return False
        run.save_model()
        return True


def _begin(run: RunInProgress, resume: bool, seconds: _Seconds) -> int:
    """Restore the newest checkpoint, if the run is to resume and has one, and give the engine the
    weights; returns the first step to take.
    """
    done = run.restore() if resume else None
    first_step = 1 if done is None else done + 1
    # Now, and not only after a step: the engine may have read the model in a different precision.
    run.load_weights(first_step, at_start=True)
    if done is None and run.config.evaluation.every:
        with seconds("evaluate"):
            evaluate_before(run)
    return first_step


def _take_step(run: RunInProgress, step: int, seconds: _Seconds) -> Record:
    """Sample, grade, learn, sync and record one step; returns its line without times."""
    evaluation = run.config.evaluation
    current = _sample_and_grade(run, step, seconds)
    with seconds("recompute"):
        current.recomputed = run.recompute(current)
    with seconds("bounds"):
        current.references = run.references(current)
    batches = run.minibatches(step)
    with seconds("sync"):
        run.sync.score_before_update(step, run.samples(current, batches[0]))
    with seconds("update"):
        run.learn(current, batches)
    with seconds("sync"):
        first_minibatch = run.samples(current, batches[0])
        proof = run.sync.prove(step, first_minibatch, current.first_logp)
        run.load_weights(step + 1)
    with seconds("record"):
        record = run.record(current) | proof
    is_evaluated = evaluation.every and step % evaluation.every == 0
    if is_evaluated or step == run.config.steps:
        with seconds("evaluate"):
            record |= evaluate(run, step)
    return record


def _sample_and_grade(run: RunInProgress, step: int, seconds: _Seconds) -> Step:
    """The responses of a step, graded; for the extra ones of dynamic sampling, grading counts as
    sampling.
    """
    samples = run.config.sampler.samples_per_prompt
    problems = run.share(run.task.of_step(step))
    posed = [problem for problem in problems for _ in range(samples)]
    with seconds("sample"):
        rollouts = run.sample(posed, step, samples)
    with seconds("grade"):
        current = run.graded(step, posed, rollouts)
    if run.config.dynamic_sampling:
        with seconds("sample"):
            current = with_other_problems(run, current)
    return current


@contextmanager
def _running(
    config: TrainConfig,
    run_folder: Path,
    say: Callable[[str], None],
    on_phase: Callable[[str], None],
    world: World,
) -> Iterator[RunInProgress]:
    """A run that is always closed; an error in torch ends it with a message that says how to
    resume.
    """
    run = None
    try:
        run = RunInProgress(config, run_folder, say, on_phase, world)
        yield run
    # torch raises these for everything: no memory, a lost device.
    except (RuntimeError, MemoryError) as error:
        if world.size > 1 and is_lost_rank(error):
            advice = (
                "Every finished step is on record: continue from the newest checkpoint with "
                "--resume, or let max_restarts = N do it automatically."
            )
            raise lost_rank(world, advice) from error
        kind = type(error).__name__
        memory = ""
        if "Memory" in kind:
            memory = " A new run with a lower --token-budget needs less memory."
        raise MismatchError(
            f"Training failed ({kind}: {first_line(error)}). Every finished step is on record: "
            f"continue from the newest checkpoint with --resume.{memory} MISMATCH_DEBUG=1 "
            "shows where it failed."
        ) from error
    finally:
        if run is not None:
            run.close()


class _Seconds:
    """The wall time of every phase of a step; `on_phase` is called when one begins."""

    def __init__(self, on_phase: Callable[[str], None]) -> None:
        self.spent: dict[str, float] = {}
        self._on_phase = on_phase

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._on_phase(phase)
        began = time.perf_counter()
        yield
        self.spent[phase] = self.spent.get(phase, 0.0) + time.perf_counter() - began
