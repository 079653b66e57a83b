"""Profiles by position and by length, and the rank correlation, checked against plain loops."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from mismatch_cli.base.hashing import GROUPS, prompt_groups
from mismatch_cli.metrics.correlation import SAMPLE_TOKENS, SampledSpearman
from mismatch_cli.metrics.gaps import token_gaps
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.metrics.profiles import POSITION_BINS, bin_bounds, cut_by_position, largest_of
from mismatch_cli.rules.batch import TokenBatch
from tests.metrics.summaries import filled, summarise


def test_positions_against_a_loop(random_batch) -> None:
    batch = random_batch(5, responses=50, longest=90)
    result = summarise(batch).result()
    d = (batch.logp_recomputed_T - batch.logp_rollout_T).astype(np.float64)
    expected: dict[str, dict[int, list[float]]] = {"positions": {}, "from_end": {}}
    offsets = batch.offset_S1.tolist()
    for first, end in pairwise(offsets):
        for token in range(first, end):
            expected["positions"].setdefault((token - first).bit_length(), []).append(d[token])
            expected["from_end"].setdefault((end - 1 - token).bit_length(), []).append(d[token])
    for direction, bins in expected.items():
        rows = {row.first.bit_length(): row for row in getattr(result, direction)}
        assert rows.keys() == bins.keys()
        for number, values in bins.items():
            assert rows[number].tokens == len(values)
            assert rows[number].d_mean.value == pytest.approx(np.mean(values), rel=1e-6, abs=1e-9)
            assert rows[number].abs_d_mean.value == pytest.approx(np.mean(np.abs(values)), rel=1e-6)
            end = max(2 * rows[number].first - 1, 0)
            assert rows[number].last == min(end, np.diff(batch.offset_S1).max() - 1)


def test_turns_by_hand(make_batch) -> None:
    """Three responses of 3, 1 and 2 turns; the second one's mask has every measured token."""
    masks = ["0110110001", "111", "10011"]
    gaps = [[9, 0.1, 0.3, 9, -0.5, 0.7, 9, 9, 9, 2.0], [0.2, np.nan, 0.4], [1.0, 9, 9, 0.0, -0.2]]
    mu = [[-12.0] * len(mask) for mask in masks]
    pi = [[-12.0 + d for d in row] for row in gaps]
    batch = make_batch(
        mu, logp_recomputed=pi, loss_mask=[[c == "1" for c in mask] for mask in masks]
    )
    summary = summarise(batch)
    rows = summary.result().turns
    assert [
        [getattr(row, key) for key in ("first", "last", "turns", "tokens")] for row in rows
    ] == [
        [1, 1, 3, 5],
        [2, 2, 2, 4],
        [3, 3, 1, 1],
    ]
    assert [row.abs_d_mean.value for row in rows] == pytest.approx(
        [2.0 / 5, 1.4 / 4, 2.0], rel=1e-5
    )
    assert [row.d_mean.value for row in rows] == pytest.approx(
        [2.0 / 5, 0.0, 2.0], rel=1e-5, abs=1e-6
    )
    assert [row.length_mean.value for row in rows] == pytest.approx([5 / 3, 2, 1])
    first = np.array([0.1, 0.3, 0.2, 0.4, 1.0])
    assert rows[0].tv_binary_mean.value == pytest.approx(
        np.mean(np.exp(-12) * np.expm1(first)), rel=1e-4
    )


def test_turns_against_a_loop(random_batch) -> None:
    """Random masks: turns of any length, more of them than bins, responses without a trained or a
    measured token; the positions of the counted tokens stay the same.
    """
    for seed, longest in ((7, 20), (8, 300)):
        batch, rng = random_batch(seed, responses=60, longest=longest), np.random.default_rng(seed)
        mask_T = rng.random(batch.num_tokens) < 0.6
        logp_T = batch.logp_recomputed_T.copy()
        logp_T[rng.random(batch.num_tokens) < 0.1] = np.nan
        logp_T[rng.random(batch.num_tokens) < 0.05] = -np.inf
        for begin, end in pairwise(batch.offset_S1[::7].tolist()):
            mask_T[begin : begin + (end - begin) // 7] = False
            logp_T[(begin + end) // 2 : (begin + end) // 2 + (end - begin) // 6] = np.nan
        batch = replace(batch, loss_mask_T=mask_T, logp_recomputed_T=logp_T)
        gaps_by_turn: dict[int, list[float]] = {}
        turns: Counter[int] = Counter()
        by_octave: dict[int, list[float]] = {}
        d_T = (logp_T - batch.logp_rollout_T).astype(np.float64)
        for first, end in pairwise(batch.offset_S1.tolist()):
            turn, before, counted = -1, False, set()
            for token in range(first, end):
                turn += mask_T[token] and not before
                before = mask_T[token]
                if before and not np.isnan(d_T[token]):
                    counted.add(turn)
                    gaps_by_turn.setdefault(min(turn, 23), []).append(d_T[token])
                    by_octave.setdefault((token - first).bit_length(), []).append(d_T[token])
            turns.update(min(turn, 23) for turn in counted)
        result = summarise(batch).result()
        rows = {row.first - 1: row for row in result.turns}
        assert rows.keys() == gaps_by_turn.keys()
        assert [row.last for row in rows.values()] == [
            None if turn == 23 else turn + 1 for turn in rows
        ]
        for turn, values in gaps_by_turn.items():
            row, inside = rows[turn], [d for d in values if np.isfinite(d)]
            assert (row.tokens, row.turns) == (len(values), turns[turn])
            assert row.length_mean.value == pytest.approx(len(values) / turns[turn])
            assert row.d_mean.value == pytest.approx(np.mean(inside), rel=1e-5, abs=1e-8)
        assert {row.first.bit_length(): row.tokens for row in result.positions} == {
            octave: len(values) for octave, values in by_octave.items()
        }


def test_a_response_without_masked_tokens_is_one_turn(random_batch) -> None:
    result = summarise(random_batch(1, responses=40)).result()
    (row,) = result.turns
    assert (row.first, row.last, row.turns, row.tokens) == (
        1,
        1,
        40,
        result.counts.tokens,
    )
    for key in ("abs_d_mean", "tv_binary_mean", "d_mean"):
        assert getattr(row, key).value == pytest.approx(result.metrics[key].value, rel=1e-12)
        assert getattr(row, key).low == pytest.approx(result.metrics[key].low, rel=1e-9)
    assert row.length_mean.value == pytest.approx(result.metrics["length_mean"].value)


def test_lengths_and_slope(make_batch) -> None:
    """Σd = −0.002 per token and nothing else: −2 per 1000 tokens, at any length."""
    lengths = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 200]
    mu = [[-3.0] * n for n in lengths]
    pi = [[-3.002] * n for n in lengths]
    result = summarise(make_batch(mu, logp_recomputed=pi)).result()
    slope = result.metrics["sequence_slope"]
    assert slope.value == pytest.approx(-2, rel=1e-4)
    assert slope.low is None and "the same for all prompts" in slope.note
    rows = result.sequence.by_length
    assert [(row.first, row.last, row.sequences) for row in rows[:3]] == [
        (1, 1, 1),
        (2, 3, 2),
        (4, 7, 1),
    ]
    assert rows[1].d_sum_mean.value == pytest.approx(-0.005, rel=1e-3)
    assert rows[1].d_sum_sd.value == pytest.approx(0.001, rel=1e-2)


def _spearman(batch: TokenBatch) -> tuple[float, float]:
    """As accumulated, and of all tokens."""
    q, p = (pd.Series(x).rank() for x in (batch.logp_rollout_T, batch.logp_recomputed_T))
    return filled(SampledSpearman(), batch).result(1).value, q.corr(p)


@pytest.mark.parametrize("gap", [0.001, 0.05, 0.5, 2.0])
def test_spearman_is_exact_on_a_short_trace(random_batch, gap: float) -> None:
    batch = random_batch(seed=2, responses=200, longest=100, gap=gap)
    coefficient, exact = _spearman(batch)
    assert batch.num_tokens < SAMPLE_TOKENS and coefficient == pytest.approx(exact, abs=1e-12)


def test_spearman_without_each_of_32_groups_of_prompts(random_batch) -> None:
    batch = random_batch(seed=4, responses=60, longest=20)
    group_S = prompt_groups(batch.prompt_id_S) * 32 // GROUPS
    group_T = np.repeat(group_S, np.diff(batch.offset_S1))
    expected_G = np.full(32, np.nan)
    for group in np.unique(group_S):
        others_T = group_T != group
        q, p = (pd.Series(x[others_T]) for x in (batch.logp_rollout_T, batch.logp_recomputed_T))
        expected_G[group] = q.rank().corr(p.rank())
    without_G = filled(SampledSpearman(), batch).jackknife().without_G
    np.testing.assert_allclose(without_G, expected_G, rtol=1e-9)
    assert 5 < np.isfinite(without_G).sum() < 32


def test_a_token_without_either_value_has_no_rank(make_batch) -> None:
    batch = make_batch([[-1.0] * 5], logp_recomputed=[[-1.5] * 5])
    nan = np.float32(np.nan)
    x_N = np.array([1, nan, 3, 5, nan], dtype=np.float32)
    y_N = np.array([2, 3, nan, 9, nan], dtype=np.float32)
    spearman = SampledSpearman()
    for gaps in token_gaps(batch, PAIRS["mismatch"]):
        spearman.update_values(gaps, x_N, y_N)
    rows = spearman.sample.rows()
    assert sorted(zip(rows["x"].tolist(), rows["y"].tolist(), strict=True)) == [(1, 2), (5, 9)]


def test_spearman_of_a_long_trace_uses_a_sample(random_batch) -> None:
    batch = random_batch(seed=3, responses=1500, longest=100, gap=0.5)
    coefficient, exact = _spearman(batch)
    assert batch.num_tokens > 2 * SAMPLE_TOKENS and coefficient == pytest.approx(exact, abs=0.01)


def test_a_shard_without_a_finite_divergence_leaves_the_largest_of_the_others():
    """Nothing has no largest value; it is neither 0 nor infinite."""
    value_N = np.array([0.2, 0.7, 0.4])
    assert largest_of(value_N, None) == 0.7
    assert largest_of(value_N, np.array([True, False, True])) == 0.4
    assert largest_of(value_N, np.zeros(3, dtype=bool)) == -np.inf


def test_the_last_bin_begins_at_four_million_tokens() -> None:
    """Three tokens of the response are so far from its beginning, and three from its end."""
    last = POSITION_BINS - 1
    starts, _, from_start, from_end = cut_by_position(np.array([0, 2**22 + 3]))
    length = np.diff(starts)
    assert bin_bounds(last, longest=2**22 + 3) == (2**22, 2**22 + 2)
    assert length[from_start == last].sum() == length[from_end == last].sum() == 3
