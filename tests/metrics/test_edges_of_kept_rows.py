"""Rows that lead back to prompts with large ids."""

from __future__ import annotations

import numpy as np

from mismatch_cli.metrics.gaps import token_gaps
from mismatch_cli.metrics.kept_rows import ScatterSample, WorstTokens
from mismatch_cli.metrics.pairs import PAIRS

LARGE = 2**62 + 1


def test_a_prompt_id_of_more_than_32_bits_is_kept_whole(make_batch) -> None:
    batch = make_batch([[-1.0, -2.0]], logp_recomputed=[[-1.5, -2.25]], prompt_id=[LARGE])
    worst, sample = WorstTokens(1), ScatterSample(tokens=2, responses=1)
    for gaps in token_gaps(batch, PAIRS["mismatch"]):
        worst.update(gaps)
        sample.update(gaps)
    rows = worst.result()
    assert [kept[0].prompt_id for kept in (rows.abs_d, rows.abs_dp, rows.responses)] == [LARGE] * 3
    assert sample.result()["tokens"]["prompt_id"] == [LARGE] * 2


def test_a_scatter_plot_has_twenty_thousand_tokens_and_five_thousand_responses(make_batch) -> None:
    logq_ST = np.full((5001, 4), -1.0)
    batch = make_batch(logq_ST.tolist(), logp_recomputed=logq_ST.ravel() - 0.5)
    sample = ScatterSample()
    for gaps in token_gaps(batch, PAIRS["mismatch"]):
        sample.update(gaps)
    found = sample.result()
    assert {name: len(rows["step"]) for name, rows in found.items()} == {
        "tokens": 20_000,
        "responses": 5000,
    }
