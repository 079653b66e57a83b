"""The steps of rounded logits are read from the top-K columns, and what rounding makes is what it
made.
"""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.metrics.logit_steps import _FEWEST_TOKENS as FEWEST
from mismatch_cli.metrics.logit_steps import LogitSteps, step_exponents

TOKENS, VOCABULARY, K = 4000, 60, 20


def rounded(z_NV: np.ndarray, bits: int) -> np.ndarray:
    """To a significand of that many bits: 8 for bfloat16, 11 for float16."""
    step_NV = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(z_NV), 1e-6))) - bits + 1)
    return np.round(z_NV / step_NV) * step_NV


def scored(z_NV: np.ndarray, temperature: float, ids_N: np.ndarray) -> tuple[np.ndarray, ...]:
    """log p of the sampled ids and of the top K, in float32."""
    z_NV = z_NV / temperature
    logp_NV = z_NV - np.logaddexp.reduce(z_NV, axis=1)[:, None]
    top_NK = -np.sort(-logp_NV, axis=1)[:, :K]
    return (
        np.take_along_axis(logp_NV, ids_N[:, None], axis=1)[:, 0].astype(np.float32),
        top_NK.astype(np.float32),
    )


def logits(rng: np.random.Generator, size: float, spread: float = 2.0) -> np.ndarray:
    return size + spread * rng.standard_normal((TOKENS, VOCABULARY))


def steps_of(temperature: float, columns: tuple[np.ndarray, ...]) -> LogitSteps:
    steps = LogitSteps(temperature)
    for part in np.array_split(np.arange(len(columns[0])), 7):
        steps.update(*(column[part] for column in columns))
    return steps


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(
    ("size", "bits", "step"), [(24, 8, 1 / 8), (50, 8, 1 / 4), (24, 11, 1 / 64)]
)
def test_the_step_is_that_of_the_logits(rng, temperature, size, bits, step):
    z_NV = rounded(logits(rng, size), bits)
    steps = steps_of(temperature, scored(z_NV, temperature, rng.integers(VOCABULARY, size=TOKENS)))
    assert steps.are_rounded and steps.share_on_grid > 0.99
    assert steps.step == pytest.approx(step, rel=0.05)


def test_unrounded_logits_are_on_no_grid_and_another_temperature_hides_one(rng):
    ids_N = rng.integers(VOCABULARY, size=TOKENS)
    z_NV = logits(rng, 24)
    assert steps_of(1.0, scored(z_NV, 1.0, ids_N)).gap_of_rounding == 0
    columns = scored(rounded(z_NV, 8), 0.7, ids_N)
    assert steps_of(0.7, columns).are_rounded and not steps_of(1.0, columns).are_rounded


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_gap_of_rounding_is_that_of_two_roundings(rng, temperature):
    """Both sides round logits that differ by more than a step, as those of two engines do."""
    z_NV = logits(rng, 24)
    other_NV = z_NV + 0.25 * rng.standard_normal(z_NV.shape)
    p_NV = np.exp(z_NV / temperature - np.logaddexp.reduce(z_NV / temperature, axis=1)[:, None])
    ids_N = (p_NV.cumsum(axis=1) < rng.random((TOKENS, 1))).sum(axis=1).clip(max=VOCABULARY - 1)
    errors = []
    for side_NV in (z_NV, other_NV):
        exact, _ = scored(side_NV, temperature, ids_N)
        near, _ = scored(rounded(side_NV, 8), temperature, ids_N)
        errors.append(near - exact)
    measured = float(np.abs(errors[0] - errors[1]).mean())
    one_side = steps_of(temperature, scored(rounded(z_NV, 8), temperature, ids_N)).gap_of_rounding
    assert one_side * np.sqrt(2) == pytest.approx(measured, rel=0.1)


def test_any_order_gives_the_same_bits(rng):
    columns = scored(rounded(logits(rng, 24), 8), 1.0, rng.integers(VOCABULARY, size=TOKENS))
    shuffled = rng.permutation(TOKENS)
    parts = [LogitSteps(), LogitSteps()]
    for part, chosen in zip(parts, np.array_split(shuffled, 2), strict=True):
        part.update(*(column[chosen] for column in columns))
    parts[0].merge(parts[1])
    assert parts[0].gap_of_rounding == steps_of(1.0, columns).gap_of_rounding


def test_a_certain_token_does_not_move_and_too_few_ranks_take_the_mean_step():
    certain = np.full((100, K), -np.inf, dtype=np.float32)
    certain[:, 0] = 0
    steps = LogitSteps()
    steps.update(certain[:, 0], certain)
    assert steps.share_on_grid is None and steps.gap_of_rounding == 0
    # Two ranks: the step is unknown, but log 1/2 is as uncertain as two tokens can be
    pairs = np.full((100, K), np.nan, dtype=np.float32)
    pairs[:, :2] = np.log(0.5)
    row = np.log(np.exp(-np.arange(8) / 8) / np.exp(-np.arange(8) / 8).sum())
    logp_TK = np.tile(np.pad(row, (0, K - 8), constant_values=np.nan), (100, 1)).astype(np.float32)
    steps.update(logp_TK[:, 0], logp_TK)
    before = steps.gap_of_rounding * steps.tokens
    steps.update(pairs[:, 0], pairs)
    added = steps.gap_of_rounding * steps.tokens - before
    expected = 100 * np.sqrt(2 / np.pi / 12) / 8 * np.sqrt(0.5)
    assert steps.step == 1 / 8 and added == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("off", "on_grid"), [(4.3e-6, False), (3.7e-6, True)])
def test_a_distance_from_the_grid_is_not_rounded_to_float32(off, on_grid):
    """The tolerance is 4e-6; differences of 15 nats have steps of 1e-6 in float32."""
    last = np.float32(-15.5)
    first = np.float32(np.float64(last) + 15.25 + off)
    topk = np.array([[first, first - 1, first - 2, last]], dtype=np.float32)
    known_N, exponent_N = step_exponents(topk, 1.0)
    assert known_N[0]
    assert (exponent_N[0] >= -12) == on_grid


@pytest.mark.parametrize(("tokens", "is_known"), [(FEWEST - 1, False), (FEWEST, True)])
def test_the_share_on_the_grid_needs_some_tokens(tokens, is_known):
    steps = LogitSteps()
    steps.on_grid_E[0], steps.off_grid = tokens - 3, 3
    share = (tokens - 3) / tokens if is_known else None
    assert steps.share_on_grid == share
