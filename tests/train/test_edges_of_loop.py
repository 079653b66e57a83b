"""What a run says that an error ends."""

from __future__ import annotations

import pytest
import torch

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.processes.ranks import World, joined
from mismatch_cli.train import loop

GLOO, MEMORY = "[gloo/transport] Connection closed by peer", "CUDA error: out of memory"


@pytest.mark.parametrize(
    ("size", "error", "expected"),
    [
        (2, GLOO, "Another rank has ended, and rank 0 cannot continue without it"),
        (2, MEMORY, "Training failed .RuntimeError: CUDA error: out of memory"),
        (1, GLOO, "Training failed .RuntimeError: .gloo/transport"),
    ],
)
def test_only_a_failure_of_the_network_between_ranks_is_a_lost_rank(
    tmp_path, monkeypatch, size, error, expected
):
    def failing(*_):
        raise RuntimeError(error)

    monkeypatch.setattr(loop, "RunInProgress", failing)
    monkeypatch.setattr(joined, "_LAUNCHER_ACTS", 0)
    world = World(size=size)
    with pytest.raises(MismatchError, match=f"{expected}.*newest checkpoint with --resume"):
        loop.train(None, tmp_path, print, world=world)


@pytest.mark.parametrize(
    ("error", "needs_less"),
    [
        (MemoryError("Unable to allocate 9 GiB"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_only_a_lack_of_memory_advises_a_lower_token_budget(
    tmp_path, monkeypatch, error, needs_less
):
    def failing(*_):
        raise error

    monkeypatch.setattr(loop, "RunInProgress", failing)
    with pytest.raises(MismatchError, match="newest checkpoint with --resume") as raised:
        loop.train(None, tmp_path, print)
    assert ("--token-budget needs less memory" in str(raised.value)) == needs_less
