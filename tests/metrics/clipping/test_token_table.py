"""Counts by token id: sparse sums with an overflowing buffer, compared with dense counting."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from mismatch_cli.metrics.clipping import token_table
from mismatch_cli.metrics.clipping.masked_slice import MaskedSlice, apply_masks
from mismatch_cli.metrics.clipping.token_table import TokenTable
from tests.metrics.clipping.world import PLAIN, plain_algorithms, simple

POSITIVE, NEGATIVE = 0, 1


def made_up(seed: int, tokens: int = 4000, ids: int = 500, algorithms: int = 3) -> MaskedSlice:
    """Random tokens of one response, with random decisions instead of those of algorithms."""
    rng = np.random.default_rng(seed)
    logq, logp = -rng.exponential(1.0, (2, tokens))
    ids_T = rng.integers(0, ids, tokens)
    judged = judged_as(logq, logp, ids_T, rng.choice([-1.0, 0.0, 2.0], tokens))
    is_judged_N = judged.positive_N | judged.negative_N
    draws = rng.random((algorithms, tokens))
    judged.blocked = [np.flatnonzero((draw_N < 0.3) & is_judged_N) for draw_N in draws]
    return judged


def judged_as(
    logq: np.ndarray, logp: np.ndarray, ids: np.ndarray, advantage: np.ndarray
) -> MaskedSlice:
    """One response, of which the algorithm blocks every token."""
    columns = {"response_ids": ids, "advantage_T": advantage}
    batch = simple([logq], [logp.tolist()], [0.0], **columns)
    ((judged,),) = apply_masks(batch, PLAIN, plain_algorithms()[:1], {})
    judged.blocked = [np.arange(len(ids))]
    return judged


def dense(slices: list[MaskedSlice], algorithm: int, sign: int, ids: int) -> pd.DataFrame:
    """By id: its tokens and those blocked, and the sums of these."""
    parts = []
    for judged in slices:
        t = pd.DataFrame({"id": judged.gaps.column("response_ids_T"), "tokens": 1, "blocked": 1.0})
        t["mu"], t["pi"] = judged.gaps.q_N, np.exp(judged.gaps.logp_N)
        t["ratio"] = judged.ratio_N
        is_kept_T = ~t.index.isin(judged.blocked[algorithm])
        t.loc[is_kept_T, ["blocked", "mu", "pi", "ratio"]] = 0.0
        parts.append(t[judged.negative_N if sign == NEGATIVE else judged.positive_N])
    sums = pd.concat(parts).astype(np.float64).groupby("id").sum()
    return sums.reindex(np.arange(ids), fill_value=0.0)


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
    assert table.blocked[0].size < token_table.BUFFERED  # the first ones were folded in
    expected = dense(slices, 0, NEGATIVE, 300)
    for row in table.result(0, NEGATIVE, 300):
        assert row.blocked == 2 * expected["blocked"][row.token_id]


def test_ties_are_in_order_of_id():
    ids = np.array([7, 3, 5, 1, 3, 7, 9, 9], dtype=np.int32)
    judged = judged_as(-np.ones(8), -np.ones(8), ids, np.ones(8))
    table = TokenTable(1)
    table.update(judged)
    assert [row.token_id for row in table.result(0, POSITIVE, 5)] == [3, 7, 9, 1, 5]
    assert table.result(0, NEGATIVE, 5) == []


def test_an_infinite_ratio_is_null():
    judged = judged_as(np.full(10, -99.0), np.full(10, -0.1), np.arange(10), np.ones(10))
    table = TokenTable(1)
    table.update(judged)
    rows = table.result(0, POSITIVE, 5)
    assert len(rows) == 5 and all(row.ratio is None and row.pi > 0.9 for row in rows)


def test_a_buffer_is_summed_once_it_has_more_entries_than_there_are_keys() -> None:
    """Memory is bounded by the keys that occur, and few entries are not sorted by themselves."""
    sums = token_table._SparseSums()
    few, many = np.arange(4), np.arange(token_table.BUFFERED)
    for key_U, waiting in ((few, 4), (many, 0), (many, token_table.BUFFERED), (few, 0)):
        sums.add(key_U, np.ones((4, len(key_U))))
        assert sums.size == waiting
    key_U, sums_4U = sums.totals()
    assert key_U.tolist() == many.tolist()
    assert sums_4U[:, :6].tolist() == [[4.0] * 4 + [2.0] * 2] * 4
