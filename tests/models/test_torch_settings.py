"""Threads of a model, and folders that are named from the home."""

from __future__ import annotations

import pytest
import torch

from mismatch_cli.base.errors import UsageError
from mismatch_cli.models import torch_settings
from mismatch_cli.models.engines._server_facts import _name_of
from mismatch_cli.models.torch_settings import check_threads, sends_rounded, set_threads


def test_a_small_model_has_one_thread_also_in_the_home(monkeypatch, tmp_path):
    """The sizes of all files count; a hub name, and a folder without weights, have no size."""
    numbers = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(torch_settings, "_SMALL_MODEL_BYTES", 10)
    for name, sizes in (("small", (5, 4)), ("large", (5, 5)), ("empty", ())):
        (tmp_path / name).mkdir()
        for part, size in enumerate(sizes):
            suffix = ("safetensors", "bin")[part]
            (tmp_path / name / f"part-{part}.{suffix}").write_bytes(b"x" * size)
    for model in ("~/small", str(tmp_path / "small"), "~/large", "~/empty", "hub/name"):
        set_threads(None, model)
    assert numbers == [1, 1]
    set_threads(3, "~/small")
    assert numbers == [1, 1, 3]


def test_more_threads_than_any_machine_has_are_refused():
    check_threads(None)
    check_threads(4096)
    with pytest.raises(UsageError, match="--threads 4097 is more than"):
        check_threads(4097)


def test_weights_lose_digits_only_from_float32_to_16_bits():
    assert sends_rounded("float32", "half") and sends_rounded("float32", "bfloat16")
    assert not sends_rounded("bfloat16", "bfloat16") and not sends_rounded("float32", "float32")


def test_a_server_finds_the_model_of_a_folder_in_the_home(monkeypatch, tmp_path):
    """And by its hub name, its served name or another way to the folder, but no other model."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "models")
    roots = {"other": "hub/name", "own": str(tmp_path / "models")}
    for model in ("~/models", str(tmp_path / "models"), "~/link", "own"):
        assert _name_of(model, roots) == "own"
    assert _name_of("~/models", {"own": "~/models"}) == "own"
    assert _name_of("hub/name", roots) == _name_of("other", roots) == "other"
    assert _name_of("~/nowhere", roots) is None and _name_of("hub/other", roots) is None
