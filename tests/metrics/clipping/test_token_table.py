"""Counts by token id: sparse sums with an overflowing buffer, compared with dense counting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mismatch_cli.metrics.clipping import token_table
from mismatch_cli.metrics.clipping.masked import Masked, apply_masks
from mismatch_cli.metrics.clipping.token_table import TokenTable
from tests.metrics.clipping.world import PLAIN, plain_algorithms, simple

POSITIVE, NEGATIVE = 0, 1


def made_up(seed: int, tokens: int = 4000, ids: int = 500, algorithms: int = 3) -> Masked:
    """Random tokens of one response, with random decisions instead of those of algorithms."""
    rng = np.random.default_rng(seed)
    logq, logp = -rng.exponential(1.0, (2, tokens))
    columns = {"response_ids_T": rng.integers(0, ids, tokens).astype(np.int32)}
    return decided(logq, logp, rng.choice([-1.0, 0.0, 2.0], tokens), rng, algorithms, **columns)


def decided(
    logq: np.ndarray,
    logp: np.ndarray,
    advantage: np.ndarray,
    rng: np.random.Generator,
    algorithms: int,
    **columns: Any,
) -> Masked:
    batch = simple([logq.tolist()], [logp.tolist()], [0.0], advantage_T=advantage, **columns)
    ((judged,),) = apply_masks(batch, PLAIN, plain_algorithms()[:1], {})
    judged.blocked = [
        np.flatnonzero((rng.random(len(logq)) < 0.3) & (advantage != 0)) for _ in range(algorithms)
    ]
    return judged


def dense(slices: list[Masked], algorithm: int, sign: int, ids: int) -> dict[str, np.ndarray]:
    found = {name: np.zeros(ids) for name in ("blocked", "tokens", "mu", "pi", "ratio")}
    for judged in slices:
        ids_N = judged.gaps.column("response_ids_T")
        own_N = judged.negative_N if sign == NEGATIVE else judged.positive_N
        np.add.at(found["tokens"], ids_N[own_N], 1)
        out = np.intersect1d(judged.blocked[algorithm], np.flatnonzero(own_N))
        for name, column in (
            ("blocked", np.ones(len(ids_N))),
            ("mu", judged.gaps.q_N),
            ("pi", np.exp(judged.gaps.logp_N)),
            ("ratio", judged.ratio_N),
        ):
            np.add.at(found[name], ids_N[out], column[out].astype(np.float64))
    return found


@pytest.mark.parametrize("buffered", [10, 2500, 2**16])
@pytest.mark.parametrize("merged", [False, True])
def test_against_dense_counting(monkeypatch, buffered, merged):
    """A buffer that overflows in every slice, in some, or never gives the same counts and means."""
    monkeypatch.setattr(token_table, "BUFFERED", buffered)
    slices = [made_up(seed, ids=100 * (seed + 1)) for seed in range(6)]
    table = TokenTable(3)
    for judged in slices:
        part = TokenTable(3) if merged else table
        part.update(judged)
        if merged:
            table.merge(part)
    for algorithm in range(3):
        for sign in (POSITIVE, NEGATIVE):
            expected = dense(slices, algorithm, sign, 600)
            rows = table.result(algorithm, sign, 40)
            order = np.lexsort([np.arange(600), -expected["blocked"]])[:40]
            assert [row.token_id for row in rows] == order.tolist()
            overall = expected["blocked"].sum() / expected["tokens"].sum()
            for row in rows:
                blocked, tokens = (
                    expected["blocked"][row.token_id],
                    expected["tokens"][row.token_id],
                )
                assert (row.blocked, row.tokens) == (blocked, tokens)
                assert row.lift in (None, pytest.approx(blocked / tokens / overall))
                for name in ("mu", "pi", "ratio"):
                    assert getattr(row, name) == pytest.approx(
                        expected[name][row.token_id] / blocked
                    )


def test_one_of_one_is_not_over_represented():
    """By chance one in a thousand tokens is blocked; which of 600 ids it hits says nothing."""
    table = TokenTable(1)
    table.judged = np.full((2, 600), 100, dtype=np.int64)
    table.judged[0, 7] = 1
    blocked = np.array([7, 8, 8, *[9] * 20, *range(10, 50)])
    table.blocked[0].add(blocked, np.ones((4, len(blocked))))
    rows = {row.token_id: row for row in table.result(0, POSITIVE, 600)}
    assert rows[7].blocked == rows[7].tokens == 1 and rows[7].rate == 1
    assert {token for token, row in rows.items() if row.lift is not None} == {9}
    assert rows[9].lift == pytest.approx(0.2 / (63 / table.judged[0].sum()))


def test_the_real_buffer_overflows():
    """More blocked tokens than the buffer holds, as in any larger trace."""
    table, slices = TokenTable(1), [made_up(seed, 40_000, 300, 1) for seed in range(6)]
    for judged in slices:
        table.update(judged)
    assert sum(len(judged.blocked[0]) for judged in slices) <= token_table.BUFFERED
    for judged in slices:
        table.update(judged)
    assert table.blocked[0]._size < token_table.BUFFERED  # the first ones were folded in
    expected = dense(slices, 0, NEGATIVE, 300)
    for row in table.result(0, NEGATIVE, 300):
        assert row.blocked == 2 * expected["blocked"][row.token_id]


def test_ties_are_in_order_of_id():
    ids = np.array([7, 3, 5, 1, 3, 7, 9, 9], dtype=np.int32)
    judged = decided(
        -np.ones(8), -np.ones(8), np.ones(8), np.random.default_rng(0), 1, response_ids_T=ids
    )
    judged.blocked = [np.arange(8)]
    table = TokenTable(1)
    table.update(judged)
    assert [row.token_id for row in table.result(0, POSITIVE, 5)] == [3, 7, 9, 1, 5]
    assert table.result(0, NEGATIVE, 5) == []


def test_an_infinite_ratio_is_null():
    judged = decided(
        np.full(10, -99.0), np.full(10, -0.1), np.ones(10), np.random.default_rng(0), 1
    )
    judged.blocked = [np.arange(10)]
    table = TokenTable(1)
    table.update(judged)
    rows = table.result(0, POSITIVE, 5)
    assert len(rows) == 5 and all(row.ratio is None and row.pi > 0.9 for row in rows)
