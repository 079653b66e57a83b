"""Every line compared with its owner's formula, on realistic and on hostile tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mismatch_cli.base.places import bundled
from mismatch_cli.frameworks import dialects
from mismatch_cli.trace.reader import Trace
from tests.frameworks.dialects.conftest import rows
from tests.frameworks.dialects.padded import Padded, padded
from tests.frameworks.dialects.theirs import THEIRS, Formula
from tests.looped import looped

Columns = dict[str, list[Any]]


def response(random: np.random.Generator, number: int, length: int) -> dict[str, Any]:
    """μ, π′ and π of a response with tool turns in between, and what belongs to it."""
    mu = -random.exponential(1.5, length)
    recomputed = np.minimum(mu + random.normal(0, 0.3, length), -1e-3)
    return {
        "logp_rollout": mu,
        "logp_recomputed": recomputed,
        "logp_trainer": np.minimum(recomputed + random.normal(0, 0.4, length), -1e-3),
        "loss_mask": (np.arange(length) % 7 < 4) | (length < 6),
        "advantage": np.full(length, (1.0, -1.0, 0.5, 0.0)[number % 4]),
        "entropy_trainer": random.exponential(0.5, length),
        "reward": float(number % 2),
    }


def three_policies(seed: int = 0, lengths: tuple[int, ...] = (5, 12, 1, 8, 30, 9)) -> Columns:
    """Responses with positive, negative and zero advantages, entropies and rewards."""
    random = np.random.default_rng(seed)
    responses = [response(random, number, length) for number, length in enumerate(lengths)]
    return {name: [its[name] for its in responses] for name in responses[0]}


def _far(columns: Columns) -> None:
    """Gaps beyond the clamps of verl, SkyRL and miles (±20), of open-instruct (±10), and of
    float32 exp (88).
    """
    for row, place, rollout, recomputed, trainer in (
        (0, 0, -0.5, -24.0, -0.5),
        (0, 2, -26.0, -0.5, -31.0),
        (1, 1, -0.1, -15.0, -0.1),
        (3, 0, -95.0, -0.2, -95.0),
        (4, 3, -0.2, -0.3, -96.0),
        (5, 0, -2.0, -96.0, -0.1),
    ):
        for name, value in (("rollout", rollout), ("recomputed", recomputed), ("trainer", trainer)):
            columns[f"logp_{name}"][row][place] = value


def _outside(columns: Columns) -> None:
    """Tokens that the trainer excludes at the weights that sampled, now, or both; one that the
    rollout excludes.
    """
    columns["logp_recomputed"][0][1] = columns["logp_trainer"][0][1] = -math.inf
    columns["logp_trainer"][1][0] = columns["logp_trainer"][4][7] = -math.inf
    columns["logp_recomputed"][3][2] = -math.inf
    columns["logp_rollout"][5][0] = -math.inf


def _large(columns: Columns) -> None:
    """Complete responses that drift past every threshold."""
    for row, step in ((0, 1.5), (1, -2.0), (4, 0.9)):
        columns["logp_rollout"][row] = columns["logp_recomputed"][row] - step


def _masked(columns: Columns) -> None:
    columns["loss_mask"][1][:] = False
    for name, values in columns.items():
        if name != "reward":
            values[3] = values[3][:0]


def _no_signal(columns: Columns) -> None:
    columns["advantage"] = [np.zeros_like(values) for values in columns["advantage"]]


def _some_without_signal(columns: Columns) -> None:
    """A = 0 at single tokens whose probability under the trainer fell."""
    columns["advantage"][1][::2] = 0
    columns["logp_rollout"][1][:] = -0.05
    columns["logp_trainer"][1][:] = -3.0


def _one_token(columns: Columns) -> None:
    for name, values in columns.items():
        columns[name] = [row[:1] if name != "reward" else row for row in values[:1]]


def _one_response(columns: Columns) -> None:
    for name, values in columns.items():
        columns[name] = values[4:5]


def _without(*names: str) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        for name in names:
            del columns[name]

    return change


HOSTILE: dict[str, Callable[[Columns], None]] = {
    "far": _far,
    "outside": _outside,
    "large": _large,
    "masked": _masked,
    "no signal": _no_signal,
    "some without signal": _some_without_signal,
    "one token": _one_token,
    "one response": _one_response,
    "no recomputed": _without("logp_recomputed"),
    "only log-probs": _without("advantage", "entropy_trainer", "reward"),
}


def trace_of(columns: Columns, write: Callable[..., Trace]) -> Trace:
    mu = columns.pop("logp_rollout")
    return write(rows(mu, **columns, version_trainer=[1] * len(mu)))


def theirs_of(formula: Formula, gap: Padded) -> float:
    """The owner's value; if it is infinite or NaN, the value over tokens that π does not
    exclude, and NaN if there is none.
    """
    try:
        shown = float(formula(gap))
        return shown if math.isfinite(shown) else float(formula(gap.in_support()))
    except (RuntimeError, IndexError):  # torch: max of an empty tensor
        return math.nan


COLUMN_OF = {
    "advantage_T": "advantage",
    "entropy_trainer_T": "entropy",
    "reward_S": "reward",
    "logp_recomputed_T": "recomputed",
}


def check_all(trace: Trace, gaps: tuple[dict[str, Padded], ...], tolerance: float) -> None:
    """Check that every value is one of its owner's, in each batch's float type; it is missing
    only if the owner's is.
    """
    for framework, lines in dialects.readings([trace], dialects.names()).by_framework.items():
        for value, why, line in ((reading.value, reading.why, reading.line) for reading in lines):
            batches = [pairs[line.compares] for pairs in gaps if line.compares in pairs]
            inputs = [getattr(gap, COLUMN_OF[name]) for gap in batches for name in line.needs]
            if line.lacks or not batches or any(column is None for column in inputs):
                assert value is None and why.startswith("not measured: needs"), line.name
                continue
            theirs = [theirs_of(THEIRS[framework][line.name], gap) for gap in batches]
            if value is None:
                assert not math.isfinite(theirs[0]), (line.name, theirs)
                assert not why.startswith("not measured"), line.name
            else:
                near = [pytest.approx(expected, rel=tolerance, abs=1e-6) for expected in theirs]
                assert value in near, (line.name, value, theirs)


@looped("case", HOSTILE)
def test_hostile_tokens(case, write):
    """In float32, as owners compute, or in float64, as our sums hold more than a float32."""
    columns = three_policies()
    HOSTILE[case](columns)
    trace = trace_of(columns, write)
    gaps = padded(trace, torch.float32), padded(trace, torch.float64)
    check_all(trace, gaps, tolerance=1e-4)


@looped("seed", range(3))
def test_turns_and_three_policies(seed, write):
    trace = trace_of(three_policies(seed, lengths=(40, 7, 25, 60, 3, 18, 33, 90)), write)
    check_all(trace, (padded(trace),), tolerance=3e-5)


@pytest.fixture(scope="module")
def on_bundled():
    trace = Trace.open(bundled("traces/fp8-kv"))
    return dialects.readings([trace], dialects.names()).by_framework, padded(trace)


@pytest.mark.parametrize("framework", dialects.names())
def test_every_line_is_what_the_framework_computes(framework, on_bundled):
    """On real tokens, to the precision of float32 columns."""
    readings, gaps = on_bundled
    measured = [reading for reading in readings[framework] if not reading.line.lacks]
    assert {reading.line.name for reading in measured} == THEIRS[framework].keys()
    for reading in measured:
        theirs = float(THEIRS[framework][reading.line.name](gaps[reading.line.compares]))
        assert reading.value == pytest.approx(theirs, rel=3e-5, abs=2e-9), reading.line.name
