"""The position from which a gap is larger, on a few tokens whose answer is computed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import sharp_onset
from mismatch_cli.diagnosis.checks.sharp_onset import Jump
from mismatch_cli.diagnosis.group_estimates import Mean, mean_over_prompts
from tests.diagnosis.samples import SampleColumns

BEFORE, AFTER = Mean(1.0, 0.01, 100, 64), Mean(2.0, 0.01, 100, 64)


def sample_of(position_N: np.ndarray, u_N: np.ndarray, group_N=None) -> SampleColumns:
    group_N = np.arange(len(u_N)) % 64 if group_N is None else group_N
    return SampleColumns(axis_N=lambda _: position_N, u_N=u_N, d_N=0.1 * u_N, group_N=group_N)


def test_windows_have_the_tokens_of_eight_positions_on_either_side(rng):
    """Of twenty positions, with one to five tokens each, four have eight on both sides... and the
    position after the last such.
    """
    position_N = np.repeat(np.arange(20), np.resize([1, 5, 2, 4, 3], 20))
    u_N = rng.uniform(0.5, 2.0, len(position_N))
    before, after = sharp_onset._windows(sample_of(position_N, u_N), position_N)
    assert len(before.count_I) == len(after.count_I) == 5
    for at, start in enumerate(range(8, 13)):
        for window, first in ((before, start - 8), (after, start)):
            own_N = u_N[(position_N >= first) & (position_N < first + 8)]
            assert window.count_I[at] == len(own_N)
            assert window.mean_I[at] == pytest.approx(own_N.mean())
            assert window.variance_I[at] == pytest.approx(own_N.var())


def window_of(count: list[float], mean: list[float], variance: list[float]):
    return sharp_onset._Window(np.array(count), np.array(mean), np.array(variance))


def test_a_rise_is_in_standard_errors_and_in_standard_deviations():
    before = window_of([100, 49, 50, 50, 80], [1, 1, 1, 1, 3], [0.5, 0.5, 0.0, 0.5, 0.2])
    after = window_of([50, 50, 50, 49, 60], [2, 2, 2, 2, 1], [0.3, 0.3, 0.0, 0.3, 0.4])
    z_I, size_I = sharp_onset._rise(before, after)
    expected = [1 / np.sqrt(0.5 / 100 + 0.3 / 50), *[-np.inf] * 3]
    assert z_I == pytest.approx([*expected, -2 / np.sqrt(0.2 / 80 + 0.4 / 60)])
    assert size_I[[0, 4]] == pytest.approx([1 / np.sqrt(0.4), -2 / np.sqrt(0.3)])


@pytest.mark.parametrize(
    ("sharpness", "size", "z", "is_sharp", "may_be_sharp"),
    [
        (0.61, 0.61, 5.1, True, True),
        (0.61, 0.61, 4.9, False, False),
        (0.59, 0.61, 5.1, False, False),
        (0.61, 0.59, 5.1, False, True),
        (0.81, 0.56, 5.1, True, True),
        (0.81, 0.54, 5.1, False, True),
        (0.79, 0.56, 5.1, False, True),
        (0.61, 0.41, 5.1, False, True),
        (0.61, 0.39, 5.1, False, False),
        (0.61, 0.41, 4.9, False, False),
    ],
)
def test_a_jump_is_sharp_by_its_share_of_the_rise_and_its_size(
    sharpness, size, z, is_sharp, may_be_sharp
):
    jump = Jump(9, "response", BEFORE, AFTER, sharpness, size, z)
    assert (jump.is_sharp, jump.may_be_sharp) == (is_sharp, may_be_sharp)


def stepped(rng, tokens_at: int = 60, length: int = 40, at: int = 24, drift: float = 0.0):
    """Gaps of 1 and, from one position on, of 2, which rise along the response as well."""
    position_N = np.tile(np.arange(length), tokens_at)
    u_N = np.where(position_N < at, 1.0, 2.0) * np.exp(drift * position_N)
    u_N = u_N + 0.2 * rng.normal(size=len(position_N))
    group_N = np.repeat(np.arange(tokens_at), length)
    return sample_of(position_N, u_N, group_N), position_N


def test_a_jump_has_the_means_before_and_after_it_and_its_share_of_the_rise(rng):
    sample, position_N = stepped(rng, drift=0.01)
    jump = sharp_onset.jump_on(sample, "context")
    assert (jump.index, jump.axis) == (24, "context")
    is_after_N = position_N >= 24
    for mean, own_N in ((jump.before, ~is_after_N), (jump.after, is_after_N)):
        assert mean == mean_over_prompts(sample.u_N[own_N], sample.group_N[own_N])
    near = [
        sample.u_N[(position_N >= start) & (position_N < start + 8)].mean() for start in (16, 24)
    ]
    rises = [np.log(near[1] / near[0]), np.log(jump.after.value / jump.before.value)]
    assert jump.sharpness == pytest.approx(rises[0] / rises[1])


def test_a_jump_takes_four_hundred_tokens_with_fifty_on_either_side(rng):
    for tokens_at, length, is_judged in (
        (10, 40, True),
        (10, 39, False),
        (7, 60, True),
        (6, 70, False),
    ):
        sample, position_N = stepped(rng, tokens_at, length)
        assert (sharp_onset.jump_on(sample, "response") is not None) == is_judged, tokens_at
        assert len(position_N) == tokens_at * length


def test_a_gap_that_falls_has_no_share_of_a_rise(rng):
    """The most significant rise is a small one, within a gap that falls by half."""
    position_N = np.tile(np.arange(60), 60)
    u_N = np.where(position_N < 20, 4.0, np.where(position_N < 40, 1.0, 1.5))
    sample = sample_of(position_N, u_N + 0.1 * rng.normal(size=len(u_N)))
    jump = sharp_onset.jump_on(sample, "response")
    assert jump.index == 40 and jump.sharpness == 0.0 and not jump.is_sharp


def test_a_log_ratio_of_nothing_is_finite():
    assert sharp_onset._log_ratio(1.0, 2.0) == pytest.approx(np.log(2.0))
    assert sharp_onset._log_ratio(0.0, 1.0) == pytest.approx(np.log(1e9))
    assert sharp_onset._log_ratio(1.0, 0.0) == pytest.approx(-np.log(1e9))


def test_the_axis_with_the_more_significant_jump_is_taken(monkeypatch):
    z_of = {"response": 5.0, "context": 7.0}

    def jump_on(_, axis: str):
        return z_of[axis] and Jump(9, axis, BEFORE, AFTER, 0.9, 0.9, z_of[axis])

    monkeypatch.setattr(sharp_onset, "jump_on", jump_on)
    assert sharp_onset.sharpest_jump(None).axis == "context"
    z_of["response"] = 9.0
    assert sharp_onset.sharpest_jump(None).axis == "response"
    z_of["response"] = None
    assert sharp_onset.sharpest_jump(None).axis == "context"
    z_of["context"] = None
    assert sharp_onset.sharpest_jump(None) is None


@pytest.mark.parametrize(("sharpness", "status"), [(0.9, "found"), (0.5, "clear")])
def test_a_jump_is_named_with_its_position_and_taken_off_what_follows(
    sharpness, status, monkeypatch
):
    jump = Jump(20, "context", BEFORE, AFTER, sharpness, 0.8, 6.0)
    monkeypatch.setattr(sharp_onset, "sharpest_jump", lambda _: jump)
    sample = SampleColumns(axis_N=lambda axis: {"context": np.arange(18, 23)}[axis], d_N=np.ones(5))
    finding = sharp_onset.check(SimpleNamespace(sample=sample))
    assert (finding.check, finding.status, finding.effect) == ("sharp-onset", status, 2.0)
    assert finding.measure == "times from one position on"
    assert finding.evidence == (
        ("position, counted in the context", 20),
        ("typical gaps before", 1.0),
        ("from there on", 2.0),
        ("z", AFTER.z_of_log_ratio(BEFORE)),
        ("share of the rise within 8 positions", sharpness),
        ("that share in standard deviations", 0.8),
    )
    if status == "found":
        assert finding.left_N.tolist() == [1.0, 1.0, 0.5, 0.5, 0.5]
        assert finding.sentence == (
            "From position 20 of the context on, the gap is 2 times that before."
        )
    else:
        assert finding.reason == "would have found 1.7 times"


def test_without_a_jump_there_are_too_few_tokens(monkeypatch):
    monkeypatch.setattr(sharp_onset, "sharpest_jump", lambda _: None)
    finding = sharp_onset.check(SimpleNamespace(sample=None))
    assert (finding.check, finding.status, finding.reason) == (
        "sharp-onset", "untested", "too few tokens"
    )  # fmt: skip
