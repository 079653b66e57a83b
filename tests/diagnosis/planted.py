"""The faults of numbers, each planted into a pool of healthy responses at one severity."""

from __future__ import annotations

import numpy as np

from lab.faults import FAULTS
from lab.pool import Pool
from tests.diagnosis.conftest import whole

BY_NAME = {fault.name: fault for fault in FAULTS}
SEVERITY = {
    "log-probs above 0": 1e-3,
    "not a number": 1e-3,
    "0.0 for a missing log-prob": 1e-2,
    "−1.0 for a missing log-prob": 1e-2,
    "appended end-of-sequence, 0.0": 0.1,
    "forced token": 6,
    "accepted drafts without log-probs": 0.4,
    "log(p + 1e−10)": 3,
    "rounded to decimals": 1,
    "shifted by many": 8,
    "one of three engines": 0.1,
    "another end-of-sequence token": 0.1,
    "tool tokens in the loss": 0.1,
    "shifted by one": 0.1,
    "retokenised": 0.5,
    "minus the entropy": 0.5,
    "of the most probable token": 0.5,
    "mean of the response": 0.5,
    "running sum": 0.5,
    "mixed with a uniform distribution": 0.02,
    "a logit bias on one token": -3,
    "temperature on one side": 1.05,
    "temperature, sampled tokens alone": 1.05,
    "weights that drift apart": 0.1,
    "other weights from a step on": 0.1,
    "other weights in two steps": 0.1,
    "stale prefix cache": 0.1,
    "RoPE base": 4,
    "other numbers from one position on": 0.1,
    "log-probs stored in bfloat16": 1,
    "routing flips": 0.03,
    "broken responses": 0.1,
    "a constant in half the responses": 0.2,
    "a constant added, clipped at 0": 0.3,
    "a constant of each response": 0.1,
    "permuted within groups": 0.3,
    "permuted over the batch": 0.3,
    "duplicated rows": 0.1,
    "another base in the engine": 2,
    "another base in the trainer": 10,
    "another base on both sides": 10,
    "top-K one token late": 0.1,
    "top-K before the temperature": 0.9,
    "repetition penalty": 1.1,
}
# Of six: variants score with the first step's weights, so later learning would be a second fault
FIRST_STEPS = 3


def first_steps(pool: Pool) -> Pool:
    return pool.take(np.flatnonzero(pool.rows["step"] < FIRST_STEPS))


def broken(pool: Pool, name: str) -> Pool:
    """A copy of a pool with a fault."""
    copy = first_steps(pool) if name == "temperature on one side" else whole(pool)
    BY_NAME[name].plant(copy, SEVERITY[name], np.random.default_rng(3))
    return copy
