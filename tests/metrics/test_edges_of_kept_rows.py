"""Rows that lead back to prompts with large ids, and which of them are kept."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.clipping.breakdown import JUDGED_ROW
from mismatch_cli.metrics.correlation import _ROW as SPEARMAN_ROW
from mismatch_cli.metrics.retained_rows import (
    RESPONSE_ROW,
    TOKEN_ROW,
    ScatterSample,
    SmallestRows,
    WorstTokens,
)
from tests.metrics.summaries import filled

LARGE = 2**62 + 1


def test_a_prompt_id_of_more_than_32_bits_is_kept_whole(make_batch) -> None:
    batch = make_batch([[-1.0, -2.0]], logp_recomputed=[[-1.5, -2.25]], prompt_id=[LARGE])
    sample = filled(ScatterSample(tokens=2, responses=1), batch)
    rows = filled(WorstTokens(1), batch).result()
    assert [worst[0].prompt_id for worst in (rows.abs_d, rows.abs_dp, rows.responses)] == [
        LARGE
    ] * 3
    assert sample.result()["tokens"]["prompt_id"] == [LARGE] * 2


def test_a_scatter_plot_has_twenty_thousand_tokens_and_five_thousand_responses(make_batch) -> None:
    logq_ST = np.full((5001, 4), -1.0)
    batch = make_batch(logq_ST.tolist(), logp_recomputed=logq_ST.ravel() - 0.5)
    scatter = filled(ScatterSample(), batch).result()
    assert {name: len(rows["step"]) for name, rows in scatter.items()} == {
        "tokens": 20_000,
        "responses": 5000,
    }


def test_hashes_are_compared_to_their_last_bits() -> None:
    """In float32 these are equal, and the first would stay."""
    hash_N = np.array([2**62, 2**62 - 2**12], dtype=np.uint64)
    columns = {
        "step": (TOKEN_ROW, RESPONSE_ROW),
        "group": (SPEARMAN_ROW,),
        "advantage": (JUDGED_ROW,),
    }
    for column, dtypes in columns.items():
        for dtype in dtypes:
            smallest = SmallestRows(dtype, 1)
            rows = np.zeros(2, dtype=dtype)
            rows[column] = [1, 2]
            smallest.offer_hashed(hash_N, rows.take)
            assert smallest.rows()[column].tolist() == [2]


def test_a_response_is_in_the_scatter_plot_from_its_first_token_in_support(make_batch) -> None:
    logq = [[-1.0], [-1.0], [-1.0, -1.0]]
    batch = make_batch(logq, logp_recomputed=[[-2.0], [-np.inf], [-2.0, -3.0]])
    responses = filled(ScatterSample(), batch).result()["responses"]
    assert sorted(zip(responses["length"], responses["d_sum"], strict=True)) == [(1, -1), (2, -3)]
