"""The current accuracy on each evaluation set, with its own sampling settings."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.train.step import mean_reward

if TYPE_CHECKING:
    from mismatch_cli.train.run import Record, RunInProgress
    from mismatch_cli.train.train_config import TrainConfig


def evaluation_sampling(config: TrainConfig) -> SamplingSettings:
    """The sampling settings of training, except those that evaluations set themselves."""
    training = SamplingSettings(
        temperature=config.sampler.temperature, max_tokens=config.sampler.max_tokens
    )
    temperature = config.evaluation.temperature or training.temperature
    return replace(training, temperature=temperature, top_p=config.evaluation.top_p)


def evaluate(run: RunInProgress, step: int) -> Record:
    """avg@k of each set by name (mean over problems of the mean over `eval_samples` samples), and
    the mean over sets.

    Each set counts once, however many problems it has.
    """
    sets = run.task.evaluation
    samples = run.config.evaluation.samples
    own = run.share(list(chain.from_iterable(sets.values())))
    posed = [problem for problem in own for _ in range(samples)]
    with run.newest_weights():
        # Numbers below 1 have seeds that no training step uses.
        rollouts = run.sample(posed, -step, samples, evaluation_sampling(run.config))
    reward_S = np.concatenate(run.world.gather(run.grade(posed, rollouts)))
    ends = np.cumsum([samples * len(problems) for problems in sets.values()])[:-1]
    accuracy = {}
    for name, of_set_S in zip(sets, np.split(reward_S, ends), strict=True):
        accuracy[name] = mean_reward(of_set_S.astype(np.float64))
    return {"eval_accuracy": sum(accuracy.values()) / len(accuracy), "eval": accuracy}


def evaluate_before(run: RunInProgress) -> None:
    """Evaluate before the first step, as the line of step 0."""
    evaluation = evaluate(run, 0)
    sentence = f"Accuracy before the first step: {evaluation['eval_accuracy']:.3f}"
    if len(evaluation["eval"]) > 1:
        by_set = [f"{name} {accuracy:.3f}" for name, accuracy in evaluation["eval"].items()]
        sentence += f" ({', '.join(by_set)})"
    run.say(sentence)
    run.write({"step": 0} | evaluation)
    run.save(0)  # a resumed run does not evaluate again, and knows what took too long to grade
