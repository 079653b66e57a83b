"""Shared by the tests of rewards: runs the functions of a module's `FUNCTIONS`, each in a
separate process.
"""

from __future__ import annotations

import pytest

from mismatch_cli.probe.tasks.rewards import OwnReward


@pytest.fixture
def reward_of(request, tmp_path):
    (tmp_path / "mine.py").write_text(request.module.FUNCTIONS, encoding="utf-8")
    made = []

    def make(name: str, **settings) -> OwnReward:
        made.append(OwnReward(f"{tmp_path}/mine.py:{name}", **settings))
        return made[-1]

    yield make
    for reward in made:
        reward.child.stop()
