"""Copies that are remembered, exact zeros, and the largest impossible value."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import repeated_responses
from mismatch_cli.diagnosis.counts import (
    Counts,
    ImprobableCopies,
    OwnColumns,
    SideCounts,
    ZeroCounts,
)
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.trace.reader import table_to_batch
from mismatch_cli.trace.writer import rows_to_table


@pytest.mark.parametrize("more", [0, 1])
def test_as_many_responses_as_there_is_room_for_are_all_remembered(more):
    """One more, and the response with the largest hash is forgotten."""
    numbers_S = np.arange(20)
    batch = SimpleNamespace(
        offset_S1=np.arange(0, 21 * 8, 8),
        response_ids_T=np.arange(20 * 8),
        logp_rollout_T=np.full(20 * 8, -3.0),
        step_S=numbers_S,
        prompt_id_S=numbers_S,
        sample_index_S=numbers_S,
    )
    copies = ImprobableCopies(most_responses=20 - more)
    copies.update(batch)
    assert copies.count() == (0, 20 - more)


@pytest.mark.parametrize(("improbable", "responses"), [
    (2**20 - 1, "1,048,575 responses"), (2**20, "1,048,576 responses of a sample"),
])  # fmt: skip
def test_more_responses_than_are_remembered_are_a_sample(improbable, responses, monkeypatch):
    copies = ImprobableCopies()
    monkeypatch.setattr(copies, "count", lambda: (2, improbable))
    sample = SimpleNamespace(response_ids_T=np.zeros(1))
    evidence = SimpleNamespace(sample=sample, copies=copies)
    sentence = repeated_responses.check(evidence).sentence
    assert sentence.startswith(f"2 of {responses} are already in the trace")


def test_exact_zeros_are_sampled_if_the_other_side_finds_them_as_probable_as_the_rest():
    """Beside a single other token of 1 nat: up to three times as improbable."""
    rest = {"zeros": 2, "rest": 1, "rest_surprise": 1.0}
    assert ZeroCounts(zeros_surprise=6.0, **rest).are_sampled
    assert not ZeroCounts(zeros_surprise=6.1, **rest).are_sampled


def test_zeros_are_legitimate_as_far_as_those_beside_them_are_doubted():
    """A quarter of 64 zeros, like of the nearly certain tokens, and three standard deviations."""
    beside = {"zeros": 64, "nearly": 8, "nearly_uncertain": 2}
    assert ZeroCounts(tokens=16 + 12, **beside).are_legitimate
    assert not ZeroCounts(tokens=16 + 13, **beside).are_legitimate


def test_the_largest_value_above_0_is_that_of_its_side():
    """A log-softmax in low precision ends 0.125 nats above 0."""
    counters = ("step", "epoch", "minibatch", "version_rollout", "version_trainer")
    columns = {name: [0] for name in (*counters, "prompt_id", "sample_index")} | {
        "finish_reason": ["stop"],
        "prompt_ids": [[1]],
        "response_ids": [[2, 3]],
        "loss_mask": [[True, True]],
        "logp_rollout": [[-1.0, -2.0]],
        "logp_trainer": [[0.125, -np.inf]],
    }
    table = rows_to_table(columns)
    counts = Counts()
    counts.update(table, table_to_batch(table), PAIRS["mismatch"])
    assert counts.sides == {
        "logp_rollout": SideCounts(tokens=2, largest=-1.0),
        "logp_trainer": SideCounts(tokens=2, above_zero=1, impossible=1, largest=0.125),
    }


def test_columns_are_at_odds_beyond_what_storing_one_in_bfloat16_explains():
    """1e-3 nats and 1/128 of log p: 0.0635 nats at −8."""
    batch = SimpleNamespace(
        topk_ids_TK=np.array([[5, 6], [5, 6], [5, 6]]),
        response_ids_T=np.array([5, 5, 7]),
        logp_rollout_T=np.float32([-8.0, -8.0, -8.0]),
        topk_logp_rollout_TK=np.float32([[-8.063, -9.0], [-8.064, -9.0], [-7.0, -9.0]]),
        **dict.fromkeys(f"{topk}logp_{side}_T{k}" for side in ("trainer", "recomputed")
                        for topk, k in (("", ""), ("topk_", "K"))),
    )  # fmt: skip
    columns = OwnColumns()
    columns.update(batch)
    rollout = columns.sides["rollout"]
    assert (rollout.compared, rollout.at_odds) == (2, 1), "the third is not in the top K"
    assert rollout.difference == pytest.approx(0.064, abs=1e-6)


def test_nothing_is_counted_at_first():
    assert set(vars(ZeroCounts()).values()) == {0}
    assert [SideCounts().tokens, SideCounts().not_a_number, SideCounts().impossible] == [0, 0, 0]
