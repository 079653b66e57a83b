"""Which probes make the engine give its full distributions."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from mismatch_cli.probe import record
from mismatch_cli.probe.full_divergence import Distributions


@pytest.mark.parametrize(("responses", "full"), [(0, False), (1, True), (2, True)])
def test_one_response_is_enough_for_full_distributions(tmp_path, monkeypatch, responses, full):
    """The engine is told, and the room on the disk is checked, before anything is sampled."""
    events = []

    @contextmanager
    def loaded_sampler(*_, full, **__):
        events.append(full)
        yield SimpleNamespace(sample=lambda *_, **__: {"shards": 1})

    monkeypatch.setattr(record, "load_tokenizer", lambda _: [])
    monkeypatch.setattr(record, "load_problems", lambda _: [])
    monkeypatch.setattr(record, "vocabulary_of", lambda *_: 512)
    monkeypatch.setattr(record, "check_room", lambda *_: events.append("checked"))
    monkeypatch.setattr(record, "loaded_sampler", loaded_sampler)
    config = SimpleNamespace(
        engine=SimpleNamespace(model="m"), scoring_model="m", prompt_source=None
    )
    distributions = Distributions(tmp_path / "distributions", responses)
    answer = record._sample(config, tmp_path, {}, distributions, None, None)
    assert answer == {"shards": 1}
    assert events == ["checked"] * full + [full]
