"""When the writer's thread gets a shard: once it has enough tokens, is old enough, or at the end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mismatch_cli.frameworks.recording import _thread


class Files:
    """What a writer hands over, instead of a rank's folder."""

    def __init__(self) -> None:
        self.shards: list[list[int]] = []
        self.is_closed = False

    def write(self, batches: list[Any]) -> None:
        self.shards.append([len(batch["response_ids"]) for batch in batches])

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def files() -> Files:
    return Files()


def writer_of(files: Any) -> _thread.Writer:
    return _thread.Writer(files, lambda fault, lost: pytest.fail(fault))


def test_a_shard_ends_with_the_response_that_fills_it(files, monkeypatch):
    """With four tokens in a shard: 3 + 1, 5 alone, then 3 by `flush` and 2 by the end."""
    monkeypatch.setattr(_thread, "_SHARD_TOKENS", 4)
    writer = writer_of(files)
    for size in (3, 1, 5, 3):
        writer.put({"response_ids": [0] * size})
    writer.flush()
    assert files.shards == [[3, 1], [5], [3]] and not files.is_closed
    writer.put({"response_ids": [0, 0]})
    writer.close()
    assert files.shards == [[3, 1], [5], [3], [2]] and files.is_closed


def test_a_shard_is_written_once_its_first_response_is_old(files, monkeypatch):
    """Readers of a slow run see its responses after a while; younger ones wait."""
    monkeypatch.setattr(_thread, "_GLANCE", 0.01)
    monkeypatch.setattr(_thread, "_SHARD_SECONDS", 0.2)
    writer = writer_of(files)
    time.sleep(0.05)
    writer.put({"response_ids": [0]})
    time.sleep(0.05)
    assert not files.shards
    writer.put({"response_ids": [0, 0]})
    until = time.monotonic() + 5
    while not files.shards and time.monotonic() < until:
        time.sleep(0.01)
    assert files.shards == [[1, 2]]
    writer.close()
    assert files.shards == [[1, 2]]
