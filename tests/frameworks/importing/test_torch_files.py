"""Nothing is unpickled: a `.pt` is data or refused, and refused files come with lines that
convert them.
"""

from __future__ import annotations

import ast
import os
import pickle
import sys
import types
from dataclasses import dataclass

import pytest
import torch

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing.torch_file import NeedsItsFramework, pickles
from tests.frameworks.importing.layouts import imported, real_rows, same_bits, save, slime_sample


class Harmful:
    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@dataclass
class Adapter:
    name: str


@pytest.mark.parametrize("name", ["0.pt", "tq_batch.pt", "data.pt"])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_harmful_pickle_is_refused_and_not_run(tmp_path, name, legacy):
    harmful = {"rollout_id": 0, "samples": [{"tokens": Harmful(tmp_path / "harm")}]}
    torch.save(harmful, tmp_path / name, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(NeedsItsFramework, match="weights-only"):
        imported(tmp_path / name, into=tmp_path / "trace")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "name", ["global_step_3_training_input.pkl", "gen_batch.dp", "buffer_step00001.pkl", "x.pkl"]
)
def test_pickles_are_never_opened(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_bytes(pickle.dumps(Harmful(tmp_path / "harm")))
    for path in (tmp_path / "run" / name, tmp_path / "run"):
        with pytest.raises(NeedsItsFramework, match="is a pickle") as refused:
            imported(path, into=tmp_path / "trace")
        assert bool(refused.value.lines) == (name != "x.pkl")
        ast.parse(refused.value.lines)
    assert not (tmp_path / "harm").exists()


def test_truncated_and_foreign_files_are_one_sentence(tmp_path):
    path = save(tmp_path / "0.pt", {"rollout_id": 0, "samples": [slime_sample(real_rows(1)[0], 0)]})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(MismatchError, match="is truncated"):
        imported(path, into=tmp_path / "trace")
    path.write_bytes(b"no pickle at all")
    with pytest.raises(MismatchError):
        imported(path, into=tmp_path / "trace")


def run_lines(error: NeedsItsFramework, folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    exec(error.lines, {})


def refused(path, folder) -> NeedsItsFramework:
    with pytest.raises(NeedsItsFramework) as found:
        imported(path, into=folder / "never")
    return found.value


def padded(rows, name: str, left: bool, fill: float = 0) -> torch.Tensor:
    width = max(len(row[name]) for row in rows) + 2
    pads = [[fill] * (width - len(row[name])) for row in rows]
    return torch.tensor(
        [p + row[name] if left else row[name] + p for p, row in zip(pads, rows, strict=True)]
    )


def masks(rows, name: str, left: bool) -> torch.Tensor:
    return padded([{name: [1] * len(row[name])} for row in rows], name, left)


def check(folder, rows, tmp_path, *, policy: str | None) -> None:
    table, _ = imported(folder / "dump.jsonl", into=tmp_path / "trace")
    for name in ("prompt_ids", "response_ids", "logp_rollout"):
        assert same_bits(table, name, [row[name] for row in rows]), name
    if policy:
        assert same_bits(table, "logp_trainer", [row[policy] for row in rows])


def test_the_lines_for_skyrl(tmp_path, monkeypatch):
    """Sequences padded on the left, values aligned to the right."""
    rows = real_rows(4)
    joined = [row | {"ids": row["prompt_ids"] + row["response_ids"]} for row in rows]
    batch = {
        "sequences": padded(joined, "ids", left=True),
        "attention_mask": masks(joined, "ids", left=True),
        "response_mask": masks(rows, "response_ids", left=True),
        "loss_mask": masks(rows, "response_ids", left=True),
        "rollout_logprobs": padded(rows, "logp_rollout", left=True),
        "action_log_probs": padded(rows, "logp_recomputed", left=True),
        "advantages": padded(rows, "advantage", left=True),
    }
    path = tmp_path / "global_step_3_training_input.pkl"
    path.write_bytes(pickle.dumps(batch))
    run_lines(refused(path, tmp_path), tmp_path, monkeypatch)
    check(tmp_path, rows, tmp_path, policy="logp_recomputed")


def test_the_lines_for_verl(tmp_path, monkeypatch):
    """Prompts padded on the left, responses on the right."""
    rows = real_rows(4)
    prompt, response = (
        masks(rows, name, left) for name, left in (("prompt_ids", True), ("response_ids", False))
    )
    batch = {
        "prompts": padded(rows, "prompt_ids", left=True),
        "responses": padded(rows, "response_ids", left=False),
        "rollout_log_probs": padded(rows, "logp_rollout", left=False),
        "attention_mask": torch.cat([prompt, response], dim=1),
        "response_mask": response,
    }
    verl = types.ModuleType("verl")
    verl.DataProto = types.SimpleNamespace(
        load_from_disk=lambda path: types.SimpleNamespace(batch=batch)
    )
    monkeypatch.setitem(sys.modules, "verl", verl)
    (tmp_path / "gen_batch.dp").write_bytes(b"")
    run_lines(refused(tmp_path / "gen_batch.dp", tmp_path), tmp_path, monkeypatch)
    check(tmp_path, rows, tmp_path, policy=None)


def test_the_lines_for_verl_s_queue(tmp_path, monkeypatch):
    rows = real_rows(3)
    names = {
        "prompts": "prompt_ids",
        "responses": "response_ids",
        "rollout_log_probs": "logp_rollout",
    }
    nested = {
        ours: torch.nested.nested_tensor(
            [torch.tensor(row[name]) for row in rows], layout=torch.jagged
        )
        for ours, name in names.items()
    }
    path = save(
        tmp_path / "tq_batch.pt", {"tensordict": nested, "tags": Adapter("x"), "global_steps": 1}
    )
    run_lines(refused(path, tmp_path), tmp_path, monkeypatch)
    check(tmp_path, rows, tmp_path, policy=None)


def test_the_lines_for_oat(tmp_path, monkeypatch):
    rows = real_rows(3)
    items = [
        types.SimpleNamespace(
            prompt_ids=row["prompt_ids"],
            response_ids=row["response_ids"],
            response_logprobs=row["logp_rollout"],
            rewards=[0.0, row["reward"]],
        )
        for row in rows
    ]
    path = tmp_path / "buffer_step00003.pkl"
    path.write_bytes(pickle.dumps(([], [], [items[:2], items[2:]])))
    run_lines(refused(path, tmp_path), tmp_path, monkeypatch)
    check(tmp_path, rows, tmp_path, policy=None)


def test_the_lines_for_slime_with_more_than_data(tmp_path, monkeypatch):
    rows = real_rows(3)
    samples = [slime_sample(row, i) | {"adapter": Adapter("a")} for i, row in enumerate(rows)]
    path = save(tmp_path / "5.pt", {"rollout_id": 5, "samples": samples})
    run_lines(refused(path, tmp_path), tmp_path, monkeypatch)
    table, about = imported(tmp_path / "rollout_data.pt", into=tmp_path / "trace")
    assert (
        same_bits(table, "logp_rollout", [row["logp_rollout"] for row in rows])
        and about["format"] == "slime"
    )


def test_every_framework_s_lines_are_python():
    for about in pickles():
        ast.parse(about["lines"].format(path="some 'file'"))
