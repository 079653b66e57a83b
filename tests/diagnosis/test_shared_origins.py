"""What responses share, in words, and when they share it by chance."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.origins import NO_RANK, Origin, Traces
from mismatch_cli.diagnosis.sample import Sample
from mismatch_cli.diagnosis.shared_origins import shared_by
from mismatch_cli.trace.writer import rows_to_table
from tests.diagnosis.samples import few_responses

RESPONSES = 60


def words_of(
    inside: np.ndarray,
    traces: Traces = Traces(),
    among: np.ndarray | None = None,
    **columns: np.ndarray,
) -> str:
    """Of sixty responses, whose columns have other values for each unless they are given."""
    own = {name: columns.pop(name) for name in list(columns) if name.endswith("_S")}
    numbers = np.arange(RESPONSES)
    usual = {"prompt_id_S": numbers, "sample_index_S": numbers, "step_S": numbers * 0}
    sample: Sample = few_responses([1] * RESPONSES, origin_S=columns, **usual | own)
    inside_S = np.zeros(RESPONSES, dtype=bool)
    inside_S[inside] = True
    among_S = np.ones(RESPONSES, dtype=bool)
    if among is not None:
        among_S = np.isin(numbers, among)
    return shared_by(sample, inside_S, among_S, traces)


OF_TWELVE = np.arange(RESPONSES) % 12


@pytest.mark.parametrize(("steps", "words"), [
    ([5], "all of step 5 (1 of 12)"), ([5, 6], "all of steps 5 and 6 (2 of 12)"),
    ([5, 6, 7], "all of steps 5 to 7 (3 of 12)"), ([1, 5, 7], "all of steps 1, 5 and 7 (3 of 12)"),
    ([0, 1, 2, 3], "all of steps 0 to 3 (4 of 12)"), ([1, 3, 5, 7], "all of 4 of 12 steps"),
    ([9, 10, 11], "all of steps 9 to 11 (3 of 12)"),
])  # fmt: skip
def test_steps_that_follow_each_other_are_a_range_and_few_others_a_list(steps, words):
    inside = np.flatnonzero(np.isin(OF_TWELVE, steps))
    assert words_of(inside, step_S=OF_TWELVE) == words
    # Sample numbers have no order
    by_number = words_of(inside, sample_index_S=OF_TWELVE)
    expected = words.replace("step", "sample number").replace("5 to 7", "5, 6 and 7")
    if len(steps) == 4:
        expected = "all of 4 of 12 sample numbers"
    assert by_number == expected.replace("9 to 11", "9, 10 and 11")


def test_weight_versions_and_epochs_are_ranges_too():
    inside = np.flatnonzero(OF_TWELVE < 3)
    words = words_of(inside, version_rollout=OF_TWELVE)
    assert words == "all of weight versions 0 to 2 (3 of 12)"
    assert words_of(inside, epoch=OF_TWELVE) == "all of epochs 0 to 2 (3 of 12)"
    assert words_of(inside, minibatch=OF_TWELVE) == "all of mini-batch numbers 0, 1 and 2 (3 of 12)"


def test_prompts_are_counted_and_a_few_ranks_have_their_files():
    inside = np.flatnonzero(OF_TWELVE < 2)
    assert words_of(inside, prompt_id_S=OF_TWELVE) == "all of 2 of 12 prompts"
    files = np.array([f"shard-{rank}" for rank in range(12)])[OF_TWELVE]
    zeros = np.zeros(RESPONSES, dtype=int)
    origins = {"rank": OF_TWELVE, "file": files, "trace": zeros}
    assert words_of(inside, **origins) == "all of ranks 0 and 1 (2 of 12; shard-0 and shard-1)"
    three = words_of(np.flatnonzero(OF_TWELVE < 3), **origins)
    assert three == "all of ranks 0, 1 and 2 (3 of 12; shard-0, shard-1 and shard-2)"
    many = np.flatnonzero(OF_TWELVE < 4)
    assert words_of(many, **origins) == "all of 4 of 12 ranks"
    twice = np.array([f"shard-{s % 24}" for s in range(RESPONSES)])
    assert words_of(inside, **origins | {"file": twice}) == "all of ranks 0 and 1 (2 of 12)"
    without = origins | {"rank": np.where(OF_TWELVE == 7, NO_RANK, OF_TWELVE)}
    assert words_of(inside, **without) == "all of shard-0 and shard-1 (2 of 12 files)"


def test_files_of_several_traces_are_named_with_them():
    traces = Traces(("a", "b", "c"))
    trace = np.arange(RESPONSES) // 20
    files = np.where(np.arange(RESPONSES) % 2, "odd", "even")
    columns = {"trace": trace, "file": files}
    assert words_of(np.flatnonzero(trace == 1), traces, **columns) == "all of b (1 of 3 traces)"
    even = np.flatnonzero((trace == 1) & (files == "even"))
    assert words_of(even, traces, **columns) == "all of b/even (1 of 6 files)"
    # An unnamed one is called like the last
    beyond = trace + (trace == 2)
    words = words_of(np.flatnonzero(trace == 2), traces, trace=beyond, file=files)
    assert words == "all of c (1 of 3 traces)"


def test_of_two_kinds_the_one_with_fewer_members_is_named_and_steps_beside_it():
    """And sample numbers, if they are the same by another name."""
    inside = np.flatnonzero(OF_TWELVE == 3)
    zeros = np.zeros(RESPONSES, dtype=int)
    words = words_of(inside, step_S=OF_TWELVE, epoch=np.where(OF_TWELVE == 3, 1, 0), trace=zeros)
    assert words == "all of epoch 1 (1 of 2), all of step 3 (1 of 12)"
    words = words_of(inside, sample_index_S=OF_TWELVE, rank=OF_TWELVE)
    assert words == "all of rank 3 (1 of 12), all of sample number 3 (1 of 12)"
    words = words_of(inside, sample_index_S=OF_TWELVE, epoch=np.where(OF_TWELVE == 3, 1, 0))
    assert words == "all of epoch 1 (1 of 2)"


@pytest.mark.parametrize(("missing", "more", "is_shared"), [
    (0, 0, True), (0, 2, True), (1, 0, True), (1, 1, True), (2, 0, False), (0, 3, False),
])  # fmt: skip
def test_a_tenth_of_the_responses_may_be_elsewhere(missing, more, is_shared):
    """Of those inside or outside, whichever are fewer: a rank of twenty lacks some, or has some of
    another rank.
    """
    of_three = np.arange(RESPONSES) % 3
    own, others = np.flatnonzero(of_three == 0), np.flatnonzero(of_three == 1)
    inside = np.concatenate([own[missing:], others[:more]])
    assert words_of(inside, rank=of_three) == ("all of rank 0 (1 of 3)" if is_shared else "")
    outside = np.setdiff1d(np.arange(RESPONSES), inside)
    words = "all of ranks 1 and 2 (2 of 3)" if is_shared else ""
    assert words_of(outside, rank=of_three) == words


@pytest.mark.parametrize(("responses", "words"), [(24, "all of rank 0 (1 of 2)"), (23, "")])
def test_a_thousand_ways_to_choose_as_many_tell_a_rank_from_chance(responses, words):
    """For either of two ranks: 24 × 23 × 22 / 6 ways are 2,024."""
    rank = np.where(np.arange(RESPONSES) < 3, 0, 1)
    assert words_of(np.arange(3), among=np.arange(responses), rank=rank) == words


def test_most_of_a_prompt_is_inside_and_half_of_it_is_not():
    """Twenty prompts with all three responses inside, one more with two of them, and one with one;
    of a prompt with two, one inside and one outside belong to neither.
    """
    prompt = np.arange(RESPONSES) // 3
    inside = np.flatnonzero((prompt < 10) & (np.arange(RESPONSES) != 0))
    assert words_of(inside, prompt_id_S=prompt) == "all of 10 of 20 prompts"
    # Forty responses of twenty prompts with two each, of which one prompt has one inside
    pairs = np.minimum(np.arange(RESPONSES) // 2, 20)
    inside = np.array([*range(20), 20])
    words = words_of(inside, prompt_id_S=pairs, among=np.arange(40))
    assert words == "all of 10 of 20 prompts"


def test_only_responses_that_could_be_inside_count():
    """Half of a rank is too short to tell; nothing is shared without one inside."""
    of_three = np.arange(RESPONSES) % 3
    among = np.flatnonzero((of_three != 0) | (np.arange(RESPONSES) < 30))
    inside = np.flatnonzero((of_three == 0) & (np.arange(RESPONSES) < 30))
    assert words_of(inside, rank=of_three) == ""
    assert words_of(inside, rank=of_three, among=among) == "all of rank 0 (1 of 3)"


def test_a_file_tells_its_rank_and_a_table_its_versions():
    columns = {name: [0, 0] for name in ("step", "epoch", "minibatch", "sample_index")} | {
        "prompt_id": [0, 1],
        "version_rollout": [4, 5],
        "version_trainer": [6, 7],
        "finish_reason": ["stop"] * 2,
        "prompt_ids": [[1]] * 2,
        "response_ids": [[2]] * 2,
        "loss_mask": [[True]] * 2,
        "logp_rollout": [[-1.0]] * 2,
        "logp_trainer": [[-1.0]] * 2,
    }
    table = rows_to_table(columns)
    batch = SimpleNamespace(num_responses=2, epoch_S=np.array([8, 9]))
    origin = Origin(3, "shard-00002-000000.parquet").columns(table, batch)
    values = {name: column.tolist() for name, column in origin.items()}
    assert values == {
        "trace": [3, 3],
        "file": ["shard-00002-000000.parquet"] * 2,
        "rank": [2, 2],
        "epoch": [8, 9],
        "version_rollout": [4, 5],
        "version_trainer": [6, 7],
    }
    assert (
        Origin(0, "dump.jsonl").columns(table, batch)["rank"].tolist() == [-1, -1] == [NO_RANK] * 2
    )
