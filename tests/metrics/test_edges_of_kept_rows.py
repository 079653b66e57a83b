"""Rows that lead back to prompts with large ids."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.retained_rows import ScatterSample, WorstTokens
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
