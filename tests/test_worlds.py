"""One formula, two libraries: numpy and torch decide alike, and agree within a few units in the
last place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch

from mismatch_cli.base import registry
from mismatch_cli.base.arrays import Array, clamp, namespace, response_sums, select, sorted_within
from mismatch_cli.rules import divergences, weights
from mismatch_cli.rules.algorithms.masks_and_factors import Mask, factor
from mismatch_cli.rules.algorithms.table import TABLE, VARIANTS
from mismatch_cli.rules.policies import TRAINER_ROLLOUT, Policies, Ratio
from tests.rules.trust_regions.cases import (
    INF,
    REGIONS,
    cast,
    coefficient_T,
    decide,
    in_numpy,
    keep_T,
    random_policies,
    settled,
    signs,
    weigh,
    weight_T,
    with_keys,
)

DTYPES = (torch.float32, torch.float64)
RATIOS = [Ratio(level=level) for level in ("token", "product", "mean")]
CLOSE = 4  # units in the last place of the threshold: closer to it, both decisions are right


def worlds(dtype: torch.dtype, seeds: int = 3) -> Iterator[tuple[Policies, Policies]]:
    for seed in range(seeds):
        batch = cast(random_policies(seed), dtype)
        yield batch, in_numpy(batch)


def same_numbers(
    x: Array, y: Array, ulps: float, context: object, dtype: torch.dtype | None = None
) -> None:
    """Within some units in the last place of each number, or of 1, the probabilities that it was
    computed from.

    The units are those of the policies' dtype, where float64 sums were formed of them.
    """
    x, y = np.asarray(x), np.asarray(y)
    assert x.dtype == y.dtype and x.shape == y.shape, context
    finite = np.isfinite(x)
    np.testing.assert_array_equal(x[~finite], y[~finite], err_msg=str(context))
    eps = np.finfo(x.dtype).eps if dtype is None else torch.finfo(dtype).eps
    np.testing.assert_allclose(
        x[finite], y[finite], rtol=ulps * eps, atol=ulps * eps, err_msg=str(context)
    )


def same_weights(pair: Sequence[Array], dtype: torch.dtype, name: str) -> None:
    """Within the rounding of Σd over a response; exp amplifies it by Σ|d|."""
    nothing = 1e-20  # for a vanishing weight, where exp amplifies by its exponent
    np.testing.assert_allclose(
        *map(np.asarray, pair), rtol=512 * torch.finfo(dtype).eps, atol=nothing, err_msg=name
    )


def near(statistic_T: np.ndarray, thresholds: list[float], dtype: str) -> np.ndarray:
    """Whether a statistic lies within `CLOSE` units in the last place of a threshold, on either
    side of 0.
    """
    near_T = np.zeros(len(statistic_T), dtype=bool)
    for threshold in thresholds:
        for limit in (threshold, -threshold, threshold - 1, 1 - threshold):
            unit = max(np.spacing(np.abs(np.dtype(dtype).type(limit))), np.finfo(dtype).eps)
            near_T |= np.abs(statistic_T - limit) <= CLOSE * unit
    return near_T


ROWS = TABLE | VARIANTS
ASKED = dict.fromkeys((*map(Mask, REGIONS), *(mask for row in ROWS.values() for mask in row.masks)))
WEIGHTS = dict.fromkeys(
    (
        *(factor(name, ratio) for name in registry.names(weights.PACKAGE) for ratio in RATIOS),
        *(
            part
            for row in ROWS.values()
            for part in (*row.weight, *([row.term] if row.term else []))
        ),
    )
)


def limits(mask: Mask, settled_F: Sequence[float]) -> list[float]:
    """The thresholds that a statistic is compared with."""
    if mask.region == "veto":
        return [log(float(x)) for x in mask.parameters.values() if float(x)]
    if mask.region == "cumulative-tv":
        return [0.0]
    return [*(float(x) for x in mask.parameters.values() if isinstance(x, float)), *settled_F]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_mask_decides_alike_on_numpy_and_torch(dtype: torch.dtype) -> None:
    """Each mask with its defaults, and as algorithms use it: other thresholds, the other anchor."""
    blocked = dict.fromkeys(ASKED, 0)  # rules on batches take all tokens for one batch
    for of_torch, of_numpy in worlds(dtype):
        advantage_T = signs(len(of_torch.trainer), dtype=dtype)
        for mask in ASKED:
            settled_F = (
                mask.settle(mask.collect(of_numpy, advantage_T.numpy())).tolist()
                if mask.scope
                else []
            )
            torch_says, numpy_says = (
                decide(mask, of_torch, advantage_T),
                decide(mask, of_numpy, advantage_T.numpy()),
            )
            assert isinstance(numpy_says.keep_T, np.ndarray) and numpy_says.keep_T.dtype == bool
            # There 1 − Σ is uncertain by 8 units
            ulps = 4096 if mask.region.startswith("top-k") else 16
            same_numbers(numpy_says.statistic_T, torch_says.statistic_T, ulps, mask, dtype)
            differ_T = numpy_says.keep_T != torch_says.keep_T.numpy()
            assert not (
                differ_T & ~near(numpy_says.statistic_T, limits(mask, settled_F), str(dtype)[6:])
            ).any(), mask
            blocked[mask] += int((~numpy_says.keep_T).sum())
    assert {mask.region for mask, tokens in blocked.items() if not tokens} == {"none"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_weight_is_the_same_number_on_numpy_and_torch(dtype: torch.dtype) -> None:
    """Each weight with its defaults at every level, and as algorithms use it; terms too."""
    for of_torch, of_numpy in worlds(dtype):
        advantage_T = signs(len(of_torch.trainer), dtype=dtype)
        for weight in WEIGHTS:
            weight_T = weigh(weight, of_numpy, advantage_T.numpy())
            expected = weigh(weight, of_torch, advantage_T)
            assert isinstance(weight_T, np.ndarray) and weight_T.dtype == expected.numpy().dtype
            same_weights([weight_T, expected], dtype, str(weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rules_on_batches_find_the_same_in_numpy_and_torch(dtype: torch.dtype) -> None:
    """torch decides with what numpy has found: a first pass may run without torch."""
    for of_torch, _ in worlds(dtype):
        count = len(of_torch.responses.length_S)
        keyed = with_keys(of_torch, np.arange(count) % 3, np.arange(count) // 4)
        advantage_T = signs(count, dtype=dtype)[of_torch.responses.response_T]
        for name in [name for name, row in ROWS.items() if row.batch_rules]:
            sides = (in_numpy(keyed), advantage_T.numpy()), (keyed, advantage_T)
            rules = ROWS[name].batch_rules
            for rule in rules:
                pair = [settled(rule, [side]) for side in sides]
                assert np.array_equal(*(values.key_B for values in pair))
                np.testing.assert_allclose(
                    *(values.values_BF for values in pair), rtol=1e-6, atol=1e-7
                )
            values = {rule: settled(rule, [sides[0]]) for rule in rules}
            batches = [
                (replace(batch, batches=batch.batches.with_values(values)), x_T)
                for batch, x_T in sides
            ]
            kept_N, kept_T = (np.asarray(keep_T(ROWS[name], *side)) for side in batches)
            assert (kept_N != kept_T).sum() <= 1  # within rounding of PPO's clip
            coefficients = [
                np.asarray(coefficient_T(ROWS[name], *side))[kept_N == kept_T] for side in batches
            ]
            same_weights(coefficients, dtype, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_algorithm_weighs_alike_on_numpy_and_torch(dtype: torch.dtype) -> None:
    for of_torch, of_numpy in worlds(dtype):
        advantage_T = signs(len(of_torch.trainer), dtype=dtype)
        sides = (of_numpy, advantage_T.numpy()), (of_torch, advantage_T)
        for name, algorithm in ROWS.items():
            same_weights([weight_T(algorithm, *side) for side in sides], dtype, name)
            kept_N, kept_T = (np.asarray(keep_T(algorithm, *side)) for side in sides)
            coefficients = [
                np.asarray(coefficient_T(algorithm, *side))[kept_N == kept_T] for side in sides
            ]
            assert coefficients[0].dtype == coefficients[1].dtype == advantage_T.numpy().dtype
            same_weights(coefficients, dtype, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_divergence_is_the_same_number_on_numpy_and_torch(dtype: torch.dtype) -> None:
    for of_torch, of_numpy in worlds(dtype):
        pairs = [policies.compare(TRAINER_ROLLOUT) for policies in (of_numpy, of_torch)]
        for k, replace_last in ((1, False), (5, True), (20, False)):
            for divergence, expected in zip(
                *(compared.topk(k, replace_last) for compared in pairs), strict=True
            ):
                # 1 − Σ is uncertain by 8 units
                same_numbers(divergence, expected, 4096, (k, replace_last))
        for name in ("difference_T", "binary_kl_T", "ratio_less_1_T", "log_ratio_T"):
            same_numbers(*(getattr(compared, name) for compared in pairs), 16, name)
        samples = [
            divergences.compare_sampled_token(p.rollout, p.trainer) for p in (of_numpy, of_torch)
        ]
        for name in ("k3_T", "log_odds_gap_T", "rest_rollout_T", "rest_trainer_T"):
            same_numbers(*(getattr(sample, name) for sample in samples), 64, name)
        topk = [p.topk for p in (of_numpy, of_torch)]
        for function in (divergences.full_tv, divergences.full_kl):
            same_numbers(
                *(function(t.rollout, t.trainer) for t in topk if t is not None), 64, function
            )


def test_what_the_standard_lacks() -> None:
    offset_S1 = np.array([0, 2, 2, 5, 5])
    x_T, response_T = (
        np.array([1, 2, 3, -4, 8], dtype=np.float32),
        np.repeat(np.arange(4), [2, 0, 3, 0]),
    )
    expected = [3.0, 0.0, 7.0, 0.0]
    assert response_sums(x_T, offset_S1, response_T).tolist() == expected
    assert response_sums(*map(torch.from_numpy, (x_T, offset_S1, response_T))).tolist() == expected
    assert response_sums(x_T[:0], np.array([0, 0]), response_T[:0]).tolist() == [0.0]
    odd = np.array([np.nan, -INF, INF, -0.0, 0.5], dtype=np.float32)
    for as_array in (np.asarray, torch.from_numpy):
        held = np.asarray(clamp(as_array(odd.copy()), 0.25, 2.0))
        np.testing.assert_array_equal(
            held, np.array([np.nan, 0.25, 2.0, 0.25, 0.5], dtype=np.float32)
        )
        flags = as_array(np.array([True, False, True, False, True]))
        chosen = np.asarray(select(flags, as_array(odd.copy()), as_array(x_T.copy())))
        np.testing.assert_array_equal(chosen, np.array([np.nan, 2, INF, -4, 0.5], dtype=np.float32))


def test_sorting_within_responses_in_every_form() -> None:
    """numpy sorts float32 as integers, which must be in the order of the floats."""
    response_T = np.array([0, 0, 0, 2, 2, 2, 2])
    x_T = np.array([0.5, -INF, -0.25, 3, -2, INF, 1e-30])
    expected = [-INF, -0.25, 0.5, -2, 1e-30, 3, INF]
    for dtype in (np.float32, np.float64):
        columns = x_T.astype(dtype), response_T
        for found_T in (sorted_within(*columns), sorted_within(*map(torch.from_numpy, columns))):
            np.testing.assert_array_equal(np.asarray(found_T), np.array(expected, dtype=dtype))


def test_any_memory_layout_of_a_column_works() -> None:
    """Rare entries are corrected in place, which would be lost in a copy."""
    d_TK = np.random.default_rng(0).normal(size=(64, 20)).astype(np.float32) * 0.02
    d_TK[::7, ::3] = 2.5
    for apart in (np.asfortranarray(d_TK), d_TK[::2, ::3], d_TK.T):
        np.testing.assert_array_equal(
            divergences.phi(apart), divergences.phi(np.ascontiguousarray(apart))
        )
    mu_TK, pi_TK = (
        np.log(np.random.default_rng(seed).dirichlet(np.ones(30), 64)[:, :20]) for seed in (0, 1)
    )
    logq_T, logp_T, outside_T = mu_TK[:, 0].copy(), pi_TK[:, 0].copy(), np.ones(64, dtype=bool)
    values, expected = (
        divergences.topk_divergences(logq_T, logp_T, *map(layout, (mu_TK, pi_TK)), outside_T)
        for layout in (np.asfortranarray, np.ascontiguousarray)
    )
    assert all(map(np.array_equal, values, expected))
    for layout in (np.asfortranarray, np.ascontiguousarray):
        assert divergences.full_kl(*map(layout, (mu_TK, pi_TK))).tolist() == pytest.approx(
            divergences.full_kl(*(torch.from_numpy(x) for x in (mu_TK, pi_TK))).tolist(), rel=1e-9
        )


def test_numpy_is_as_silent_as_torch(recwarn: pytest.WarningsRecorder) -> None:
    """An infinite ratio is a result, not a reason for warnings."""
    logp_T = np.array([-0.1, -200.0, -INF, 0.0], dtype=np.float32)
    policies = Policies(
        logp_T,
        logp_T[::-1].copy(),
        logp_T,
        np.array([0, 2, 4]),
        None,
        np.ones_like(logp_T),
        average=logp_T,
    )
    for algorithm in ROWS.values():
        if not algorithm.needs_top_k:
            coefficient_T(algorithm, policies, np.array([1, -1, 1, -1], dtype=np.float32))
    assert not recwarn.list and namespace(logp_T) is np
