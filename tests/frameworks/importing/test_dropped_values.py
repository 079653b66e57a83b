"""Values that no metric uses are counted by kind, and exact zeros by what the other side says."""

from __future__ import annotations

import pytest

from tests.frameworks.importing import layouts
from tests.frameworks.importing.layouts import imported, plain_record, real_rows, write_lines

SAID = "trained tokens have a {} log-probability "
ODD = [float("nan"), float("-inf"), None, 0.25, None, float("inf"), float("nan"), -1.0]


@pytest.mark.parametrize("side", ["rollout", "trainer"])
def test_every_kind_is_counted(side, tmp_path):
    """Of trained tokens: the first is outside of the loss; rows without the column are none."""
    rows = [plain_record(row) for row in real_rows(4)]
    for row in rows[:2]:
        size = len(row["response_ids"])
        row[f"logp_{side}"] = ODD + [-0.5] * (size - len(ODD))
        row["loss_mask"] = [False] + [True] * (size - 1)
    rows[3]["logp_trainer"] = None
    _, about = imported(write_lines(tmp_path / "d.jsonl", rows), into=tmp_path / "out")
    use = "not measured" if side == "rollout" else "outside of its support"
    assert about["noted"] == {
        SAID.format(side) + "that is null: not measured": 4,
        SAID.format(side) + "above 0: not measured": 4,
        SAID.format(side) + "that is NaN: not measured": 2,
        SAID.format(side) + f"of −∞: {use}": 2,
    }


def test_whole_sequences_keep_nulls_and_nan_apart(tmp_path):
    """In NeMo-RL's and prime-rl's files the response is cut out of a sequence."""
    rows = real_rows(3)
    rows[0]["logp_rollout"] = [None, float("nan"), *rows[0]["logp_rollout"][2:]]
    path = layouts.nemo_rl(tmp_path / "train_data_step1.jsonl", rows)
    noted = imported(path, into=tmp_path / "nemo")[1]["noted"]
    assert noted == {
        SAID.format("rollout") + "that is null: not measured": 1,
        SAID.format("rollout") + "that is NaN: not measured": 1,
    }


def test_zeros_of_a_confident_policy_are_no_placeholders(tmp_path):
    """Both sides are certain at most of them; one that the other side doubts is named."""
    rows = [plain_record(row) for row in real_rows(3)]
    for row in rows:
        row["logp_rollout"] = [0.0] * len(row["response_ids"])
        row["logp_trainer"] = [-1e-4] * len(row["response_ids"])
    path = write_lines(tmp_path / "d.jsonl", rows)
    assert imported(path, into=tmp_path / "a")[1]["noted"] == {}
    rows[1]["logp_trainer"][:2] = [-3.0, -2.0]
    (note,) = imported(write_lines(path, rows), into=tmp_path / "b")[1]["noted"].items()
    assert note[1] == 2 and "exactly 0 where the other side's is below −1 (placeholders" in note[0]
    for row in rows:
        del row["logp_trainer"]
    (note,) = imported(write_lines(path, rows), into=tmp_path / "c")[1]["noted"].items()
    assert note[1] == sum(len(row["response_ids"]) for row in rows)
    assert "no other side to compare with" in note[0]
