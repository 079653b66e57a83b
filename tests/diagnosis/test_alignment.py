"""Lags of whole responses and from a token on, and which first tokens are compared, by hand and by
plain loops.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.base.hashing import hash_keys
from mismatch_cli.diagnosis import alignment
from mismatch_cli.diagnosis.alignment import (
    Alignment,
    HeadCollector,
    Heads,
    align,
    aligned,
    far_lag,
    find_exchanges,
    in_step_N,
    lag_scan,
    real_gap,
)
from mismatch_cli.diagnosis.sample import NO_LIMIT
from mismatch_cli.metrics.pairs import PAIRS
from tests.diagnosis.samples import few_responses

NEAR = (-3, -2, -1, 1, 2, 3)


def costs_of(logq_T: np.ndarray, logp_T: np.ndarray, counts_T: np.ndarray, lag: int) -> list[float]:
    """min(|π[t + lag] − μ[t]|, 2) by token; NaN without a partner that counts."""
    costs = []
    for t in range(len(logq_T)):
        partner = t + lag
        is_inside = 0 <= partner < len(logq_T)
        measured = is_inside and counts_T[t] and counts_T[partner]
        costs.append(min(abs(logp_T[partner] - logq_T[t]), 2.0) if measured else np.nan)
    return costs


def plainly_aligned(columns: tuple[np.ndarray, ...], real: float) -> tuple[float, int, int, bool]:
    """Every lag from every token on, one after the other."""
    unshifted = costs_of(*columns, 0)
    gap = np.nanmean(unshifted)
    if gap < real or np.isfinite(unshifted).sum() < 6:
        return gap, 0, 0, False
    if gap < 0.15:
        lefts = []
        for lag in NEAR:
            shifted = costs_of(*columns, lag)
            lefts.append(np.nanmean(np.where(np.isfinite(shifted), shifted, unshifted)))
        lag = NEAR[int(np.argmin(lefts))] if min(lefts) <= 0.35 * gap else 0
        return gap, lag, 0, lag != 0
    fits = []
    for lag in NEAR:
        shifted = np.array(costs_of(*columns, lag))
        # After three tokens in step, with six shifted ones
        for start in range(len(shifted)):
            is_possible = start == 0 or np.isfinite(unshifted[:start]).sum() >= 3
            if is_possible and np.isfinite(shifted[start:]).sum() >= 6:
                left = np.nanmean([*unshifted[:start], *shifted[start:]])
                fits.append((left, lag, start))
    left, lag, start = min(fits, key=lambda fit: fit[0], default=(np.inf, 0, 0))
    whole = {fit[1]: fit[0] for fit in fits if fit[2] == 0}
    # A whole shift is the simpler one
    if lag in whole and whole[lag] <= 1.1 * left + 0.01:
        left, start = whole[lag], 0
    return (
        (gap, lag, start, left < 0.8 * gap) if left <= 0.35 * gap else (gap, 0, 0, left < 0.8 * gap)
    )


def broken_responses(rng: np.random.Generator) -> Iterator[tuple[np.ndarray, ...]]:
    """Short ones, in step up to some token and shifted from there on, more or less exactly; the
    last few tokens do not count, nor, in one of two, some in the middle.
    """
    for trial in range(360):
        length, lag = int(rng.integers(5, 16)), int(rng.choice([0, *NEAR]))
        # Two costs at the cap of 2 nats would be a tie
        scale = (1.0, 0.8, 0.05)[trial % 3]
        logq_T = -scale * rng.exponential(1.0, length)
        start = int(rng.choice([0, 2, 3, 4, 5]))
        logp_T = logq_T.copy()
        for t in range(start, length):
            if 0 <= t + lag < length:
                logp_T[t + lag] = logq_T[t]
        logp_T += scale * rng.choice([0.02, 0.1, 0.3, 0.6]) * rng.normal(size=length)
        counts_T = np.arange(length) < length - int(rng.choice([0, 0, 1, 2]))
        first = int(rng.integers(0, length))
        counts_T[first : first + int(rng.choice([0, 0, 1, 3]))] = False
        yield logq_T, logp_T, counts_T


def test_the_best_lag_and_its_first_token_are_those_of_a_plain_loop(rng):
    lags = set()
    for columns in broken_responses(rng):
        for real in (0.15, 0.02):
            expected = plainly_aligned(columns, real)
            gap, *others = aligned(*columns, real)
            assert gap == pytest.approx(expected[0]) and tuple(others) == expected[1:], columns
            lags.add((others[0], others[1] > 0))
    assert {lag for lag, _ in lags} == {0, *NEAR} and len(lags) > 11, "whole shifts and others"


def test_tokens_of_tools_do_not_dilute_a_gap(rng):
    """Turns of twenty tokens with a gap of noise and no shift, and tools between them."""
    for tool_tokens in (0, 40, 100, 400):
        counts_T = np.tile(np.arange(20 + tool_tokens) < 20, 7)
        logq_T = -rng.exponential(1.0, len(counts_T))
        logp_T = logq_T + 0.3 * rng.normal(size=len(counts_T))
        gap, lag, start, better = aligned(logq_T, logp_T, counts_T, 0.15)
        assert gap == pytest.approx(0.24, abs=0.06) and (lag, start, better) == (0, 0, False)


def test_a_whole_shift_that_leaves_little_more_is_preferred_to_one_from_a_token_on():
    """Shifted by one, exactly from the fourth token on: of 0.01 x nats, the mean is 0.003 x over
    all tokens that have a partner, and 0.002 x with the first three in step.
    """
    logq_T = -np.array([1.0, 1.0, 1.0, 4.0, 1.0, 3.0, 2.0, 5.0, 1.0, 4.0, 2.0])
    for nats, start in ((0.12, 0), (0.13, 3)):
        logp_T = np.concatenate([[-1.0], logq_T[:-1]])
        logp_T[1:4] -= nats
        assert aligned(logq_T, logp_T, np.ones(11, dtype=bool), 0.15)[1:] == (1, start, True)


def test_a_lag_needs_six_tokens_with_a_gap_of_the_least_one():
    """Of 0.25 nats, six of them, in a response that is shifted by one; and with five or below it."""
    logq_T = -0.25 * np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    logp_T = np.concatenate([[0.0], logq_T[:-1]])
    every_T = np.ones(8, dtype=bool)
    assert aligned(logq_T, logp_T, every_T, 0.25) == (0.25, 1, 0, True)
    assert aligned(logq_T, logp_T, every_T, 0.26) == (0.25, 0, 0, False)
    assert aligned(logq_T[:7], logp_T[:7], every_T[:7], 0.25) == (0.25, 1, 0, True)
    assert aligned(logq_T[:6], logp_T[:6], every_T[:6], 0.25) == (0.25, 0, 0, False)
    assert aligned(logq_T[:5], logp_T[:5], every_T[:5], 0.25) == (0.25, 0, 0, False)
    assert aligned(logq_T, logp_T, ~every_T, 0.0) == (0.0, 0, 0, False)
    # Six tokens of a peaked policy, one of which is uncertain
    peaked_T, late_T = np.full((2, 6), -0.01)
    peaked_T[1] = late_T[2] = -0.31
    six_T = every_T[:6]
    assert aligned(peaked_T, late_T, six_T, 0.02) == (pytest.approx(0.1), 1, 0, True)
    assert aligned(peaked_T[:5], late_T[:5], six_T[:5], 0.02)[1:] == (0, 0, False)


def test_a_far_lag_is_the_one_that_twelve_tokens_fit_well(rng):
    """Up to 64 tokens away, in either direction."""
    logq_T = -rng.exponential(1.0, 90)
    for length, size, counted, fits in (
        (20, 8, 20, True),
        (20, 8, 19, False),
        (16, 4, 16, True),
        (76, 64, 76, True),
        (79, 65, 79, False),
    ):
        counts_T = np.arange(length) < counted
        for lag in (size, -size):
            logp_T = -rng.exponential(1.0, length)
            for t in range(max(0, -lag), min(length, length - lag)):
                logp_T[t + lag] = logq_T[t]
            columns = logq_T[:length], logp_T, counts_T
            assert far_lag(*columns, 0.3) == (lag if fits else 0), (length, lag)
    every_T = np.ones(90, dtype=bool)
    assert far_lag(logq_T, np.roll(logq_T, 3), every_T, 1.0) == 0, "a near lag"
    # What is left must be below a fifth of the gap
    logp_T = np.roll(logq_T, 10) + 0.1
    assert far_lag(logq_T, logp_T, every_T, 0.51) == 10
    assert far_lag(logq_T, logp_T, every_T, 0.49) == 0


def test_steps_within_responses_set_the_least_gap_of_a_shift():
    """Half of their mean, each 2 nats at most, and 0.15 at most."""
    logq_T = -np.array([1.0, 1.1, 1.3, 9.0, 9.1, 9.0])
    assert real_gap(few_responses([3, 3], logq_T=logq_T)) == pytest.approx(0.5 * 0.5 / 4)
    # 0.1, 0.2, a cap of 2, and 0.1 twice: 0.25 in the mean
    assert real_gap(few_responses([6], logq_T=logq_T)) == pytest.approx(0.15)
    capped_T = -np.array([0.0, *[0.01] * 20, 50.0, *[50.01] * 20])
    assert real_gap(few_responses([42], logq_T=capped_T)) == pytest.approx(0.5 * 2.02 / 41)
    counts_T = np.array([True, False, True, True, False, True])
    assert real_gap(few_responses([3, 3], logq_T=logq_T, counts_T=counts_T)) == 0.15


def test_every_response_has_its_own_lag_or_a_far_one(rng, monkeypatch):
    """In step, shifted by −2, from token 5 on by 1, and five by 9; with room for two, of the six
    misfits every third is tried for a far lag: one with a constant, and one of those.
    """
    lengths = [20, 25, 30, *[33] * 6]
    logq_T = -rng.exponential(1.0, sum(lengths))
    sample = few_responses(lengths, logq_T=logq_T)
    spans = list(sample.spans())
    logp_T = logq_T.copy()
    logp_T[spans[1]] = np.roll(logq_T[spans[1]], -2)
    logp_T[spans[2]][6:] = logq_T[spans[2]][5:-1]
    logp_T[spans[3]] -= 1.0
    for span in spans[4:]:
        logp_T[span] = np.roll(logq_T[span], 9)
    sample = few_responses(lengths, logq_T=logq_T, logp_T=logp_T)
    result = align(sample)
    assert result.lag_S.tolist() == [0, -2, 1, 0, *[9] * 5]
    assert result.from_S.tolist() == [0, 0, 5, *[0] * 6]
    assert result.better_S.tolist() == [False, True, True, False, *[True] * 5]
    assert result.shifted_S.tolist() == [False, True, False, False, *[True] * 5]
    assert result.broken_S.tolist() == [False, False, True, *[False] * 6]
    means = [np.minimum(np.abs(logp_T - logq_T)[span], 2).mean() for span in spans]
    assert result.gap_S.tolist() == pytest.approx(means)
    monkeypatch.setattr(alignment, "_MOST_TRIED", 2)
    assert align(sample).lag_S.tolist() == [0, -2, 1, 0, 0, 0, 9, 0, 0]


def test_a_response_in_step_keeps_its_gap_and_another_loses_that_of_its_lag():
    """By 1, by −2, from its second token on by 1, and as recorded; one token does not count."""
    logq_T = -np.array([1.0, 2, 3, 10, 20, 30, 40, 5, 6, 7, 8, 9, 4])
    logp_T = -np.array([7.0, 1.5, 2.5, 30, 41, 99, 98, 5, 1, 6.25, 7.25, 8.25, 4.5])
    counts_T = np.ones(13, dtype=bool)
    counts_T[10] = False
    sample = few_responses([3, 4, 5, 1], logq_T=logq_T, logp_T=logp_T, counts_T=counts_T)
    lags = Alignment(np.zeros(4), np.array([1, -2, 1, 1]), np.array([0, 0, 1, 0]), np.ones(4) > 0)
    chosen_S = np.array([True, True, True, False])
    nan = np.nan
    expected_N = [-0.5, -0.5, nan, nan, nan, 0.0, -1.0, 0.0, -0.25, nan, nan, -0.5]
    expected_N[9:] = [nan, nan, -0.5]
    left_N = in_step_N(sample, lags, chosen_S)
    np.testing.assert_allclose(left_N, expected_N)
    np.testing.assert_array_equal(in_step_N(sample, lags, ~chosen_S)[:11], sample.d_N[:11])


@pytest.mark.parametrize("shown", [[0, 1, 2], [1], [0]])
def test_the_gap_by_lag_is_that_of_a_plain_loop(rng, shown):
    """Over the shifted responses, or all if none is; three tokens have none three apart."""
    lengths = [3, 5, 9]
    tokens = sum(lengths)
    counts_T = np.ones(tokens, dtype=bool)
    counts_T[[4, 10]] = False
    columns = -3 * rng.exponential(1.0, tokens), -3 * rng.exponential(1.0, tokens), counts_T
    sample = few_responses(lengths, logq_T=columns[0], logp_T=columns[1], counts_T=counts_T)
    lag_S = np.where(np.isin(np.arange(3), shown), -2, 0) if len(shown) < 3 else np.zeros(3)
    zeros_S = np.zeros(3)
    scan = lag_scan(sample, Alignment(zeros_S, lag_S, zeros_S, zeros_S > 0))
    assert list(scan) == [-3, -2, -1, 0, 1, 2, 3]
    for lag, mean in scan.items():
        costs: list[float] = []
        for s, span in enumerate(sample.spans()):
            if s in shown:
                costs += costs_of(*(column[span] for column in columns), lag)
        measured = [cost for cost in costs if np.isfinite(cost)]
        expected = np.mean(measured) if measured else np.nan
        assert mean == pytest.approx(expected, nan_ok=True), lag


def head_batch(numbers: list[tuple[int, int, int]], logp: list[float]) -> SimpleNamespace:
    """Responses of two tokens, by step, prompt and sample, of which the second is not in the loss."""
    step_S, prompt_S, sample_S = np.array(numbers).T
    value_T = np.repeat(logp, 2)
    return SimpleNamespace(
        step_S=step_S,
        prompt_id_S=prompt_S,
        sample_index_S=sample_S,
        offset_S1=np.arange(0, 2 * len(numbers) + 1, 2),
        loss_mask_T=np.tile([True, False], len(numbers)),
        logp_rollout_T=value_T,
        logp_recomputed_T=value_T - 0.5,
        response_ids_T=None,
    )


def responses_of(sizes: list[int]) -> list[tuple[int, int, int]]:
    return [(step % 2, step // 2, i) for step, size in enumerate(sizes) for i in range(size)]


def smallest_groups(responses: list[tuple[int, int, int]], most: int) -> list[tuple[int, int, int]]:
    """The responses of the groups with the smallest hashes, at most so many, but at least one
    group.
    """
    hash_S = hash_keys(*np.array(responses).T[:2], seed=4)
    smallest: list[tuple[int, int, int]] = []
    for value in np.unique(hash_S):
        group = [responses[s] for s in np.flatnonzero(hash_S == value).tolist()]
        if smallest and len(smallest) + len(group) > most:
            break
        smallest += group
    return sorted(smallest)


def keys_of(heads: Heads) -> list[tuple[int, ...]]:
    return list(heads.index_of)


@pytest.mark.parametrize("most", [1, 3, 5, 6, 7, 9, 13, 14, 20])
@pytest.mark.parametrize("turn", range(6))
def test_whole_groups_with_the_smallest_hashes_are_compared(most, turn, rng):
    """Of six groups, each size in turn with the smallest hash; some parts know the limit before."""
    responses = responses_of(np.roll([2, 3, 2, 1, 4, 2], turn).tolist())
    order = rng.permutation(len(responses)).tolist()
    shuffled = [responses[s] for s in order]
    logp = [-1.0 - s for s in order]
    whole = HeadCollector(PAIRS["mismatch"], most)
    whole.update(head_batch(shuffled, logp))
    merged = HeadCollector(PAIRS["mismatch"], most)
    for start in range(0, len(shuffled), 3):
        limit = merged.limit if start % 2 else NO_LIMIT
        later = HeadCollector(PAIRS["mismatch"], most, limit)
        later.update(head_batch(shuffled[start : start + 3], logp[start : start + 3]))
        merged.merge(pickle.loads(pickle.dumps(later)))
    for collector in (whole, merged):
        heads = collector.result()
        assert keys_of(heads) == smallest_groups(responses, most)
        expected_R = np.float32([-1.0 - responses.index(key) for key in keys_of(heads)])
        assert heads.logq_RH[:, 0].tolist() == expected_R.tolist()
        assert heads.logp_RH[:, 0].tolist() == (expected_R - 0.5).tolist()
        assert np.isnan(heads.logq_RH[:, 1:]).all() and np.isnan(heads.ids_RH).all()


@pytest.mark.parametrize(("above", "responses"), [(-1, 0), (0, 0), (1, 3)])
def test_a_group_at_the_limit_of_an_earlier_part_is_dropped_whole(above, responses):
    group = [(0, 5, i) for i in range(3)]
    limit = int(hash_keys(np.array([0]), np.array([5]), seed=4)[0]) + above
    earlier = HeadCollector(PAIRS["mismatch"], 1, limit)
    later = HeadCollector(PAIRS["mismatch"], 1)
    later.update(head_batch(group, [-1.0, -2.0, -3.0]))
    earlier.merge(later)
    assert len(earlier.result().step_R) == responses


def test_at_most_4096_responses_are_compared():
    collector = HeadCollector(PAIRS["mismatch"])
    collector.update(head_batch([(0, number, 0) for number in range(4097)], [-1.0] * 4097))
    assert len(collector.result().step_R) == 4096


def test_of_a_response_that_is_used_twice_the_first_use_is_compared():
    """In one collector and of two, the earlier of which is the one merged into."""
    first, second = [HeadCollector(PAIRS["mismatch"]) for _ in range(2)]
    first.update(head_batch([(0, 1, 2), (0, 1, 2)], [-1.0, -2.0]))
    second.update(head_batch([(0, 1, 2), (0, 2**40, 3)], [-3.0, -4.0]))
    first.merge(second)
    heads = first.result()
    assert heads.index_of == {(0, 1, 2): 0, (0, 2**40, 3): 1}
    assert heads.logq_RH[:, 0].tolist() == [-1.0, -4.0]


def test_a_group_is_a_prompt_in_a_step():
    zeros_RH = np.zeros((5, 128), dtype=np.float32)
    steps_R, prompts_R = np.array([0, 0, 1, 1, 0]), np.array([1, 0, 1, 1, 1])
    heads = Heads(steps_R, prompts_R, np.arange(5), zeros_RH, zeros_RH, zeros_RH)
    assert heads.group_R.tolist() == [1, 0, 2, 2, 1]


def heads_of(logq: list[np.ndarray], logp: list[np.ndarray], prompts: list[int]) -> Heads:
    """With no token ids."""
    both_RH = np.full((2, len(logq), 128), np.nan, dtype=np.float32)
    for side_RH, values in zip(both_RH, (logq, logp), strict=True):
        for row, value_H in zip(side_RH, values, strict=True):
            row[: len(value_H)] = value_H
    zeros_R, unknown_RH = np.zeros(len(logq), dtype=int), np.full_like(both_RH[0], np.nan)
    return Heads(zeros_R, np.array(prompts), np.arange(len(logq)), *both_RH, unknown_RH)


@pytest.mark.parametrize(("length", "elsewhere", "partners"), [
    (6, False, [1, 0]), (5, False, [-1, -1]), (16, True, [1, 0]), (15, True, [-1, -1]),
])  # fmt: skip
def test_six_tokens_tell_a_partner_of_the_prompt_and_sixteen_of_another(
    rng, length, elsewhere, partners
):
    others = [-rng.exponential(1.0, 40) for _ in range(6)]
    first, second = -rng.exponential(1.0, length), -rng.exponential(1.0, length)
    prompts = [0, int(elsewhere), *range(2, 8)]
    heads = heads_of([first, second, *others], [second, first, *others], prompts)
    assert find_exchanges(heads).partner_R.tolist() == [*partners, *[-1] * 6]


@pytest.mark.parametrize(("own", "left", "partner"), [
    (0.11, 0.0, 1), (0.09, 0.0, -1), (1.0, 0.29, 1), (1.0, 0.31, -1), (0.5, 0.16, -1),
])  # fmt: skip
def test_a_partner_leaves_less_than_a_third_of_a_gap_of_a_tenth(rng, own, left, partner):
    """Others of the prompt fit it far worse."""
    logq = [-rng.exponential(1.0, 40) for _ in range(8)]
    logp = [values.copy() for values in logq]
    logp[0] = logq[0] - own
    logp[1] = logq[0] + left
    logp[2:] = [values - 5.0 for values in logp[2:]]
    exchanges = find_exchanges(heads_of(logq, logp, [0] * 8))
    assert exchanges.partner_R[0] == partner
    assert bool(exchanges.misfit_R[0]) == (own > 0.1)


def test_a_partner_fits_far_better_than_most_responses_do():
    """All have nearly the same log π, so that the first fits every one."""
    logq = [np.full(40, -1.0)] * 4
    for most, partner in ((0.2, -1), (0.4, 3)):
        logp = [np.full(40, -3.0), *[np.full(40, -1.0 - most)] * 2, np.full(40, -1.1)]
        exchanges = find_exchanges(heads_of(logq, logp, [0] * 4))
        assert exchanges.partner_R[0] == partner
    # Of two responses, most are the first
    logp = [np.full(40, -2.0), np.full(40, -1.1)]
    assert find_exchanges(heads_of(logq[:2], logp, [0] * 2)).partner_R[0] == 1


def test_texts_are_alike_as_far_as_both_go(rng):
    """The second one has twenty tokens, the same as the first's."""
    first_H = -rng.exponential(1.0, 40)
    logq, logp = [first_H, first_H[:20]], [first_H - 1.0, first_H[:20]]
    heads = heads_of(logq, logp, [0, 0])
    assert find_exchanges(heads).partner_R.tolist() == [1, -1]
    heads.ids_RH[0, :40] = heads.ids_RH[1, :20] = 7.0
    assert find_exchanges(heads).partner_R.tolist() == [-1, -1]


def test_every_response_is_compared_with_all_others_where_that_helps_in_a_part(rng, monkeypatch):
    """Of six without a partner in their prompt every third is tried, the first and the fourth."""
    monkeypatch.setattr(alignment, "_TRIED", 2)
    logq = [-rng.exponential(1.0, 40) for _ in range(6)]
    noise = [-rng.exponential(1.0, 40) for _ in range(6)]
    for partners in ([1, 0, -1, 4, 3, -1], [1, 0, -1, -1, -1, -1], [-1, -1, 4, -1, 2, -1]):
        logp = [logq[p] if p >= 0 else noise[r] for r, p in enumerate(partners)]
        helps = partners[0] >= 0 and partners[3] >= 0
        expected = partners if helps else [-1] * 6
        result = find_exchanges(heads_of(logq, logp, list(range(6)))).partner_R.tolist()
        assert result == expected
