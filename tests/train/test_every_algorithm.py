"""One algorithm of each kind trains, alone and on two ranks; `lab/ranks.py every` runs
the full table.
"""

from __future__ import annotations

import json
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_cli.metrics.clipping.clipping_summary import ClippingSummary, Question
from mismatch_cli.metrics.clipping.masked_slice import Needs, add_to_first_pass
from mismatch_cli.rules.algorithms.first_pass import FirstPass
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.trace.reader import Trace
from tests.train.ranks.on_ranks import run_on
from tests.train.small_runs import KINDS, ON_RANKS, SHORT, reward_file, run

pytestmark = pytest.mark.slow


def assert_trained(name: str, steps: list[dict[str, Any]]) -> None:
    """Every step on record, each with a gradient; what masks block is a share."""
    assert [step["step"] for step in steps] == [1, 2, 3], name
    assert all(isfinite(step["grad_norm"]) and step["grad_norm"] > 0 for step in steps), name
    assert all(0 <= step["blocked"] <= 1 for step in steps), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """One process."""
    folder = tmp_path_factory.mktemp("alone")
    torch.set_num_threads(1)
    for name in KINDS:
        steps = run(folder / name, algorithm=name, reward=reward_file(folder), **SHORT)
        assert_trained(name, steps)
    return folder


def test_rules_beyond_a_micro_batch_train_on_two_ranks(tmp_path: Path) -> None:
    run_on(2, "trained", tmp_path)
    for name in (*ON_RANKS, "episodes"):
        lines = (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert_trained(name, steps := [line for line in map(json.loads, lines) if line["step"]])
    # Ranks end at different turns
    assert {line["sync"] for line in steps} == {"proven"} and steps[0]["turns"] > 1


@pytest.mark.parametrize("name", KINDS)
def test_clipstats_blocks_in_a_trace_what_training_blocked(alone: Path, name: str) -> None:
    """`clipstats` finds the share that training blocked, including rules on whole batches."""
    trace, algorithm = Trace.open(alone / name / "traces" / "step-3"), parse_algorithm(name)
    needs = Needs(
        True,
        algorithm.needs_recomputed,
        0,
        entropy=algorithm.needs_entropy,
        average=algorithm.needs_average,
    )
    (batch,) = trace.batches()
    gathering = FirstPass(algorithm.batch_masks)
    add_to_first_pass(gathering, batch, needs, 0)
    summary = ClippingSummary(Question((algorithm,), needs, batch_values=gathering.settle()))
    summary.update(batch)
    blocked = summary.result(0).algorithms[0].blocked.all.value
    last = json.loads((alone / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert blocked == last["blocked"]
    assert len(np.unique(batch.minibatch_S)) == SHORT["minibatches"]


def test_a_group_rule_sees_every_answer_to_a_problem_at_once(alone: Path) -> None:
    """Otherwise a partial group in a minibatch would change the median."""
    (batch,) = Trace.open(alone / "gbpo" / "traces" / "step-3").batches()
    for prompt in np.unique(batch.prompt_id_S):
        assert len(np.unique(batch.minibatch_S[batch.prompt_id_S == prompt])) == 1


def test_ppo_ewma_measures_from_an_average_that_lags_behind(alone: Path) -> None:
    (batch,) = Trace.open(alone / "ppo-ewma" / "traces" / "step-3").batches()
    assert batch.logp_average_T is not None and batch.logp_trainer_T is not None
    first_T = np.repeat(batch.minibatch_S == 0, np.diff(batch.offset_S1))
    assert (batch.logp_average_T != batch.logp_trainer_T)[first_T].mean() > 0.9  # of earlier steps
    apart = [
        np.abs(batch.logp_trainer_T - x_T).mean()
        for x_T in (batch.logp_average_T, batch.logp_rollout_T)
    ]
    assert apart[0] > 0 and apart[1] > 0
