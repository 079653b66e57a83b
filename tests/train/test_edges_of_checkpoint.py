"""Checkpoints of earlier versions, a `state.pt` each with lists of tensors; damaged metrics cut back."""

from __future__ import annotations

import torch

from mismatch_cli.train.checkpoint import cut_back, last_step, latest_checkpoint


def test_a_checkpoint_of_an_earlier_version_is_among_those_of_a_run(tmp_path):
    """Its lists are in the order of the model's parameters, whatever these are called."""
    folder = tmp_path / "checkpoints" / "step-000002"
    folder.mkdir(parents=True)
    moments = {
        place: {"exp_avg": torch.full((2,), 10.0 + place), "exp_avg_sq": torch.zeros(2)}
        for place in (1, 0)
    }
    learner = {
        "version": 4,
        "loss_scale": 1.0,
        "masters": [torch.full((2,), 1.0), torch.full((2,), 2.0)],
        "optimizer": {"state": moments},
    }
    state = {"step": 2, "learner": learner, "sync": {"before": None, "gap": 0.5}, "judge": {}}
    torch.save(state, folder / "state.pt")
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None and checkpoint.step == 2 and checkpoint.folder == folder
    assert checkpoint.facts["learner"] == {"version": 4, "loss_scale": 1.0}
    assert checkpoint.facts["sync"] == {"before": False, "gap": 0.5}
    kinds = ("weight", "exp_avg")
    tensors = {f"{kind}.{name}": torch.zeros(2) for kind in kinds for name in ("b", "a")}
    checkpoint.load(tensors)
    assert {name: tensor[0].item() for name, tensor in tensors.items()} == {
        "weight.b": 1.0,
        "weight.a": 2.0,
        "exp_avg.b": 10.0,
        "exp_avg.a": 11.0,
    }


def test_bytes_that_are_no_text_are_a_line_without_a_step(tmp_path):
    """A disk may lose a page of the file: readers say that a resumed run cuts it back."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n{"step": 2}\n{"step": 3}\n')
    assert last_step(tmp_path) == 3
    cut_back(tmp_path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
