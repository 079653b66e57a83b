"""What sets decoding and prefill apart, on passes whose errors are known."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.bisect.decoding import (
    DECODING_FARTHER,
    EQUAL,
    PREFILL_FARTHER,
    ROUNDING,
    UNDECIDED,
    decode_against_prefill,
    reason_apart,
)
from mismatch_cli.bisect.effects import Effects, GapSums
from mismatch_cli.metrics.estimate import Estimate
from tests.bisect.searches import analysis


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return analysis(tmp_path_factory.mktemp("search")).measured.tokens


def answer(tokens, decode_T: np.ndarray, prefill_T: np.ndarray) -> str:
    """The answer for two passes by their errors against float32, nats."""
    exact_T, effects = np.full(len(decode_T), -1.0), Effects(tokens)
    against = [
        GapSums.between(tokens, exact_T + error_T, exact_T) for error_T in (decode_T, prefill_T)
    ]
    apart = effects.gap(GapSums.between(tokens, decode_T - 1, prefill_T - 1))
    return decode_against_prefill(effects, apart, *against)


def test_rounding_in_a_different_order_is_no_fault_and_a_fault_is_named(tokens):
    rng = np.random.default_rng(1)
    count = tokens.num_responses * 12
    rounding, other, fault = (0.03 * rng.laplace(0, 1, count) for _ in range(3))
    assert answer(tokens, rounding, other) == ROUNDING
    assert answer(tokens, rounding, rounding) == EQUAL
    assert answer(tokens, rounding + fault, other) == DECODING_FARTHER
    assert answer(tokens, rounding + fault, rounding) == DECODING_FARTHER
    assert answer(tokens, rounding, other + fault) == PREFILL_FARTHER
    # Too small beside the rounding that both share
    assert answer(tokens, rounding + 1e-2 * other, rounding) == UNDECIDED


def test_what_could_not_have_been_seen_is_not_cleared():
    """A fault that makes a quarter of 0.04² beside 0.03 would be 0.00606 farther."""
    apart, prefill = Estimate(0.04, 0.03, 0.05), Estimate(0.03, 0.02, 0.04)
    cases = {
        ROUNDING: (-0.006, 0.00605),
        UNDECIDED: (-0.001, 0.0061),
        DECODING_FARTHER: (0.002, 0.02),
        PREFILL_FARTHER: (-0.02, -0.002),
    }
    for expected, (low, high) in cases.items():
        assert reason_apart(apart, prefill, Estimate((low + high) / 2, low, high)) == expected
    assert reason_apart(apart, prefill, Estimate(0.0)) == UNDECIDED  # few prompts: no interval
    assert reason_apart(Estimate(1e-6), prefill, Estimate(0.0)) == EQUAL
