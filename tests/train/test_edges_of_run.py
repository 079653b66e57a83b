"""Whether a run without checkpoints begins again, and what a checkpoint brings back."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.probe.tasks.answers import no_answers, without_answer
from mismatch_cli.processes.ranks import ALONE, World
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.train.checkpoint import METRICS_FILE
from mismatch_cli.train.run import RunInProgress


def without_checkpoints(folder: Path, recorded: int) -> SimpleNamespace:
    """A run of 9 steps with a checkpoint after every third, and the steps that it has recorded;
    `cut` is the step to which it is cut back.
    """
    lines = [json.dumps({"step": step}) for step in range(recorded + 1)]
    (folder / METRICS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    cut: list[int] = []
    return SimpleNamespace(
        config=SimpleNamespace(checkpoint_every=3, steps=9),
        folder=folder,
        world=ALONE,
        cut=cut,
        _cut_back=cut.append,
    )


@pytest.mark.parametrize("recorded", [0, 2, 3])
def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path, recorded):
    """The line of the third step is written before its checkpoint."""
    run = without_checkpoints(tmp_path, recorded)
    assert RunInProgress.restore(run) is None
    assert run.cut == [-1]


@pytest.mark.parametrize(("recorded", "has_model"), [(3, True), (4, False)])
def test_a_run_that_has_lost_its_checkpoints_is_left_alone(tmp_path, recorded, has_model):
    run = without_checkpoints(tmp_path, recorded)
    if has_model:
        (tmp_path / "model").mkdir()
    with pytest.raises(MismatchError, match="its checkpoints are gone"):
        RunInProgress.restore(run)
    assert run.cut == []


def at_checkpoint(folder: Path, step: int, first: bool, monkeypatch: Any) -> SimpleNamespace:
    """The same run at this checkpoint, on the first rank or another; `parts` and `states` are what
    its learner and its weight sync get, and what its grader gets.
    """
    run = without_checkpoints(folder, step)
    judge = {"given_up": ["a question"], "timeouts": 2, "unstated": 3}
    facts = {"learner": "of the learner", "sync": "of the sync", "judge": judge}
    checkpoint = SimpleNamespace(step=step, facts=facts, load="the tensors")
    monkeypatch.setattr("mismatch_cli.train.run.latest_checkpoint", lambda *_: checkpoint)
    run.parts, run.states = [], []
    run.learner = run.sync = SimpleNamespace(restore=lambda *part: run.parts.append(part))
    run.task = SimpleNamespace(grader=SimpleNamespace(load_state_dict=run.states.append))
    run.world = SimpleNamespace(first=first, broadcast=lambda value: value)
    run._has_model = False
    return run


@pytest.mark.parametrize(
    ("stated", "unstated", "warning"),
    [
        (0, 4, [no_answers(4, 1, 9)]),
        (0, 0, [no_answers(4, 1, 9)]),
        (1, 3, [without_answer(3, 4)]),
        (2, 2, []),
        (3, 1, []),
    ],
)
def test_most_responses_without_an_answer_are_said_once(stated, unstated, warning):
    messages: list[str] = []
    config = SimpleNamespace(
        task=SimpleNamespace(reward=None), turns=SimpleNamespace(environment=None),
        sampler=SimpleNamespace(max_tokens=9),
    )  # fmt: skip
    run = SimpleNamespace(
        config=config, say=messages.append, _answers=(5, 1), _warned_of_answers=False
    )
    responses = SimpleNamespace(truncated_S=np.arange(4) == 0, reward_S=np.zeros(4))
    for step in (1, 2):
        answers = (5 + step * stated, 1 + step * unstated)
        RunInProgress._warn_of_no_answers(run, answers, responses)
    assert messages == warning


@pytest.mark.parametrize("algorithm", ["gbpo", "m2po", "ppo"])
def test_only_a_rule_that_looks_at_groups_keeps_them_in_one_minibatch(algorithm):
    """Two minibatches of each epoch, of four problems with three samples."""
    config = SimpleNamespace(
        sampler=SimpleNamespace(samples_per_prompt=3, seed=0),
        prompts_per_step=4, minibatches=2, epochs=2,
    )  # fmt: skip
    learner = SimpleNamespace(algorithm=parse_algorithm(algorithm, training=True))
    parts, first_half, second_half = (
        RunInProgress.minibatches(
            SimpleNamespace(config=config, learner=learner, world=world), step=0
        )
        for world in (ALONE, World(0, 2), World(1, 2))
    )
    assert [(part.epoch, part.number) for part in parts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for first, other in (parts[:2], parts[2:]):
        assert len(first.rows) == 6 and sorted(first.rows + other.rows) == list(range(12))
        problems = {row // 3 for row in first.rows}
        assert (len(problems) == 2) == (algorithm == "gbpo")
    # Each rank has its own problems
    for part, first, second in zip(parts, first_half, second_half, strict=True):
        assert first.rows == [row for row in part.rows if row < 6]
        assert second.rows == [row - 6 for row in part.rows if row >= 6]


@pytest.mark.parametrize(("step", "model", "is_done"), [
    (9, "model", True), (9, "another", False), (6, "model", False),
])  # fmt: skip
def test_only_a_model_of_the_last_step_is_not_saved_again(
    tmp_path, monkeypatch, step, model, is_done
):
    """A model beside an earlier checkpoint is of a run that was shorter."""
    (tmp_path / model).mkdir()
    run = at_checkpoint(tmp_path, step, True, monkeypatch)
    assert RunInProgress.restore(run) == step and run.cut == [step]
    assert run.parts == [("of the learner", "the tensors"), ("of the sync", "the tensors")]
    assert run._has_model is is_done


@pytest.mark.parametrize(("first", "counts"), [(True, (2, 3)), (False, (0, 0))])
def test_every_rank_knows_the_questions_given_up_and_one_has_their_counts(
    tmp_path, monkeypatch, first, counts
):
    run = at_checkpoint(tmp_path, 3, first, monkeypatch)
    RunInProgress.restore(run)
    (state,) = run.states
    assert state["given_up"] == ["a question"]
    assert (state["timeouts"], state["unstated"]) == counts


def test_answers_before_a_resumed_run_are_not_those_of_its_first_step(tmp_path, monkeypatch):
    """Its grader counts responses without an answer from the checkpoint on, others from 0."""
    run = at_checkpoint(tmp_path, 3, True, monkeypatch)
    RunInProgress.restore(run)
    run.config.task, run.config.turns = SimpleNamespace(reward=None), SimpleNamespace(environment=0)
    messages: list[str] = []
    run.say, run._warned_of_answers = messages.append, False
    responses = SimpleNamespace(truncated_S=np.zeros(4), reward_S=np.zeros(4))
    RunInProgress._warn_of_no_answers(run, (3, 4), responses)
    assert messages == []
    RunInProgress._warn_of_no_answers(run, (4, 7), responses)
    assert messages == [without_answer(3, 4)]


@pytest.mark.parametrize(("staleness", "minibatches", "epochs", "share", "is_read"), [
    (0, 1, 1, 0.1, False), (0, 2, 1, 0.1, True), (0, 1, 2, 0.1, True), (1, 1, 1, 0.1, True),
    (1, 2, 2, 0.0, False),
])  # fmt: skip
def test_references_are_read_where_an_update_is_made_at_other_weights(
    monkeypatch, staleness, minibatches, epochs, share, is_read
):
    monkeypatch.setattr("mismatch_cli.train.run.references", lambda *_: {0: "a reference"})
    config = SimpleNamespace(
        staleness=staleness, minibatches=minibatches, epochs=epochs, bounds_share=share
    )
    learner = SimpleNamespace(trainer=None, past=SimpleNamespace(sampling_weights=nullcontext))
    run = SimpleNamespace(config=config, learner=learner, _sampling=None, world=ALONE)
    step = SimpleNamespace(rollouts=[], hash_S=None)
    assert bool(RunInProgress.references(run, step)) is is_read
