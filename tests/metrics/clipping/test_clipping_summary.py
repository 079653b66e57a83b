"""A complete summary: sharding, order, slices, and missing intervals."""

from __future__ import annotations

import json
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest

from mismatch_cli.base.json_form import to_json
from mismatch_cli.metrics.clipping import breakdown, masked_slice
from mismatch_cli.metrics.clipping.clipping_summary import ClippingSummary, Question
from mismatch_cli.metrics.estimate import FEW_DECIDE
from mismatch_cli.metrics.gaps import token_gaps
from mismatch_cli.rules.batch import TokenBatch
from tests.leaves import assert_close
from tests.metrics.clipping.world import (
    ALL,
    EVERYTHING,
    PLAIN,
    estimates_in,
    plain_algorithms,
    result_of,
    simple,
    summarise,
    world,
)

SHARES = ("blocked", "touched", "over_", "share", "wrong", "decided", "lost/", "/ess")


def merged(parts: list[TokenBatch]) -> ClippingSummary:
    whole = ClippingSummary(Question(ALL, EVERYTHING, theory=True))
    for part in parts:
        whole.merge(pickle.loads(pickle.dumps(summarise(part, theory=True, whole=parts))))
    return whole


@pytest.fixture(scope="module")
def shards() -> list[TokenBatch]:
    return [world(seed, 24) for seed in range(4)]


@pytest.fixture(scope="module")
def in_order(shards) -> dict[str, Any]:
    return to_json(merged(shards).result(50))


@pytest.mark.slow
def test_merging_the_same_shards_again_gives_the_same_bits(shards, in_order):
    assert json.dumps(to_json(merged(shards).result(50))) == json.dumps(in_order)


def test_shards_in_another_order_give_the_same_counts(shards, in_order):
    assert_close(in_order, to_json(merged(shards[::-1]).result(50)))


@pytest.mark.slow
def test_one_summary_of_all_shards_gives_the_same_counts(shards, in_order):
    assert_close(in_order, to_json(summarise(*shards, theory=True).result(50)))


@pytest.mark.slow
def test_responses_in_another_order_give_the_same_counts(take_responses):
    batch = world(5, 40)
    order = np.random.default_rng(0).permutation(batch.num_responses)
    assert_close(
        result_of(batch, theory=True), result_of(take_responses(batch, order), theory=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [1, 50, 400])
def test_the_size_of_slices_does_not_matter(monkeypatch, max_tokens):
    batch = world(6, 40)
    whole = result_of(batch, theory=True)
    monkeypatch.setattr(masked_slice, "token_gaps", partial(token_gaps, max_tokens=max_tokens))
    assert_close(whole, result_of(batch, theory=True))


def test_the_sample_is_the_same_in_any_order(monkeypatch, shards):
    """With room for only some of the tokens."""
    monkeypatch.setattr(breakdown, "SAMPLE_TOKENS", 300)
    first, other = merged(shards).sample.rows(), merged(shards[::-1]).sample.rows()
    assert len(first) == 300 and first.tobytes() == other.tobytes()


def test_shares_and_their_intervals_are_between_0_and_1(in_order):
    estimates = estimates_in(in_order)
    checked = 0
    for path, estimate in estimates.items():
        if (
            not any(name in path for name in SHARES)
            or "mu_" in path
            or "entropy_" in path
            or "correlations" in path
        ):
            continue
        checked += estimate["low"] is not None
        for name in ("value", "low", "high"):
            assert estimate[name] is None or 0 <= estimate[name] <= 1, (path, estimate)
    assert checked > 500


def test_intervals_are_in_order(in_order):
    for path, estimate in estimates_in(in_order).items():
        assert (estimate["low"] is None) == (estimate["high"] is None), path
        if estimate["low"] is not None:
            assert estimate["low"] < estimate["high"], (path, estimate)
            assert estimate["note"] in (None, FEW_DECIDE), (path, estimate)
        else:
            assert estimate["note"], (path, estimate)


def test_no_interval_below_ten_prompts():
    result = result_of(world(0, 27, samples=3), theory=True)
    assert result["counts"]["prompts"] == 9
    for path, estimate in estimates_in(result).items():
        assert "correlations" in path or estimate["low"] is None, (path, estimate)
    assert result["algorithms"][2]["blocked"]["all"]["value"] > 0
    enough = result_of(world(0, 60), theory=True)
    assert enough["algorithms"][2]["blocked"]["all"]["low"] is not None


def test_no_interval_if_all_prompts_are_equal():
    """Forty prompts with bit-identical responses have no spread to form an interval from."""
    batch = simple(
        [[-0.3, -1.7, -0.9, -3.3]] * 80,
        [[-0.31, -0.7, -3.1, -2.9]] * 80,
        [0.7, -0.3] * 40,
        prompt_id_S=np.arange(80) // 2,
        reward_S=np.array([1.0, 0.0] * 40),
    )
    result = result_of(batch, needs=PLAIN, algorithms=plain_algorithms(), theory=True)
    assert result["algorithms"][2]["blocked"]["all"]["value"] > 0
    with_interval = {
        path: estimate
        for path, estimate in estimates_in(result).items()
        if estimate["low"] is not None
    }
    assert with_interval == {}
