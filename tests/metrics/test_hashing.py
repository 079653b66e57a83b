"""Weights and groups that follow from keys alone."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.metrics.hashing import GROUPS, Prompts, hash_keys, mix, poisson_weights, prompt_groups, resample


def test_mix_is_splitmix64() -> None:
    assert int(mix(np.array([0], dtype=np.uint64))[0]) == 0xE220A8397B1DCDAF  # first output of splitmix64 seeded with 0


def test_weights_are_poisson_with_mean_one() -> None:
    weights = poisson_weights(np.arange(5000), 200).astype(float)
    assert weights.shape == (200, 5000)
    assert weights.mean() == pytest.approx(1, abs=0.005)
    assert weights.var() == pytest.approx(1, abs=0.01)
    assert (weights == 0).mean() == pytest.approx(np.exp(-1), abs=0.002)
    assert (weights == 3).mean() == pytest.approx(np.exp(-1) / 6, abs=0.002)
    assert weights.max() >= 7


def test_weights_are_uncorrelated_between_prompts_and_replicates() -> None:
    weights = poisson_weights(np.arange(400), 400) - 1.0
    for matrix in (np.corrcoef(weights), np.corrcoef(weights.T)):
        assert np.abs(matrix - np.eye(400)).max() < 0.3
        assert np.abs(matrix[~np.eye(400, dtype=bool)].mean()) < 0.003


def test_weights_do_not_depend_on_who_else_is_there() -> None:
    ids = np.array([-5, 3, 2**62, 17])
    together = poisson_weights(ids, 50)
    for column, prompt in enumerate(ids):
        np.testing.assert_array_equal(poisson_weights(np.array([prompt]), 50)[:, 0], together[:, column])
    assert not np.array_equal(poisson_weights(ids, 50, seed=1), together)


def test_resampling_is_a_matrix_product_however_many_prompts() -> None:
    weights, sums = poisson_weights(np.arange(9000), 20), np.random.default_rng(0).normal(size=(9000, 3))
    np.testing.assert_allclose(resample(weights, sums), weights.astype(float) @ sums, rtol=1e-12, atol=1e-9)


def test_groups_are_even() -> None:
    counts = np.bincount(prompt_groups(np.arange(32_000)), minlength=GROUPS)
    assert len(counts) == GROUPS and counts.min() > 850 and counts.max() < 1150


def test_every_key_matters() -> None:
    a, b = np.array([1, 1, 2, 2]), np.array([1, 2, 1, 2])
    assert len(set(hash_keys(a, b).tolist())) == 4
    assert hash_keys(a, b)[0] != hash_keys(a, b, seed=1)[0]


def test_sums_by_prompt() -> None:
    prompts = Prompts.of(np.array([7, 5, 7]), replicates=2)
    assert prompts.sum_by_prompt(np.array([[1.0], [2.0], [4.0]])).tolist() == [[2.0], [5.0]]
