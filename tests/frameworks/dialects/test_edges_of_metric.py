"""What lines reduce and how, at bounds and in small cases by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.frameworks import dialects
from mismatch_cli.frameworks.dialects import _metric
from mismatch_cli.frameworks.dialects._metric import Moments

BELOW_2, ABOVE_2 = (np.nextafter(np.float32(2), np.float32(end)) for end in (0, 3))


def gaps(**columns):
    """Counted tokens in support."""
    arrays = {name: np.array(values, np.float32) for name, values in columns.items()}
    advantage_N = arrays.pop("advantage", None)
    return SimpleNamespace(out_of_support_N=None, column=lambda _: advantage_N, **arrays)


def moments(*batches: list[float]) -> Moments:
    state = Moments()
    for batch in batches:
        state.update(np.array(batch, np.float32))
    return state


def test_a_ratio_at_a_bound_is_not_beyond_it():
    ratios = gaps(ratio_N=[BELOW_2, 2, ABOVE_2, 0.5, 0.25])
    assert _metric.ratio_above(2.0)(ratios).tolist() == [False, False, True, False, False]
    assert _metric.ratio_below(0.5)(ratios).tolist() == [False] * 4 + [True]
    assert _metric.ratio_outside(0.5, 2.0)(ratios).tolist() == [False, False, True, False, True]


def test_a_flag_counts_where_the_advantage_has_its_sign():
    signs = gaps(ratio_N=[3, 3, 3, 1], advantage=[-0.5, 0, 2, 2])
    above = _metric.ratio_above(2.0)
    assert _metric.where_advantage(above, 1)(signs).tolist() == [False, False, True, False]
    assert _metric.where_advantage(above, -1)(signs).tolist() == [True, False, False, False]


def line_of(framework: str, name: str) -> dialects.FrameworkMetric:
    return next(line for line in dialects.lines(framework) if line.name == name)


def test_bounds_of_a_framework_are_not_beyond_themselves():
    """The float32 neighbors of log 2, of 2⁻²⁴, below which exp is 1, and of ipo's eps."""
    tail = line_of("areal", "ppo_actor/train_infer/ratio_outside_2")
    at = np.float32(math.log(2))
    far = gaps(abs_d_N=[at, np.nextafter(at, np.float32(1)), np.nextafter(at, np.float32(0))])
    assert tail.quantities[0](far).tolist() == [False, True, False]
    tis = line_of("roll", "actor/tis_upper_clipfrac")
    at = np.float32(2**-24)
    assert tis.quantities[0](gaps(d_N=[at, np.nextafter(at, np.float32(1)), -1])).tolist() == [
        False,
        True,
        False,
    ]


def test_moments_of_batches_are_those_of_all_values():
    state = moments([1, 2], [], [6], [-3, 4])
    assert (state.count, state.mean, state.squares) == (5, 2, pytest.approx(46))
    assert (state.least, state.largest) == (-3, 6)
    assert _metric.total(state) == 10
    assert _metric.sample_sd(state) == _metric.sample_sd_or_0(state) == pytest.approx(11.5**0.5)
    assert _metric.population_sd(state) == pytest.approx(9.2**0.5)
    assert _metric.effective_share(state) == pytest.approx(4 / (4 + 9.2))
    assert _metric.ratio_of_means(state, moments([8, 0])) == 0.5
    assert math.isnan(_metric.ratio_of_means(state, moments([1, -1])))
    one = moments([3])
    assert math.isnan(_metric.sample_sd(one)) and _metric.sample_sd_or_0(one) == 0
    assert _metric.population_sd(one) == 0


@pytest.mark.parametrize("batches", [([1, math.inf], [2]), ([2], [1, math.inf]), ([math.inf],)])
def test_moments_with_an_infinite_value_are_infinite(batches):
    state = moments(*batches)
    assert (state.mean, state.squares, state.largest) == (math.inf,) * 3
    assert state.count == sum(map(len, batches))


def test_extremes_of_signed_differences_count_padding_as_0():
    """oat: no maximum is below 0, and no minimum above."""
    high, low = (line_of("oat", f"sampler_learner_prob_diff_{end}") for end in ("max", "min"))
    for values, expected in (([0.25, 0.5], (0.5, 0)), ([-0.25, -0.5], (0, -0.5)), ([0], (0, 0))):
        state = moments(values)
        assert (high.reduce(state), low.reduce(state)) == expected


def test_clamps_hold_for_excluded_tokens_too():
    """d of −30, 30 and −∞ at ±20, and the weight between a floor and a cap."""
    tokens = gaps(d_N=[-30, 30, 0.5, 0])
    tokens.out_of_support_N = np.array([False, False, False, True])
    assert _metric.clamped_d()(tokens).tolist() == [-20, 20, 0.5, -20]
    assert _metric.clamped_d(10.0)(tokens).tolist() == [-10, 10, 0.5, -10]
    weights = _metric.weight(2.0, 0.25, 10.0)(tokens)
    assert weights == pytest.approx([0.25, 2, math.exp(0.5), 0.25])
    assert _metric.weight()(tokens)[0] == pytest.approx(math.exp(-20))
    assert _metric.D(tokens).tolist() == [-30, 30, 0.5]
    assert _metric.zeroed(_metric.D)(tokens).tolist() == [-30, 30, 0.5, 0]
    assert _metric.LOG_RATIO(tokens).tolist() == [-30, 30, 0.5, -math.inf]
    assert _metric.MINUS_D(tokens).tolist() == [30, -30, -0.5]
