"""The TV of few tokens over the full vocabulary while training, beside its two lower bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_cli.base.hashing import mix
from mismatch_cli.processes.ranks import ALONE, World
from mismatch_cli.rules.batch import Rollout
from mismatch_cli.train import bounds
from tests.train.checkpoints import model_after, responses_of
from tests.train.small_runs import SHORT, numbers, reward_file, run, weights

ALL = 0.99999  # the share that rounds up to every token
MOVED: dict[str, Any] = SHORT | {
    "steps": 2, "minibatches": 1, "staleness": 1, "average_decay": 0.0, "trace_every": 2,
    "checkpoint_every": 1, "bounds_share": ALL,
}  # fmt: skip


@pytest.fixture(scope="module")
def moved(tmp_path_factory) -> Path:
    """At its second step, sampled with the first weights, the trainer has made one update."""
    folder: Path = tmp_path_factory.mktemp("bounds")
    run(folder / "run", **MOVED, reward=reward_file(folder))
    return folder / "run"


@torch.no_grad()
def probabilities(model: Any, table: Any) -> np.ndarray:
    """The full distribution at every response token, [T, V] float64."""
    parts = []
    for prompt, response in zip(
        *(table.column(name).to_pylist() for name in ("prompt_ids", "response_ids")), strict=True
    ):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        parts.append(logits.double().softmax(dim=-1).numpy())
    return np.concatenate(parts)


def test_they_are_of_the_weights_that_sampled_and_those_of_the_update(moved):
    """Computed again with the two models, without the code that measured them."""
    table = responses_of(moved, 2)
    before_TV, now_TV = (probabilities(model_after(moved, step), table) for step in (0, 1))
    token_T = np.concatenate(table.column("response_ids").to_pylist())
    change_TV = now_TV - before_TV
    top_TV = before_TV >= np.sort(before_TV)[:, -20, None]
    top_TV[np.arange(len(token_T)), token_T] = True
    parts_T = np.abs(change_TV * top_TV).sum(axis=1)
    top_k_T = (parts_T + np.abs((change_TV * ~top_TV).sum(axis=1))) / 2
    expected = {
        "tv_full": np.abs(change_TV).sum(axis=1).mean() / 2,
        "tv_binary": np.abs(change_TV[np.arange(len(token_T)), token_T]).mean(),
        "tv_topk": top_k_T.mean(),
        "tokens": len(token_T),
    }
    first, second = numbers(moved)
    assert second["bounds"] == pytest.approx(expected, rel=1e-4)
    assert 0 < expected["tv_binary"] < expected["tv_topk"] < expected["tv_full"]
    assert "bounds" not in first  # its only update is made at the weights that sampled


@pytest.mark.slow
def test_they_change_no_update(moved, tmp_path):
    run(tmp_path / "run", **MOVED | {"bounds_share": 0.0}, reward=reward_file(tmp_path))
    assert weights(tmp_path / "run") == weights(moved)
    lines = [dict(line) for line in numbers(moved)]
    lines[1].pop("bounds")
    assert lines == numbers(tmp_path / "run")


@dataclass(frozen=True)
class OneOf(World):
    """A rank that knows what the others bring."""

    all_hashes: tuple[np.ndarray, ...] = ()

    def gather(self, item: Any) -> list[Any]:
        return [*self.all_hashes]


def rollouts(count: int, tokens: int) -> list[Rollout]:
    nothing_T = np.zeros(tokens, dtype=np.float32)
    return [
        Rollout([0], [0] * tokens, nothing_T, nothing_T, None, None, "stop") for _ in range(count)
    ]


HASHES = mix(np.arange(320, dtype=np.uint64))


def chosen(most: int = 10**6, share: float = 0.01) -> dict[int, np.ndarray]:
    return bounds._chosen(rollouts(320, 50), HASHES, most, share, ALONE)


def test_one_percent_of_the_tokens_is_in_a_sixteenth_of_the_responses():
    places = chosen()
    assert sum(map(len, places.values())) == 160
    assert len(places) == 20 and all((at_U < 50).all() for at_U in places.values())


def test_memory_bounds_their_number():
    assert sum(map(len, chosen(most=7).values())) == 7


def test_a_rank_chooses_what_one_process_would():
    halves = HASHES[:160], HASHES[160:]
    kept = [
        half < bounds._limit(half, 1 / 16, 1000, OneOf(rank, 2, all_hashes=halves))
        for rank, half in enumerate(halves)
    ]
    alone = bounds._limit(HASHES, 1 / 16, 1000, ALONE) > HASHES
    assert np.array_equal(np.concatenate(kept), alone) and alone.sum() == 20
