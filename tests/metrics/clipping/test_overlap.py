"""Which algorithms block the same tokens, and the examples on which they differ."""

from __future__ import annotations

import tracemalloc
from collections import defaultdict
from copy import copy
from typing import Any

import numpy as np
import pytest

from mismatch_cli.metrics.clipping.masked_slice import apply_masks
from mismatch_cli.metrics.clipping.overlap import Overlap, distinct_patterns
from tests.metrics.clipping import brute
from tests.metrics.clipping.world import (
    ALL,
    EVERYTHING,
    PLAIN,
    found_in,
    plain_algorithms,
    result_of,
    simple,
    without,
    world,
)


def test_counts_and_jaccard_of_every_pair(judged_world):
    overlap, judged = judged_world.result["overlap"], judged_world.judged
    assert overlap["names"] == [algorithm.name for algorithm in ALL]
    for i, first in enumerate(overlap["names"]):
        for j, second in enumerate(overlap["names"]):
            shared = int((judged[first] & judged[second]).sum())
            either = int((judged[first] | judged[second]).sum())
            assert overlap["both"][i][j] == shared, (first, second)
            assert overlap["only_row"][i][j] == int((judged[first] & ~judged[second]).sum()), (
                first,
                second,
            )
            jaccard = overlap["jaccard"][i][j]
            assert jaccard["value"] == (pytest.approx(shared / either) if either else None), (
                first,
                second,
            )
            assert jaccard["note"] or jaccard["low"] <= jaccard["value"] <= jaccard["high"]


def test_algorithms_that_block_the_same_tokens_are_grouped(judged_world):
    """Each algorithm is in one group, in table order; a single token separates two."""
    judged, groups = judged_world.judged, judged_world.result["same_mask"]
    names = [algorithm.name for algorithm in ALL]
    assert sorted(name for group in groups for name in group) == sorted(names)
    assert [group[0] for group in groups] == sorted((group[0] for group in groups), key=names.index)
    place = {name: number for number, group in enumerate(groups) for name in group}
    for first in names:
        for second in names:
            alike = bool((judged[first] == judged[second]).all())
            assert alike == (place[first] == place[second]), (first, second)
    assert place["minirl"] == place["minirl-tis"] and ["grpo-clip-higher"] in groups


def test_jaccard_intervals_stay_in_the_unit_interval(judged_world):
    for row in judged_world.result["overlap"]["jaccard"]:
        for estimate in row:
            assert estimate["low"] is None or 0 <= estimate["low"] <= estimate["high"] <= 1, (
                estimate
            )


@pytest.mark.slow
def test_examples_are_the_smallest_hashes_that_one_blocks_and_the_other_keeps(judged_world):
    judged, examples = judged_world.judged, defaultdict(list)
    for row in judged_world.result["overlap"]["examples"]:
        examples[row["only"], row["not"]].append(row)
    hash_T = brute.token_hashes(judged, ("prompt_id", "sample_index", "step"))
    judged = judged.assign(hash=hash_T, position=judged["pos"]).sort_values("hash")
    place = ["step", "prompt_id", "sample_index", "position"]
    names = judged_world.result["overlap"]["names"]
    assert sum(map(len, examples.values())) > 100
    for first in names:
        for second in names:
            expected = judged[judged[first] & ~judged[second]].head(3)
            rows = examples[first, second]
            assert [[row[c] for c in place] for row in rows] == expected[place].to_numpy().tolist()
            for row, (_, token) in zip(rows, expected.iterrows(), strict=True):
                assert row["token_id"] == token["id"] and row["trace"] == 0
                assert row["logp_reference"] == token["lq"] and row["logp_current"] == token["lp"]
                assert row["advantage"] == ("+" if token["A"] > 0 else "−")


def judged_slices(batch: Any, needs: Any = EVERYTHING, algorithms: Any = ALL) -> list[Any]:
    batch_values = found_in([batch], needs, algorithms)
    return [
        judged for cases in apply_masks(batch, needs, algorithms, batch_values) for judged in cases
    ]


@pytest.mark.parametrize("limit", [4, 1024])
def test_the_number_of_patterns_with_examples_is_limited(monkeypatch, limit):
    """The same patterns keep their examples in any order; the counts stay exact."""
    monkeypatch.setattr("mismatch_cli.metrics.clipping.overlap.PATTERNS", limit)
    slices = [judged for seed in range(4) for judged in judged_slices(world(seed, 20))]
    first_overlap, other = Overlap(len(ALL)), Overlap(len(ALL))
    for judged in slices:
        first_overlap.update(judged)
    for judged in reversed(slices):
        part = Overlap(len(ALL))
        part.update(judged)
        other.merge(part)
    assert 3 < len(np.unique(first_overlap.examples["pattern"])) <= limit
    assert len(first_overlap.examples) <= 3 * limit
    assert sorted(map(str, first_overlap.examples)) == sorted(map(str, other.examples))
    assert (first_overlap.both == other.both).all()


def test_an_example_of_a_trace_without_token_ids_has_none():
    """Of two algorithms one blocks the token, whose probability has fallen far."""
    batch = simple([[-1.0]], [[-9.5]], [-1])
    for ids, trace in ((None, without(batch, "response_ids_T")), (0, batch)):
        result = result_of(trace, needs=PLAIN, algorithms=plain_algorithms())
        examples = result["overlap"]["examples"]
        assert examples and {row["token_id"] for row in examples} == {ids}


def test_more_than_1024_patterns_keep_the_examples_of_1024():
    """Eleven invented algorithms that block by the bits of the token's number: 2,047 patterns."""
    bits = 11
    (judged,) = judged_slices(world(0, 300), PLAIN, plain_algorithms()[:1])
    number_N = np.arange(len(judged.advantage_N)) % 2**bits
    assert len(number_N) > 2**bits
    judged.blocked = [np.flatnonzero(number_N >> bit & 1) for bit in range(bits)]
    overlap = Overlap(bits)
    overlap.update(judged)
    patterns = np.unique(overlap.examples["pattern"])
    assert len(patterns) == 1024
    assert (np.unique(overlap.examples["pattern"], return_counts=True)[1] <= 3).all()
    assert overlap.both.sum(axis=0)[0, 0] == len(judged.blocked[0])


def test_a_pattern_has_its_examples_however_its_tokens_are_cut_into_slices():
    """Three algorithms block four tokens each; of each, the third smallest hash comes last."""
    (judged,) = judged_slices(world(0, 10), PLAIN, plain_algorithms()[:1])
    by_hash = np.argsort(judged.gaps.token_hash_N)[:12].reshape(3, 4)
    arriving = [iter(tokens[[0, 1, 3, 2]]) for tokens in by_hash]
    overlap = Overlap(3)
    for algorithm in (0, 1, 1, 1, 0, 0, 2, 2, 2, 0, 1, 2):
        alone = copy(judged)
        alone.blocked = [by_hash[0, :0]] * 3
        alone.blocked[algorithm] = np.array([next(arriving[algorithm])])
        overlap.update(alone)
    hash_U = judged.gaps.token_hash_N[by_hash[:, :3].ravel()]
    assert overlap.examples["hash"].tolist() == hash_U.tolist()


def test_64_algorithms_have_a_bit_each():
    """Bit 63, the sign bit of an int64, must not be lost."""
    (judged,) = judged_slices(world(0, 10), PLAIN, plain_algorithms()[:1])
    judged.blocked = [np.zeros(0, dtype=np.int64)] * 63 + [np.array([2, 5])]
    overlap = Overlap(64)
    overlap.update(judged)
    result = overlap.result([f"a{i}" for i in range(64)], 20)
    assert result.both[63][63] == 2 and result.only_row[63][0] == 2
    assert {(token.only, token.not_) for token in result.examples} == {
        ("a63", f"a{i}") for i in range(63)
    }


def test_many_patterns_take_no_more_memory_than_their_tokens(rng):
    """4,096 that differ in both halves: a place for every pair of halves would take 150 MB."""
    high, low = (rng.permutation(2**12).astype(np.uint64) for _ in range(2))
    pattern_U = (high << np.uint64(16)) | low
    tracemalloc.start()
    try:
        pattern_P, kind_U = distinct_patterns(pattern_U)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (pattern_P == np.sort(pattern_U)).all() and (pattern_P[kind_U] == pattern_U).all()
    assert peak < 10 * 2**20
