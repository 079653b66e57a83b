"""Short responses, first tokens, and exchanges within a prompt beside those between prompts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.alignment import (
    HeadCollector,
    Heads,
    aligned,
    far_lag,
    find_exchanges,
    real_gap,
)
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.trace.reader import table_to_batch
from mismatch_cli.trace.writer import rows_to_table


def test_a_response_in_step_or_too_short_for_a_shift_begins_none(rng):
    logq_T = -rng.exponential(1.0, 40)
    in_step = aligned(logq_T, logq_T - 0.01, np.ones(40, dtype=bool), 0.15)
    assert in_step[1:] == (0, 0, False)
    short = aligned(logq_T[:5], logq_T[:5] - 1.0, np.ones(5, dtype=bool), 0.15)
    assert short[1:] == (0, 0, False)
    late_T = np.concatenate([[-1.0], logq_T[:-1]])
    lag_1 = aligned(logq_T, late_T, np.ones(40, dtype=bool), 0.15)
    assert lag_1[1:] == (1, 0, True)
    unlike = aligned(logq_T, -rng.exponential(1.0, 40), np.ones(40, dtype=bool), 0.15)
    assert unlike[1:] == (0, 0, False)


def test_an_exchange_within_a_prompt_stays_where_others_are_between_prompts(rng):
    """Responses 0 and 1 share a prompt and are too short to be found among all."""
    lengths, prompts = [8, 8, 40, 40, 40, 40], [0, 0, 1, 2, 3, 4]
    logq_RH = np.full((6, 128), np.nan, dtype=np.float32)
    for row, length in zip(logq_RH, lengths, strict=True):
        row[:length] = -rng.exponential(1.0, length)
    partners = [1, 0, 3, 2, 5, 4]
    step_R, prompt_R, sample_R = np.zeros(6, dtype=int), np.array(prompts), np.arange(6)
    unknown_RH = np.full_like(logq_RH, np.nan)
    heads = Heads(step_R, prompt_R, sample_R, logq_RH, logq_RH[partners], unknown_RH)
    exchanges = find_exchanges(heads)
    assert exchanges.partner_R.tolist() == partners
    assert exchanges.exchanged_R.all(), "the first response is a partner like any other"


@pytest.mark.parametrize("partners", [[1, 0, 2], [2, 1, 0], [0, 2, 1], [1, 0], [1, 0, 3, 2]])
def test_two_of_few_responses_are_exchanged(partners, rng):
    """All say how well an arbitrary response fits, each once."""
    count = len(partners)
    logq_RH = np.full((count, 128), np.nan, dtype=np.float32)
    logq_RH[:, :40] = -rng.exponential(1.0, (count, 40))
    zero_R, unknown_RH = np.zeros(count, dtype=int), np.full_like(logq_RH, np.nan)
    logp_RH = logq_RH[partners] - np.float32(0.01)
    heads = Heads(zero_R, zero_R, np.arange(count), logq_RH, logp_RH, unknown_RH)
    exchanges = find_exchanges(heads)
    assert exchanges.exchanged_R.tolist() == [r != p for r, p in enumerate(partners)]


def test_a_response_with_nearly_the_same_text_is_no_partner(rng):
    """Of two alike, one has stale numbers: the other's fit, which shows nothing. With other tokens
    it has a copy of the other's.
    """
    logq_RH = np.full((3, 128), np.nan, dtype=np.float32)
    logq_RH[:, :40] = -rng.exponential(1.0, (3, 40))
    logq_RH[1] = logq_RH[0]
    logp_RH = logq_RH.copy()
    logp_RH[0] -= 0.5
    zero_R = np.zeros(3, dtype=int)
    for different, partner in ((0, -1), (12, -1), (13, 1)):  # of 40 tokens
        ids_RH = np.where(np.isfinite(logq_RH), 7.0, np.nan).astype(np.float32)
        ids_RH[1, :different] = 8.0
        heads = Heads(zero_R, zero_R, np.arange(3), logq_RH, logp_RH, ids_RH)
        exchanges = find_exchanges(heads)
        assert exchanges.misfit_R.tolist() == [True, False, False]
        assert exchanges.partner_R.tolist() == [partner, -1, -1], different


def test_the_first_128_tokens_of_a_response_are_compared(rng):
    logp_T = -rng.exponential(1.0, 130).astype(np.float32)
    counters = ("step", "epoch", "minibatch", "version_rollout", "version_trainer")
    columns = {name: [0] for name in (*counters, "prompt_id", "sample_index")} | {
        "finish_reason": ["stop"],
        "prompt_ids": [[1]],
        "response_ids": [np.arange(130, dtype=np.int32)],
        "loss_mask": [np.ones(130, dtype=bool)],
        "logp_rollout": [logp_T],
        "logp_trainer": [logp_T - 1],
    }
    collector = HeadCollector(PAIRS["mismatch"])
    collector.update(table_to_batch(rows_to_table(columns)))
    heads = collector.result()
    assert heads.logq_RH.tolist() == [logp_T[:128].tolist()]
    assert heads.logp_RH.tolist() == [(logp_T[:128] - 1).tolist()]


def test_what_one_shard_has_dropped_is_not_taken_from_another():
    """Of at most 4 responses: one shard has the hashes 1, 2, 3 and 5 twice, another 10 to 13."""
    shards = []
    for hashes in ([1, 2, 3, 5, 5], [10, 11, 12, 13]):
        shard = HeadCollector(PAIRS["mismatch"], most_responses=4)
        for sample, number in enumerate(hashes):
            shard._rows[number, 0, number, sample] = np.zeros((3, 128))
        shards.append(shard)
    first, second = shards
    assert second.result().prompt_id_R.tolist() == [10, 11, 12, 13]
    assert first.result().prompt_id_R.tolist() == [1, 2, 3]
    first.merge(second)
    assert first.result().prompt_id_R.tolist() == [1, 2, 3]
    only = HeadCollector(PAIRS["mismatch"], most_responses=4)
    for sample in range(5):
        only._rows[7, 0, 7, sample] = only._rows[8, 0, 8, sample] = np.zeros((3, 128))
    assert only.result().prompt_id_R.tolist() == [7] * 5, "the last group is whole"


def response_of(logq_T: np.ndarray, counts_T: np.ndarray) -> SimpleNamespace:
    return SimpleNamespace(logq_T=logq_T, counts_T=counts_T, response_T=np.zeros(len(logq_T)))


def test_steps_to_and_from_tokens_that_do_not_count_are_no_steps():
    """A peaked policy, −0.01 and −0.03 in turn, around a tool's tokens of −9."""
    logq_T = np.tile([-0.01, -0.03], 8)
    logq_T[5:9] = -9.0
    counts_T = logq_T > -1.0
    assert real_gap(response_of(logq_T, counts_T)) == pytest.approx(0.01)
    assert real_gap(response_of(logq_T[::-1], counts_T[::-1])) == pytest.approx(0.01)


def test_of_lags_that_fit_alike_the_nearest_is_named(rng):
    """A response that repeats itself every 13 tokens, shifted by 5: 18 and 31 fit as well."""
    logq_T = -np.tile(rng.exponential(1.0, 13), 5)
    logp_T = np.roll(logq_T, 5)
    assert far_lag(logq_T, logp_T, np.ones(65, dtype=bool), 1.0) == 5
