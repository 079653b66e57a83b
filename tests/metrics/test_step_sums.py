"""Sums by step in bounded memory: exact for few steps, in stretches of 2, 4, 8 … steps for many."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.base.hashing import GROUPS
from mismatch_cli.metrics.step_sums import StepSums
from tests.metrics.clipping.world import PLAIN, plain_algorithms, simple, summarise

WIDTH = 3


def random_rows(
    seed: int, count: int, highest_step: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    # Whole numbers, so that any order gives the same sum
    sums = rng.integers(0, 100, (count, WIDTH)).astype(float)
    return rng.integers(0, highest_step, count), rng.integers(0, GROUPS, count), sums


def sums_of(rows: tuple[np.ndarray, np.ndarray, np.ndarray], most: int, parts: int = 1) -> StepSums:
    sums = StepSums(most)
    for part in np.array_split(np.arange(len(rows[0])), parts):
        sums.update(*(column[part] for column in rows))
    return sums


def check(sums: StepSums, rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Every stretch holds exactly the rows of its steps, in their prompt groups, and every row
    is in a stretch.
    """
    step_S, group_S, sums_SM = rows
    covered_S = np.zeros(len(step_S), dtype=bool)
    for first, last, sums_GM in sums:
        inside = (step_S >= first) & (step_S <= last)
        assert inside.any() and not (covered_S & inside).any()
        covered_S |= inside
        for group in range(GROUPS):
            assert (sums_GM[group] == sums_SM[inside & (group_S == group)].sum(axis=0)).all()
    assert covered_S.all()


@pytest.mark.parametrize(
    ("highest", "most", "stretch"), [(50, 50, 1), (51, 50, 2), (400, 50, 8), (10_000, 7, 2048)]
)
def test_stretches(highest, most, stretch):
    """Stretches are equally long, except the last, which ends with the latest step."""
    rows = random_rows(0, 30_000, highest)
    assert rows[0].max() == highest - 1
    sums = sums_of(rows, most, parts=5)
    stretches = [(first, last) for first, last, _ in sums]
    assert len(stretches) <= most and stretches == sorted(stretches)
    assert [first for first, _ in stretches] == list(range(0, highest, stretch))
    assert {last - first + 1 for first, last in stretches[:-1]} == {stretch}
    assert stretches[-1][1] == highest - 1
    check(sums, rows)


@pytest.mark.parametrize("fine_first", [True, False])
def test_merging_sums_of_different_coarseness(fine_first):
    many, few = random_rows(1, 3000, 500), random_rows(2, 200, 12)
    parts = [sums_of(few, 20), sums_of(many, 20)]
    assert parts[0].shift == 0 < parts[1].shift
    first, second = parts if fine_first else reversed(parts)
    first.merge(second)
    assert len(first.sums) <= 20
    check(first, tuple(np.concatenate(columns) for columns in zip(few, many, strict=True)))


def test_order_and_sharding_do_not_change_the_stretches():
    rows = random_rows(3, 2000, 300)
    whole = {(first, last): sums for first, last, sums in sums_of(rows, 10)}
    merged = StepSums(10)
    for part in reversed(np.array_split(np.arange(2000), 7)):
        merged.merge(sums_of(tuple(column[part] for column in rows), 10))
    assert {(f, last): sums.tolist() for f, last, sums in merged} == {
        span: s.tolist() for span, s in whole.items()
    }
    assert max(last for _, last in whole) == rows[0].max()


def test_merging_leaves_the_other_unchanged():
    rows = random_rows(4, 50, 5)
    first, second = StepSums(20), sums_of(rows, 20)
    first.merge(second)
    first.merge(second)
    check(second, rows)


def test_steps_far_apart_stay_few():
    """Only steps 0 and 2^30: two stretches of one step each, without coarsening."""
    sums = StepSums(20)
    sums.update(np.array([0, 2**30]), np.array([0, 1]), np.ones((2, WIDTH)))
    assert [(first, last) for first, last, _ in sums] == [(0, 0), (2**30, 2**30)]


def test_a_summary_of_many_steps():
    """1,000 steps: at most 64 stretches per algorithm, every step for the bad updates, and
    nothing is lost.
    """
    steps = np.arange(1000, dtype=np.int32)
    batch = simple([[-1.0, -2.0]] * 1000, [[-1.5, -1.0]] * 1000, [1.0, -1.0] * 500, step_S=steps)
    summary = summarise(batch, needs=PLAIN, algorithms=plain_algorithms())
    result = summary.result(5)
    for row in result.algorithms:
        spans = [(stretch.first, stretch.last) for stretch in row.by_step]
        assert (
            spans == [(first, min(first + 15, 999)) for first in range(0, 1000, 16)]
            and len(spans) <= 64
        )
        assert [stretch.tokens for stretch in row.by_step] == [
            2 * (last - first + 1) for first, last in spans
        ]
    by_step = result.bad_updates.by_step
    assert [(row.first, row.last) for row in by_step] == [(step, step) for step in range(1000)]
