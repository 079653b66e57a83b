"""The current accuracy on each evaluation set, with its own sampling settings."""

from __future__ import annotations

from dataclasses import replace
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
    return replace(
        training,
        temperature=config.evaluation.temperature or config.sampler.temperature,
        top_p=config.evaluation.top_p,
    )


def evaluate(run: RunInProgress, step: int) -> Record:
    """avg@k of each set by name (mean over problems of the mean over `eval_samples` samples), and
    the mean over sets.

    Each set counts once, however many problems it has.
    """
    config, sets = run.config, run.task.evaluation
    posed = [
        p
        for p in run.share([p for ps in sets.values() for p in ps])
        for _ in range(config.evaluation.samples)
    ]
    # Numbers below 1 have seeds that no training step uses.
    with run.newest_weights():
        rollouts = run.sample(posed, -step, config.evaluation.samples, evaluation_sampling(config))
    reward_S = np.concatenate(run.world.gather(run.grade(posed, rollouts)))
    ends = np.cumsum([config.evaluation.samples * len(problems) for problems in sets.values()])[:-1]
    found = {
        name: mean_reward(part_S.astype(np.float64))
        for name, part_S in zip(sets, np.split(reward_S, ends), strict=True)
    }
    return {"eval_accuracy": sum(found.values()) / len(found), "eval": found}


def evaluate_before(run: RunInProgress) -> None:
    """Evaluate before the first step, as the line of step 0."""
    found = evaluate(run, 0)
    by_set = ", ".join(f"{name} {accuracy:.3f}" for name, accuracy in found["eval"].items())
    run.say(
        f"Accuracy before the first step: {found['eval_accuracy']:.3f}"
        + f" ({by_set})" * (len(found["eval"]) > 1)
    )
    run.write({"step": 0} | found)
    run.save(0)  # a resumed run does not evaluate again, and knows what took too long to grade
