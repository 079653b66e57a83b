"""Reward functions as TRL's GRPOTrainer calls them: keyword lists of completions, prompts, ids
and columns.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.probe.tasks.grading import group_mean_advantages
from mismatch_cli.probe.tasks.prompts import PromptSource, load_problems
from mismatch_cli.probe.tasks.rewards import AnsweredResponse

# The forms in TRL's guide, with our own bodies: only ids, text, messages, a column, several tasks,
# a coroutine.
FUNCTIONS = """
import asyncio

def longer(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def ends_with_digit(completions, **kwargs):
    return [1.0 if text[-1:].isdigit() else 0.0 for text in completions]

def of_messages(prompts, completions, **kwargs):
    pairs = [(prompt[-1], completion[0]) for prompt, completion in zip(prompts, completions)]
    assert {(asked["role"], said["role"]) for asked, said in pairs} == {("user", "assistant")}, pairs
    return [float(asked["content"] == said["content"]) for asked, said in pairs]

def against(completions, ground_truth, **kwargs):
    return [1.0 if text == truth else 0.0 for text, truth in zip(completions, ground_truth)]

def named_alone(completions, answer): return [float(text == a) for text, a in zip(completions, answer)]

def one_task(prompts, completions, task, **kwargs):
    return [float(len(text)) if kind == "math" else None for text, kind in zip(completions, task)]

async def awaited(completions, **kwargs):
    await asyncio.sleep(0)
    return [2.0] * len(completions)

def columns(completions, **kwargs):
    assert sorted(kwargs) == ["answer", "completion_ids", "ground_truth", "prompts", "task", "when"], sorted(kwargs)
    return [float(kwargs["when"][0] == "2026-11-24")] * len(completions)
"""
ROWS = [
    AnsweredResponse(
        "4",
        "4",
        "2 + 2",
        "stop",
        {"ground_truth": "4", "task": "math", "when": "2026-11-24"},
        (5, 2),
    ),
    AnsweredResponse(
        "x",
        "5",
        "2 + 3",
        "length",
        {"ground_truth": "5", "task": "code", "when": "2026-11-25"},
        (7, 8, 9),
    ),
]


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("longer", [2, 3]),
        ("ends_with_digit", [1, 0]),
        ("against", [1, 0]),
        ("named_alone", [1, 0]),
        ("awaited", [2, 2]),
        ("columns", [1, 1]),
    ],
)
def test_it_gets_lists_by_keyword(reward_of, name, rewards):
    assert reward_of(name).grade_all(ROWS) == rewards


def test_a_chat_template_makes_conversations(reward_of):
    rows = [
        ROWS[0]._replace(response="2 + 2"),
        ROWS[1],
        ROWS[1]._replace(problem=[{"role": "user", "content": "x"}]),
    ]
    assert reward_of("of_messages", conversational=True).grade_all(rows) == [1, 0, 1]


def test_none_is_not_a_reward_and_a_missing_column_is_named(reward_of):
    first, second = reward_of("one_task").grade_all(ROWS)
    assert first == 1 and math.isnan(second)
    with pytest.raises(
        MismatchError, match="missing 1 required positional argument: 'ground_truth'"
    ):
        reward_of("against").grade_all([row._replace(columns={}) for row in ROWS])


def test_a_response_without_reward_teaches_nothing_and_enters_no_mean():
    found_S = group_mean_advantages(
        np.array([1, np.nan, 0, np.nan, np.nan]), np.array([0, 0, 0, 1, 1])
    )
    assert np.array_equal(found_S, [0.5, np.nan, -0.5, np.nan, np.nan], equal_nan=True)


def test_the_columns_of_a_row_are_kept_where_a_reward_may_use_them(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": "2 + 2", "answer": 4, "task": "math"}), encoding="utf-8")
    (with_columns,) = load_problems(PromptSource(str(path), columns=True))
    (without,) = load_problems(PromptSource(str(path)))
    assert (with_columns.columns, without.columns) == ({"answer": 4, "task": "math"}, None)
