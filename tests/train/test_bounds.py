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
from mismatch_cli.train import bounds
from tests.train.checkpoints import model_after, responses_of
from tests.train.learners import rollout_of
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


RESPONSE = rollout_of([0] * 50)
HASHES = mix(np.arange(320, dtype=np.uint64))


def test_one_percent_of_the_tokens_is_in_a_sixteenth_of_the_responses():
    places = bounds.choose_tokens([RESPONSE] * 320, HASHES, 10**6, 0.01, ALONE)
    assert sum(map(len, places.values())) == 160
    assert len(places) == 20 and all((at_U < 50).all() for at_U in places.values())


def test_memory_bounds_their_number():
    places = bounds.choose_tokens([RESPONSE] * 320, HASHES, 7, 0.01, ALONE)
    assert sum(map(len, places.values())) == 7


@dataclass(frozen=True)
class OneOfTwo(World):
    """A rank that knows the hashes of the other's responses."""

    others: tuple[np.ndarray, ...] = ()

    def gather(self, item: Any) -> list[Any]:
        return [item, *(hashes for hashes in self.others if hashes.shape == item.shape)]


def test_a_rank_chooses_what_one_process_would():
    """Every token of a sixteenth of the responses."""
    halves, chosen = (HASHES[:160], HASHES[160:]), []
    for rank, half in enumerate(halves):
        world = OneOfTwo(rank, 2, others=(halves[1 - rank],))
        places = bounds.choose_tokens([RESPONSE] * 160, half, 10**6, 1 / 16, world)
        chosen += [160 * rank + row for row in places]
    alone = bounds.choose_tokens([RESPONSE] * 320, HASHES, 10**6, 1 / 16, ALONE)
    assert chosen == [*alone] and len(alone) == 20
