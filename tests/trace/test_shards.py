"""A shard in its run: the numbers of its responses, which of them are scored twice, and whether it
is complete.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mismatch_cli.probe.rollouts import is_sampled, is_whole
from mismatch_cli.probe.score import score_shards
from mismatch_cli.processes.ranks import ALONE
from mismatch_cli.trace.manifest import shard_entries
from tests.metrics.batches import make_batch
from tests.studies.written import write_trace

PROGRESS: Any = SimpleNamespace(counting=lambda *_, **__: nullcontext(lambda _: None))
RANKS: Any = SimpleNamespace(spreads=True, world=ALONE)


def scored(paths: list[Path], noise: int) -> tuple[list[int], list[bool]]:
    """The number of each shard's first response, and of every response whether it is repeated."""
    firsts: list[int] = []
    repeats: list[bool] = []

    def score(path: Path, *, repeat: list[bool], first_response: int, **_: Any) -> None:
        firsts.append(first_response)
        repeats.extend(repeat)

    score_shards(score, paths, [False] * len(paths), noise, PROGRESS, RANKS)
    return firsts, repeats


def test_a_shard_continues_the_numbers_of_the_ones_before(tmp_path):
    batches = [make_batch([[-1.0]] * rows) for rows in (4, 6, 2)]
    firsts, repeats = scored(write_trace(tmp_path / "three", *batches).shards, 6)
    assert firsts == [0, 4, 10]
    _, of_one = scored(write_trace(tmp_path / "one", make_batch([[-1.0]] * 12)).shards, 6)
    assert repeats == of_one and sum(repeats) == 6
    assert any(repeats[:4]) and any(repeats[4:10]) and any(repeats[10:])


@pytest.mark.parametrize(("promised", "whole"), [(4, True), (5, False), (3, False), (None, True)])
def test_a_shard_with_fewer_rows_than_promised_is_not_sampled(tmp_path, promised, whole):
    (path,) = write_trace(tmp_path, make_batch([[-1.0]] * 4)).shards
    assert is_whole(path, promised) is whole
    assert is_sampled(tmp_path, shard_entries({path.name: promised})) is whole
    assert not is_sampled(tmp_path, shard_entries({path.name: promised, "shard-00001.parquet": 4}))
