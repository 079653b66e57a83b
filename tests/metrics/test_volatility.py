"""The table by bin of μ, compared with numpy on the same tokens."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.metrics.estimate import CROWDED, FEW_TOKENS
from mismatch_cli.metrics.volatility import MU_EDGES
from tests.metrics.summaries import summarise


@pytest.fixture(scope="module")
def measured(random_batch):
    batch = random_batch(0, responses=300, longest=300, gap=0.2, top_k=3)
    summary = summarise(batch)
    q, p = batch.logp_rollout_T.astype(np.float64), batch.logp_recomputed_T.astype(np.float64)
    return summary.result(), q, p


def test_bins_agree_with_numpy(measured) -> None:
    result, q, p = measured
    which = np.searchsorted(np.log(MU_EDGES), q, side="right")
    for number, row in enumerate(result.volatility):
        inside = which == number
        assert abs(row.tokens - inside.sum()) <= 1  # a token on an edge, in float32
        ratio, tv = np.exp((p - q)[inside]), np.abs(np.exp(p) - np.exp(q))[inside]
        assert row.metrics["ratio_sd"].value == pytest.approx(ratio.std(), rel=2e-3)
        assert row.metrics["tv_binary_sd"].value == pytest.approx(tv.std(), rel=2e-3)
        assert row.metrics["ratio_max"].value == pytest.approx(ratio.max(), rel=1e-5)
        assert row.metrics["tv_binary_max"].value == pytest.approx(tv.max(), rel=1e-5)
        assert row.metrics["ratio_p01"].value == pytest.approx(np.quantile(ratio, 0.01), rel=3e-3)
        assert row.metrics["ratio_p99"].value == pytest.approx(np.quantile(ratio, 0.99), rel=3e-3)
        assert row.metrics["tv_binary_p99"].value == pytest.approx(np.quantile(tv, 0.99), rel=3e-3)
        assert (row.metrics["ratio_sd"].low is not None) == (row.tokens >= 1000 and row.mu_high < 1)
        assert (row.metrics["ratio_p99"].low is not None) == (row.tokens >= 15_000)


def test_edges_of_the_rows(measured) -> None:
    rows = measured[0].volatility
    assert [row.mu_low for row in rows] == [0, *MU_EDGES]
    assert [row.mu_high for row in rows] == [*MU_EDGES, 1]


def test_overall_quantiles_agree_with_numpy(measured) -> None:
    result, q, p = measured
    d = p - q
    value = {key: estimate.value for key, estimate in result.metrics.items()}
    for key, share in (("abs_d_p50", 0.5), ("abs_d_p95", 0.95), ("abs_d_p99", 0.99)):
        assert value[key] == pytest.approx(np.quantile(np.abs(d), share), rel=3e-3)
    for key, share in (("ratio_p01", 0.01), ("ratio_p50", 0.5), ("ratio_p99", 0.99)):
        assert value[key] == pytest.approx(np.quantile(np.exp(d), share), rel=3e-3)
    assert result.metrics["ratio_p50"].note == CROWDED


def test_an_empty_bin_has_no_values(make_batch) -> None:
    summary = summarise(make_batch([[-0.005, -0.005]], logp_recomputed=[[-0.006, -0.004]]))
    *empty, last = summary.result().volatility
    assert last.tokens == 2 and last.metrics["ratio_max"].value == pytest.approx(
        np.exp(0.001), rel=1e-6
    )
    assert all(row.tokens == 0 and row.metrics["ratio_max"].value is None for row in empty)


def test_tokens_out_of_support_have_ratio_0(make_batch) -> None:
    """Two of a hundred: the first percentile is exactly 0."""
    logp_T = [-np.inf] * 2 + [-2.1] * 98
    summary = summarise(make_batch([[-2.0] * 100], logp_recomputed=[logp_T]))
    (row,) = (row for row in summary.result().volatility if row.tokens)
    assert row.metrics["ratio_p01"].value == 0.0
    assert row.metrics["ratio_p99"].value == pytest.approx(np.exp(-0.1), rel=3e-3)


@pytest.mark.parametrize(("tokens", "note"), [(999, FEW_TOKENS), (1000, None)])
def test_a_bin_of_a_thousand_tokens_has_enough_for_a_spread(make_batch, tokens, note) -> None:
    responses = 10
    logq_ST = np.full((responses, tokens // responses), -2.0).tolist()
    logq_ST[0] += [-2.0] * (tokens % responses)
    d_T = np.linspace(-0.1, 0.1, tokens)
    summary = summarise(make_batch(logq_ST, logp_recomputed=d_T - 2.0))
    (row,) = (row for row in summary.result().volatility if row.tokens)
    assert row.tokens == tokens
    assert row.metrics["ratio_sd"].note == note
