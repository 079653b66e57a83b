"""A run whose reward function, TRL-style, grades some responses and returns None for others."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from mismatch_cli.app.cli import run as typed
from mismatch_cli.base.errors import MismatchError
from tests.train.small_runs import SHORT, run

REWARDS = """
def some(prompts, completions, answer, **columns):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)  # the chat template makes conversations
    texts = [completion[0]["content"] for completion in completions]
    return [None if len(text) % 3 == 0 else sum(map(ord, text)) % 2 for text in texts]

def none(completions, **columns): return [None] * len(completions)
"""


def test_ungraded_responses_teach_nothing_and_are_counted(tmp_path, capfd):
    (tmp_path / "mine.py").write_text(REWARDS, encoding="utf-8")
    settings = SHORT | {"steps": 1, "checkpoint_every": 1, "trace_every": 1}
    (step, *_) = run(tmp_path / "run", reward=f"{tmp_path}/mine.py:some", **settings)
    table = pq.read_table(next((tmp_path / "run" / "traces" / "step-1").glob("*.parquet")))
    reward_S = table["reward"].to_numpy(zero_copy_only=False).astype(float)
    unjudged_S = np.isnan(reward_S)
    assert step["unjudged"] == unjudged_S.sum() > 0
    assert step["reward"] == pytest.approx(np.nanmean(reward_S))
    advantages = table["advantage"].to_pylist()
    assert all(
        set(advantage_T) == {0.0}
        for advantage_T, no in zip(advantages, unjudged_S, strict=True)
        if no
    )
    assert any(any(advantage_T) for advantage_T in advantages)
    assert typed(["report", str(tmp_path / "run" / "traces" / "step-1"), "--json"]) == 0
    assert typed(["report", str(tmp_path / "run"), "--json"]) == 0
    capfd.readouterr()


def test_a_reward_that_grades_nothing_ends_the_run(tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS, encoding="utf-8")
    with pytest.raises(MismatchError, match="graded none of 16 responses"):
        run(tmp_path / "run", reward=f"{tmp_path}/mine.py:none", **SHORT)
