"""What a run says that an error ends."""

from __future__ import annotations

import pytest

from mismatch_cli.errors import MismatchError
from mismatch_cli.ranks import World, joined
from mismatch_cli.rl import loop

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

    monkeypatch.setattr(loop, "Run", failing)
    monkeypatch.setattr(joined, "_LAUNCHER_ACTS", 0)
    world = World(size=size)
    with pytest.raises(MismatchError, match=f"{expected}.*newest checkpoint with --resume"):
        loop.train(None, tmp_path, print, world=world)
