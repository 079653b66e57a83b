"""The worst tokens and the scatter sample: the same rows in any order, and rows that lead back
to the trace.
"""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.metrics.retained_rows import RetainedToken, ScatterSample, WorstRows, WorstTokens
from tests.metrics.summaries import filled


def test_worst_tokens_equal_a_full_sort(random_batch) -> None:
    batch = random_batch(1, responses=80, top_k=2)
    worst = filled(WorstTokens(count=10), batch).result()
    d = batch.logp_recomputed_T - batch.logp_rollout_T
    dp = np.exp(batch.logp_recomputed_T) - np.exp(batch.logp_rollout_T)
    expected = np.sort(np.abs(d))[::-1][:10]
    gaps = [abs(row.logp_current - row.logp_reference) for row in worst.abs_d]
    assert gaps == pytest.approx(expected.tolist(), rel=1e-6)
    gaps = [abs(np.exp(row.logp_current) - np.exp(row.logp_reference)) for row in worst.abs_dp]
    assert gaps == pytest.approx(np.sort(np.abs(dp))[::-1][:10].tolist(), rel=1e-4)
    sums = np.add.reduceat(d.astype(np.float64), batch.offset_S1[:-1])
    assert [abs(row.d_sum) for row in worst.responses] == pytest.approx(
        np.sort(np.abs(sums))[::-1][:10].tolist()
    )


def test_rows_lead_back_to_the_trace(random_batch) -> None:
    whole = random_batch(4, responses=50)
    batch = type(whole)(
        **{**vars(whole), "loss_mask_T": np.random.default_rng(0).random(whole.num_tokens) < 0.6}
    )
    offsets = dict(
        zip(
            zip(batch.prompt_id_S.tolist(), batch.sample_index_S.tolist(), strict=True),
            batch.offset_S1.tolist(),
            strict=False,
        )
    )
    rows = filled(WorstTokens(), batch).result().abs_d
    sample = filled(ScatterSample(tokens=100), batch).result()["tokens"]
    sampled = (
        dict(zip(sample, values, strict=True)) for values in zip(*sample.values(), strict=True)
    )
    rows += [RetainedToken(**row, trace=0) for row in sampled]
    assert len(rows) == 150
    for row in rows:
        token = offsets[row.prompt_id, row.sample_index] + row.position
        assert batch.loss_mask_T[token]
        assert row.logp_reference == batch.logp_rollout_T[token].item()
        assert row.logp_current == batch.logp_recomputed_T[token].item()
        assert row.token_id == batch.response_ids_T[token].item()


@pytest.mark.parametrize(
    "make", [lambda: WorstTokens(7), lambda: ScatterSample(tokens=30, responses=7)]
)
def test_order_and_sharding_do_not_matter(random_batch, take_responses, make) -> None:
    batches = [random_batch(seed, responses=30, top_k=2) for seed in range(3)]
    whole = filled(make(), *batches).result()
    merged = make()
    for batch in reversed(batches):
        merged.merge(filled(make(), take_responses(batch, range(29, 14, -1))))
        merged.merge(filled(make(), take_responses(batch, range(15))))
    assert merged.result() == whole


def test_ties_are_broken_by_the_keys(make_batch) -> None:
    batch = make_batch(
        [[-1.0, -1.0]] * 6, logp_recomputed=[[-1.5, -1.5]] * 6, prompt_id=[5, 4, 3, 2, 1, 0]
    )
    rows = filled(WorstTokens(3), batch).result().abs_d
    assert [(row.prompt_id, row.position) for row in rows] == [(0, 0), (0, 1), (1, 0)]


def test_equal_policies_have_no_worst_token(make_batch) -> None:
    worst = filled(
        WorstTokens(), make_batch([[-1.0] * 100] * 10, logp_recomputed=[[-1.0] * 100] * 10)
    ).result()
    assert worst == WorstRows([], [], [])


def test_a_token_out_of_support_is_worst_by_probability_only(make_batch) -> None:
    batch = make_batch([[-0.1, -1.0]], logp_recomputed=[[-float("inf"), -1.5]])
    worst = filled(WorstTokens(1), batch).result()
    assert worst.abs_d[0].position == 1
    assert worst.abs_dp[0].position == 0 and worst.abs_dp[0].logp_current is None
    assert worst.responses[0].length == 1


def test_the_sample_is_fair(make_batch) -> None:
    batch = make_batch([[-1.0] * 200] * 100, logp_recomputed=[[-1.0] * 200] * 100)
    sample = filled(ScatterSample(tokens=4000, responses=20), batch).result()
    assert len(sample["tokens"]["position"]) == 4000 and len(sample["responses"]["length"]) == 20
    assert np.mean(sample["tokens"]["position"]) == pytest.approx(99.5, abs=4)
    assert np.bincount(sample["tokens"]["prompt_id"], minlength=100).std() < 8
    assert (
        len(set(zip(sample["tokens"]["prompt_id"], sample["tokens"]["position"], strict=True)))
        == 4000
    )
