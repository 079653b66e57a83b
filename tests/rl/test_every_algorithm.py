"""Every algorithm of the table trains: three steps in one process, and three on two ranks."""

from __future__ import annotations

import json
import shutil
from math import isfinite
from pathlib import Path

import pytest
import torch

from mismatch_cli.algorithms.table import TABLE
from tests.ranks.on_ranks import run_on
from tests.rl.small_runs import SHORT, run

pytestmark = pytest.mark.slow


def assert_trained(name: str, steps: list[dict], acts: set[str]) -> None:
    """Every step on record, each with a finite gradient; a rule blocks a share, and the weights move."""
    assert [step["step"] for step in steps] == [1, 2, 3], name
    assert all(isfinite(step["grad_norm"]) for step in steps), name
    assert all(step["blocked"] is None or 0 <= step["blocked"] <= 1 for step in steps), name
    if any(step["grad_norm"] for step in steps):
        acts.add(name)


def test_every_algorithm_trains_in_one_process(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    acts: set[str] = set()
    for name in TABLE:
        assert_trained(name, run(tmp_path / "run", algorithm=name, **SHORT), acts)
        shutil.rmtree(tmp_path / "run")
    assert set(TABLE) - acts <= {"ppo-mis-geometric", "trm-avg", "trm-max"}  # may block all that there is


def test_every_algorithm_trains_on_two_ranks(tmp_path: Path) -> None:
    run_on(2, "trained", tmp_path)
    acts: set[str] = set()
    for name in TABLE:
        lines = (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [line for line in map(json.loads, lines) if line["step"]]
        assert_trained(name, steps, acts)
    assert set(TABLE) - acts <= {"ppo-mis-geometric", "trm-avg", "trm-max"}
