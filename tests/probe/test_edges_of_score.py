"""What is said while the trainer loads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.probe import score
from mismatch_cli.probe.settings import ScorerSettings


@pytest.mark.parametrize(
    ("adapter", "named"), [(None, ""), ("tuned/lora", " with the adapter tuned/lora")]
)
def test_an_adapter_is_named_while_the_trainer_loads_if_there_is_one(monkeypatch, adapter, named):
    said, loaded = [], []

    def load(model, **settings):
        loaded.append((model, settings["adapter"]))
        return SimpleNamespace(describe=dict)

    monkeypatch.setattr(Trainer, "load", load)
    monkeypatch.setattr(score, "attention_warning", lambda _: "")
    settings = ScorerSettings(dtype="float32", attn="eager")
    score.load_trainer(
        "a/model",
        adapter,
        settings,
        None,
        SimpleNamespace(say=said.append),
        SimpleNamespace(sharding=None),
    )
    assert said == [f"Loading a/model{named} into the trainer (float32)"]
    assert loaded == [("a/model", adapter)]
