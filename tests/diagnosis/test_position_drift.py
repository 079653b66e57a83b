"""Gaps that grow with the position, on a few tokens whose answer is computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import position_drift
from mismatch_cli.diagnosis.group_estimates import Mean, mean_over_prompts
from tests.diagnosis.samples import SampleColumns


def test_the_first_quarter_is_compared_with_the_second_half(rng):
    """Of 50 responses of 8 to 11 tokens, as their positions are; twelfths rise steadily or not."""
    lengths = rng.integers(8, 12, 50)
    response_T = np.repeat(np.arange(50), lengths)
    position_T = np.arange(len(response_T)) - (np.cumsum(lengths) - lengths)[response_T]
    tokens = len(response_T)
    sample = SampleColumns(
        position_T=position_T,
        index_N=np.arange(tokens),
        u_N=rng.uniform(0.5, 2.0, tokens) * (1 + position_T),
        group_N=response_T,
    )
    early, late, steady = position_drift.drift_of(sample)
    order = np.argsort(position_T, kind="stable")
    parts = (order[: tokens // 4], order[tokens // 2 :])
    for mean, part in zip((early, late), parts, strict=True):
        assert mean == mean_over_prompts(sample.u_N[part], response_T[part])
    logs = [np.log(sample.u_N[part].mean()) for part in np.array_split(order, 12)]
    assert steady == pytest.approx(np.corrcoef(np.arange(12), logs)[0, 1])


@pytest.mark.parametrize(("tokens", "is_judged"), [(400, True), (399, False)])
def test_a_drift_takes_four_hundred_tokens(tokens, is_judged):
    sample = SampleColumns(
        position_T=np.arange(500),
        index_N=np.arange(500)[:tokens],
        u_N=np.zeros(tokens),
        group_N=np.arange(tokens) % 64,
    )
    drift = position_drift.drift_of(sample)
    assert (drift is not None) == is_judged
    if drift is None:
        finding = position_drift.check(SimpleNamespace(sample=sample))
        assert (finding.check, finding.reason) == ("position-drift", "too few tokens")
    else:
        assert drift[2] == 0.0


@pytest.mark.parametrize(
    ("times", "error", "steady", "dtype", "sharp", "status"),
    [
        (1.36, 0.01, 0.79, "bfloat16", None, "found"),
        (1.34, 0.01, 0.79, "bfloat16", None, "clear"),
        (1.36, 0.01, 0.77, "bfloat16", None, "clear"),
        (1.81, 0.01, 0.0, "bfloat16", None, "found"),
        (1.79, 0.01, 0.0, "bfloat16", None, "clear"),
        (1.81, 0.2, 0.9, "bfloat16", None, "clear"),
        (1.81, 0.01, 0.9, "bfloat16", False, "found"),
        (1.81, 0.01, 0.9, "bfloat16", True, "clear"),
        (1.67, 0.01, 0.9, "fp8", None, "clear"),
        (1.70, 0.01, 0.9, "fp8", None, "found"),
        (1.67, 0.01, 0.9, "int8", None, "clear"),
        (1.70, 0.01, 0.9, "int8", None, "found"),
    ],
)
def test_a_drift_is_large_or_steady_and_no_jump(
    times, error, steady, dtype, sharp, status, monkeypatch
):
    """A coarse cache may raise the gap by a quarter more."""
    early, late = Mean(0.5, error / 2, 100, 64), Mean(0.5 * times, error / 2, 100, 64)
    monkeypatch.setattr(position_drift, "drift_of", lambda _: (early, late, steady))
    jump = None if sharp is None else SimpleNamespace(may_be_sharp=sharp)
    monkeypatch.setattr(position_drift, "sharpest_jump", lambda _: jump)
    monkeypatch.setattr(position_drift, "_share_without_context_N", lambda _: np.array([0.5, 0.25]))
    sample = SimpleNamespace(d_N=np.array([0.2, -0.4]))
    about = {"rollout": {"kv_cache_dtype": dtype}}
    finding = position_drift.check(SimpleNamespace(sample=sample, about=about))
    assert (finding.check, finding.status) == ("position-drift", status)
    assert finding.effect == pytest.approx(times)
    assert finding.measure == "times, second half against first quarter"
    assert finding.evidence == (
        ("typical gaps, first quarter of the positions", 0.5),
        ("second half", 0.5 * times),
        ("z", late.z_of_log_ratio(early)),
        ("correlation of log gap and position", steady),
    )
    if status == "found":
        assert finding.left_N == pytest.approx([0.1, -0.1])
        assert finding.sentence == (
            f"Along the response, the gap grows by a factor of {times:.3g} at equal probabilities."
        )
    elif error == 0.01:
        least = 1.35 if dtype == "bfloat16" else 1.35 * 1.25
        assert finding.reason == f"would have found {least:.2g} times"


def test_a_gap_that_falls_along_the_context_is_left_as_it_is():
    position_N = np.arange(10)
    sample = SampleColumns(axis_N=lambda axis: {"context": position_N}[axis], u_N=10.0 - position_N)
    assert position_drift._share_without_context_N(sample).tolist() == [1.0] * 10
    sample.u_N = position_N - 3.0
    assert position_drift._share_without_context_N(sample) == pytest.approx(0.0)
