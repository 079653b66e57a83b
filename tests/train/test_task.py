"""Which problems a step samples, what is checked before anything loads, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.places import bundled
from mismatch_cli.models.loading import load_tokenizer
from mismatch_cli.rules.batch import Rollout
from mismatch_cli.train.task import EncodedProblem, Task, _grader, check_ranks, check_runs
from mismatch_cli.train.train_config import load_config
from tests.train.small_runs import SMALL, game_file, run

CONTEXT = 512


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(bundled("model")))


def posed_task(tokenizer: Any, **changes: Any) -> Task:
    task = Task(load_config("miniature", SMALL | changes), tokenizer)
    task.pose(CONTEXT)
    return task


def ids(posed: list[EncodedProblem]) -> list[int]:
    return [p.problem.prompt_id for p in posed]


@pytest.mark.parametrize(("problems", "per_step"), [(10, 5), (4, 4), (1, 1), (11, 4), (12, 4)])
def test_an_epoch_samples_every_problem_once_except_the_remainder(tokenizer, problems, per_step):
    task = posed_task(tokenizer, num_problems=problems, prompts_per_step=per_step)
    per_epoch = problems // per_step
    epochs = []
    for epoch in range(6):
        steps = range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)
        order = [i for step in steps for i in ids(task.of_step(step))]
        assert len(set(order)) == len(order) == per_epoch * per_step
        epochs.append(order)
    # No problem is left out forever
    assert {i for order in epochs for i in order} == set(range(problems))
    assert problems == 1 or len({tuple(order) for order in epochs}) > 1


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_skipped_problems_are_reported(tokenizer, tmp_path):
    rows: list[dict[str, Any]] = [{"problem": f"{i} + 1?", "answer": str(i + 1)} for i in range(6)]
    rows[1]["answer"], rows[4]["problem"] = "", "and " * 600
    training = write(tmp_path / "training.jsonl", rows)
    evaluation = write(tmp_path / "evaluation.jsonl", rows[:2])
    task = posed_task(tokenizer, dataset=training, eval_dataset=evaluation)
    assert ids(task.posed) == [0, 2, 3, 5] and ids(task.evaluation["evaluation"]) == [0]
    assert task.left_out[:2] == [
        f"{training}: skipping 1 of 6 problems that have no answer.",
        f"{evaluation}: skipping 1 of 2 problems that have no answer.",
    ]
    assert (
        "training.jsonl: skipping 1 of 5 problems, the first (row 4) because the prompt has"
        in task.left_out[2]
    )
    assert len(task.left_out) == 3


def test_without_their_own_set_evaluations_use_the_training_problems(tokenizer):
    task = posed_task(tokenizer)
    assert ids(task.evaluation["perfectible"]) == list(range(8))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dataset": "gone.jsonl"}, "gone.jsonl does not exist"),
        ({"eval_dataset": "gone.jsonl"}, "gone.jsonl does not exist"),
        ({"eval_dataset": "{unanswered}"}, "unanswered.jsonl has no problem with an answer"),
        (
            {"eval_dataset": "{unanswered}", "prompt_field": "problem", "answer_field": "answer"},
            "no problem with|field",
        ),
        ({"num_problems": 3}, "more than the 3 problems available"),
        ({"prompt_template": "r1"}, "Unknown template 'r1'"),
        ({"aggregation": "sum"}, "Unknown aggregation 'sum'"),
        ({"reward": "{mine}:absent"}, "mine.py has no function 'absent'"),
        ({"reward": "gone.py:reward"}, "no such function"),
    ],
)
def test_bad_data_is_reported_before_an_engine_loads(changes, said, tmp_path, monkeypatch):
    def not_yet(*_: Any) -> None:
        raise AssertionError("the engine was loaded first")

    monkeypatch.setattr("mismatch_cli.train.run.create_engine", not_yet)
    (tmp_path / "mine.py").write_text("def reward(response):\n    return 1.0\n", encoding="utf-8")
    files = {
        "unanswered": write(tmp_path / "unanswered.jsonl", [{"problem": "1 + 1?"}]),
        "mine": str(tmp_path / "mine.py"),
    }
    changes = {
        name: value.format(**files) if isinstance(value, str) else value
        for name, value in changes.items()
    }
    with pytest.raises(MismatchError, match=said):
        run(tmp_path / "run", **changes)


@pytest.mark.parametrize(
    ("refused", "said", "accepted"),
    [
        (
            {"algorithm": "gbpo", "minibatches": 5},
            "gbpo needs all samples of a problem together, and 4 problems",
            [{"algorithm": "gbpo", "minibatches": 4}, {"algorithm": "m2po", "minibatches": 5}],
        ),
        (
            {"algorithm": "ppo-ewma"},
            "ppo-ewma needs a moving average",
            [{"algorithm": "ppo-ewma", "average_decay": 0.5}, {"algorithm": "ppo"}],
        ),
    ],
    ids=["complete groups", "an average of the weights"],
)
def test_what_an_algorithm_needs_is_checked_before_the_run(refused, said, accepted):
    """With four problems in each step."""
    for changes in accepted:
        check_runs([load_config("miniature", SMALL | changes)])
    with pytest.raises(UsageError, match=said):
        check_runs([load_config("miniature", SMALL | refused)])


@pytest.mark.parametrize(
    ("problems", "engine", "answers"),
    [
        (3, 1, {1: "", 3: "", 4: "share 3 problems per step: .* Use --nproc 3"}),
        (5, 2, {
            1: "1 rank cannot form engines of 2 .*: add --nproc 2",
            2: "",
            3: "add --nproc 4",
            4: "",
            5: "5 ranks cannot form engines of 2 .*: add --nproc 4",
            6: "6 ranks cannot share 5 problems per step: .* Use --nproc 4",
        }),
        (4, 4, {3: "add --nproc 4", 4: "", 8: "Use --nproc 4"}),
        (3, 4, {4: "An engine of 4 ranks cannot share 3 problems .* Use --prompts-per-step 4"}),
    ],
)  # fmt: skip
def test_the_nearest_number_of_ranks_that_can_share_a_step(problems, engine, answers):
    changes = {"prompts_per_step": problems, "tensor_parallel": engine, "minibatches": 1}
    config = load_config("miniature", SMALL | changes)
    for ranks, said in answers.items():
        if said:
            with pytest.raises(UsageError, match=said):
                check_ranks(config, ranks)
        else:
            check_ranks(config, ranks)


def test_cpu_offload_needs_a_second_rank():
    config = load_config("miniature", SMALL | {"cpu_offload": True})
    check_ranks(config, 2)
    with pytest.raises(UsageError, match="Add --nproc 2 or more"):
        check_ranks(config, 1)


def test_the_token_that_ends_a_response_is_not_part_of_its_text(tokenizer, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def length(response):\n    return len(response)\n", encoding="utf-8"
    )
    task = posed_task(tokenizer, reward=f"{tmp_path}/mine.py:length")
    text = tokenizer.encode("so 4", add_special_tokens=False)
    end = tokenizer.eos_token_id

    def reward(response_ids: list[int], finish_reason: str) -> float:
        zeros = np.zeros(len(response_ids), dtype=np.float32)
        rollout = Rollout(
            [1], response_ids, zeros, zeros.astype(np.int32), None, None, finish_reason
        )
        return task.grader.rewards([task.posed[0].problem], [rollout])[0]

    assert reward([*text, end], "stop") == reward(text, "length") == 4
    assert reward([end], "stop") == 0  # an empty response
    task.grader.stop()


@pytest.mark.parametrize("chat_template", [None, "{{ messages }}"])
def test_a_chat_template_makes_conversations_of_problems(chat_template, monkeypatch):
    """Of which the grader hands a reward function the answers as messages."""
    monkeypatch.setattr("mismatch_cli.train.task.Grader", lambda _, **options: options["chat"])
    tokenizer = SimpleNamespace(decode=str, chat_template=chat_template)
    config = load_config("miniature", SMALL)
    assert _grader(config, tokenizer) == (chat_template is not None)


def test_generated_episodes_are_evaluated_under_their_own_name(tokenizer, tmp_path):
    """Not under that of the bundled problems, which are not used."""
    game = {"environment": game_file(tmp_path), "num_problems": 0}
    for counts, sizes in (({"episodes": 8}, [8]), ({"episodes": 8, "eval_episodes": 3}, [3])):
        task = posed_task(tokenizer, **game, **counts)
        task.grader.stop()
        assert (
            list(task.evaluation) == ["episodes"]
            and [len(one) for one in task.evaluation.values()] == sizes
        )
