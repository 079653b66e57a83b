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
from tests.frameworks.importing.layouts import (
    assert_holds,
    column,
    imported,
    ones,
    padded,
    real_rows,
    save,
    slime_samples,
    write_records,
)


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
    path = write_records(tmp_path / "0.pt", slime_samples(real_rows(1)))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(MismatchError, match="is truncated"):
        imported(path, into=tmp_path / "trace")
    path.write_bytes(b"no pickle at all")
    with pytest.raises(MismatchError):
        imported(path, into=tmp_path / "trace")


def assert_its_lines_import(path, rows, monkeypatch, *, dump="dump.jsonl", **theirs) -> str:
    """Run the lines that the refusal of a file prints, and import the file that they write.

    Returns the format of the file.
    """
    with pytest.raises(NeedsItsFramework) as refused:
        imported(path, into=path.parent / "never")
    monkeypatch.chdir(path.parent)
    exec(refused.value.lines, {})
    table, about = imported(path.parent / dump, into=path.parent / "trace")
    assert_holds(table, rows, "prompt_ids", "response_ids", "logp_rollout", **theirs)
    return about["format"]


def test_the_lines_for_skyrl(tmp_path, monkeypatch):
    """Sequences padded on the left, values aligned to the right."""
    rows = real_rows(4)
    responses = column(rows, "response_ids")
    sequences = [row["prompt_ids"] + row["response_ids"] for row in rows]
    lists = {
        "sequences": sequences,
        "attention_mask": ones(sequences),
        "response_mask": ones(responses),
        "loss_mask": ones(responses),
        "rollout_logprobs": column(rows, "logp_rollout"),
        "action_log_probs": column(rows, "logp_recomputed"),
        "advantages": column(rows, "advantage"),
    }
    batch = {name: torch.tensor(padded(values, left=True)) for name, values in lists.items()}
    path = tmp_path / "global_step_3_training_input.pkl"
    path.write_bytes(pickle.dumps(batch))
    assert_its_lines_import(path, rows, monkeypatch, logp_trainer="logp_recomputed")


def test_the_lines_for_verl(tmp_path, monkeypatch):
    """Prompts padded on the left, responses on the right."""
    rows = real_rows(4)
    prompts = torch.tensor(padded(column(rows, "prompt_ids"), left=True))
    responses = torch.tensor(padded(column(rows, "response_ids")))
    prompt_mask = torch.tensor(padded(ones(column(rows, "prompt_ids")), left=True))
    response_mask = torch.tensor(padded(ones(column(rows, "response_ids"))))
    batch = {
        "prompts": prompts,
        "responses": responses,
        "rollout_log_probs": torch.tensor(padded(column(rows, "logp_rollout"))),
        "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
        "response_mask": response_mask,
    }
    verl = types.ModuleType("verl")
    verl.DataProto = types.SimpleNamespace(
        load_from_disk=lambda path: types.SimpleNamespace(batch=batch)
    )
    monkeypatch.setitem(sys.modules, "verl", verl)
    (tmp_path / "gen_batch.dp").write_bytes(b"")
    assert_its_lines_import(tmp_path / "gen_batch.dp", rows, monkeypatch)


def test_the_lines_for_verl_s_queue(tmp_path, monkeypatch):
    rows = real_rows(3)
    names = {
        "prompts": "prompt_ids",
        "responses": "response_ids",
        "rollout_log_probs": "logp_rollout",
    }
    nested = {
        ours: torch.nested.nested_tensor(
            [torch.tensor(values) for values in column(rows, name)], layout=torch.jagged
        )
        for ours, name in names.items()
    }
    content = {"tensordict": nested, "tags": Adapter("x"), "global_steps": 1}
    assert_its_lines_import(save(tmp_path / "tq_batch.pt", content), rows, monkeypatch)


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
    assert_its_lines_import(path, rows, monkeypatch)


def test_the_lines_for_slime_with_more_than_data(tmp_path, monkeypatch):
    rows = real_rows(3)
    samples = [sample | {"adapter": Adapter("a")} for sample in slime_samples(rows)]
    path = write_records(tmp_path / "5.pt", samples)
    format = assert_its_lines_import(path, rows, monkeypatch, dump="rollout_data.pt")
    assert format == "slime"


def test_every_framework_s_lines_are_python():
    for about in pickles():
        ast.parse(about["lines"].format(path="some 'file'"))
