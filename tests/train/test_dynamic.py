"""Dynamic sampling: groups that teach nothing are replaced by problems that seed and step
decide.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.places import bundled
from mismatch_cli.models.loading import load_tokenizer
from mismatch_cli.trace.reader import Trace
from mismatch_cli.train.task import Task
from mismatch_cli.train.train_config import load_config
from tests.train.ranks.on_ranks import run_on
from tests.train.small_runs import DYNAMIC, SMALL, numbers, run, trained_dynamically


def groups(folder: Path, step: int) -> dict[int, list[float]]:
    """The problems of a step with the rewards of their responses."""
    (batch,) = Trace.open(folder / "traces" / f"step-{step}").batches()
    rewards_by_group = {
        int(i): sorted(batch.reward_S[batch.prompt_id_S == i].tolist())
        for i in np.unique(batch.prompt_id_S)
    }
    assert {len(rewards) for rewards in rewards_by_group.values()} == {
        DYNAMIC["samples_per_prompt"]
    }
    return rewards_by_group


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dynamic")
    trained_dynamically(folder)
    return folder


def test_a_step_learns_from_groups_that_teach(alone):
    """Of 18 problems, only every third has rewards that differ within its group; a step has
    four.
    """
    lines = numbers(alone / "run")
    assert [line["sampled"]["groups"] % 4 for line in lines] == [0, 0]
    for line in lines:
        earned, samples = groups(alone / "run", line["step"]), line["sampled"]
        teaching = [i for i, rewards in earned.items() if rewards[0] < rewards[-1]]
        assert len(earned) == 4 and all(i % 3 == 0 for i in teaching)
        assert len(teaching) == min(4, samples["teaching"]) > 1
        # It used all its attempts before it filled up with others
        assert samples["groups"] == 12 or len(teaching) == 4
        assert line["grad_norm"] > 0
        assert 0 < samples["reward"] < 1 and samples["reward"] != pytest.approx(line["reward"])


@pytest.mark.slow
def test_two_ranks_choose_the_same(alone, tmp_path):
    """Each response has its own batch here, so both sample the same; only the order of sums
    differs.
    """
    run_on(2, "dynamic", tmp_path)
    for expected, record in zip(numbers(alone / "run"), numbers(tmp_path / "run"), strict=True):
        assert expected["sampled"] == pytest.approx(record["sampled"])
        assert (
            expected["reward"] == pytest.approx(record["reward"])
            and expected["length"] == record["length"]
        )
        assert groups(alone / "run", expected["step"]) == groups(tmp_path / "run", expected["step"])


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one(alone, tmp_path):
    trained_dynamically(tmp_path, stop_after=1)
    trained_dynamically(tmp_path, resume=True)
    assert numbers(tmp_path / "run") == numbers(alone / "run")


def task_of(**changes: Any) -> Task:
    task = Task(load_config("miniature", SMALL | changes), load_tokenizer(str(bundled("model"))))
    task.pose(512)
    return task


def test_other_problems_are_new_to_the_step_and_distinct():
    task = task_of(num_problems=11, prompts_per_step=3, dynamic_sampling=5)
    for step in range(1, 5):
        own = [posed.problem.prompt_id for posed in task.of_step(step)]
        others = [
            [posed.problem.prompt_id for posed in batch] for batch in task.others_of_step(step)
        ]
        assert [len(batch) for batch in others] == [3, 3]  # whole batches: every rank has its share
        flat = own + [i for batch in others for i in batch]
        assert len(set(flat)) == len(flat) == 9
        assert others == [
            [posed.problem.prompt_id for posed in batch] for batch in task.others_of_step(step)
        ]
    assert not list(task_of(num_problems=11, prompts_per_step=3).others_of_step(1))


def test_without_other_problems_there_is_nothing_to_sample():
    with pytest.raises(
        UsageError, match=r"a step has 4 of only 7\. Use --prompts-per-step 3 or less"
    ):
        task_of(num_problems=7, prompts_per_step=4, dynamic_sampling=2)


def test_a_step_without_such_groups_is_as_large_as_any(tmp_path):
    """All rewards are equal: it samples as many problems as it may, and learns nothing."""
    (tmp_path / "mine.py").write_text(
        "def same(responses):\n    return [0.25] * len(responses)\n", encoding="utf-8"
    )
    settings = {
        "steps": 1,
        "dynamic_sampling": 1,
        "num_problems": 8,
        "max_tokens": 8,
        "trace_every": 1,
    }
    run(tmp_path / "run", reward=f"{tmp_path}/mine.py:same", **settings)
    (line,) = [line for line in numbers(tmp_path / "run") if line["step"]]
    assert line["sampled"] == {"groups": 8, "teaching": 0, "reward": 0.25}
    assert line["reward"] == 0.25 and line["grad_norm"] == 0
