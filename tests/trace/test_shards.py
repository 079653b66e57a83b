"""A shard in its run: the numbers of its responses, which of them are scored twice, and whether it
is complete.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mismatch_cli.probe.rollouts import is_sampled, is_whole
from mismatch_cli.probe.score import score_shards
from mismatch_cli.processes.ranks import ALONE
from mismatch_cli.trace.manifest import recorded
from mismatch_cli.trace.writer import rows_to_table, shard_path, write_shard

PROGRESS: Any = SimpleNamespace(counting=lambda *_, **__: nullcontext(lambda _: None))
RANKS: Any = SimpleNamespace(spreads=True, world=ALONE)


def write(folder: Path, index: int, rows: int) -> Path:
    path = shard_path(folder, index)
    columns: dict[str, Any] = dict.fromkeys(("step", "epoch", "minibatch", "prompt_id"), [0] * rows)
    columns |= dict.fromkeys(("version_rollout", "version_trainer"), [0] * rows)
    columns |= {"sample_index": list(range(rows)), "finish_reason": ["stop"] * rows}
    columns |= {"prompt_ids": [[1, 2]] * rows, "response_ids": [[3]] * rows}
    columns["logp_rollout"] = [np.array([-1.0], np.float32)] * rows
    columns["loss_mask"] = [np.ones(1, dtype=bool)] * rows
    write_shard(path, rows_to_table(columns))
    return path


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
    paths = [write(tmp_path / "three", i, rows) for i, rows in enumerate((4, 6, 2))]
    firsts, repeats = scored(paths, 6)
    assert firsts == [0, 4, 10]
    _, of_one = scored([write(tmp_path / "one", 0, 12)], 6)
    assert repeats == of_one and sum(repeats) == 6
    assert any(repeats[:4]) and any(repeats[4:10]) and any(repeats[10:])


@pytest.mark.parametrize(("promised", "whole"), [(4, True), (5, False), (3, False), (None, True)])
def test_a_shard_with_fewer_rows_than_promised_is_not_sampled(tmp_path, promised, whole):
    path = write(tmp_path, 0, 4)
    assert is_whole(path, promised) is whole
    assert is_sampled(tmp_path, recorded({path.name: promised})) is whole
    assert not is_sampled(tmp_path, recorded({path.name: promised, "shard-00001.parquet": 4}))
