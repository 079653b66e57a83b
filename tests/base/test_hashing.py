"""Hashes and groups depend only on keys."""

from __future__ import annotations

import numpy as np

from mismatch_cli.base.hashing import GROUPS, hash_keys, mix, prompt_groups, sum_by_group


def test_mix_is_splitmix64() -> None:
    # First output of splitmix64 seeded with 0
    assert int(mix(np.array([0], dtype=np.uint64))[0]) == 0xE220A8397B1DCDAF


def test_groups_are_even() -> None:
    counts = np.bincount(prompt_groups(np.arange(32_000)), minlength=GROUPS)
    assert len(counts) == GROUPS and counts.min() > 190 and counts.max() < 310


def test_every_key_matters() -> None:
    a, b = np.array([1, 1, 2, 2]), np.array([1, 2, 1, 2])
    assert len(set(hash_keys(a, b).tolist())) == 4
    assert hash_keys(a, b)[0] != hash_keys(a, b, seed=1)[0]


def test_sums_by_group() -> None:
    sums = sum_by_group(np.array([7, 5, 7]), np.array([[1.0], [2.0], [4.0]]))
    assert sums.shape == (GROUPS, 1) and sums[[5, 7], 0].tolist() == [2, 5] and sums.sum() == 7
    assert not sum_by_group(np.zeros(0, dtype=int), np.zeros((0, 2))).any()
