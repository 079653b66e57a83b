"""Whether a run without checkpoints begins again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.processes.ranks import ALONE
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
