"""The estimate of what is left to sample: within a factor of two after a tenth of the tokens,
and never 0/s.
"""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.app import sampling_meter as _sampling_meter
from mismatch_cli.app.sampling_meter import SamplingMeter, short

RESPONSES, MOST = 256, 256


def lengths(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Lengths of responses of at most 256 tokens."""
    drawn = {
        "exponential": rng.exponential(60, RESPONSES),
        "all cut off": np.full(RESPONSES, MOST),
        "log-normal": rng.lognormal(4, 0.7, RESPONSES),
        "two kinds": rng.choice([20, 250], RESPONSES),
        "a few short ones": np.where(rng.random(RESPONSES) < 0.1, 5, MOST),
    }
    return np.clip(drawn[kind].astype(int), 1, MOST)


@pytest.mark.parametrize(
    ("kind", "at_once"),
    [
        ("exponential", 64), ("all cut off", 64), ("log-normal", 64), ("two kinds", 64),
        ("a few short ones", 64),
        ("exponential", 256), ("all cut off", 256), ("a few short ones", 256),
    ],
)  # fmt: skip
def test_after_a_tenth_the_estimate_is_within_a_factor_of_two(kind: str, at_once: int) -> None:
    """As an engine works: so many at once, one token each a step, and the next begins when one
    ends.

    A constant chance to end is a crude model of lengths: of short and long responses it misjudges
    the long ones more, and most where all begin at once.
    """
    length_S = lengths(kind, np.random.default_rng(0))
    total, waiting = int(length_S.sum()), length_S.tolist()
    meter = SamplingMeter(len(length_S), MOST, lambda _: None)
    running = [waiting.pop() for _ in range(at_once)]
    wrong = []
    while running:
        meter.tokens(len(running))
        running = [left - 1 for left in running]
        ended = running.count(0)
        running = [left for left in running if left] + [
            waiting.pop() for _ in range(min(ended, len(waiting)))
        ]
        if ended:
            meter(ended)
        if 0.1 * total <= meter.sampled <= 0.9 * total:
            wrong.append(meter.left / (total - meter.sampled))
    factor = 2.4 if kind == "two kinds" else 2.1
    assert min(wrong) > 1 / factor and max(wrong) < factor
    assert meter.sampled == total and meter.left == 0


def test_an_engine_that_tells_no_tokens_is_counted_in_responses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(_sampling_meter.time, "monotonic", lambda: now)
    meter = SamplingMeter(10, MOST, lambda _: None)
    assert meter.describe() == "no response yet"
    now = 110.0
    meter(2)
    assert meter.describe() == "0.2 responses/s, about 40 s left"
    whole = SamplingMeter(4, 50, lambda _: None)
    now = 120.0
    whole.tokens(100)
    assert whole.describe() == "10 tokens/s, at most 10 s left"


def test_a_slow_rate_is_never_zero() -> None:
    assert [short(rate) for rate in (1234.4, 10, 3.21, 0.042)] == ["1,234", "10", "3.2", "0.042"]
