"""Columns missing for some tokens or for complete batches: what is left out, and how it is
reported.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch_cli.base.json_form import to_json
from mismatch_cli.metrics.clipping.masked_slice import Needs, policies_of
from mismatch_cli.metrics.gaps import token_gaps
from mismatch_cli.metrics.pairs import PAIRS
from tests.metrics.clipping import brute
from tests.metrics.clipping.world import EVERYTHING, checked, row_of, summarise, world


def test_recomputed_for_some_responses_only():
    """A token without log π′ does not count for any algorithm, so that all are judged on the
    same ones.
    """
    batch = world(0, 40)
    recomputed = batch.logp_recomputed_T.copy()
    recomputed[: int(batch.offset_S1[20])] = float("nan")
    batch = replace(batch, logp_recomputed_T=recomputed)
    result, t = checked(batch), brute.counted(batch, EVERYTHING)
    judged = t[t["A"] != 0]
    assert result["counts"]["tokens"] == len(judged) and set(judged["s"]) <= set(range(20, 40))
    assert result["counts"]["not_measured"] == int((batch.loss_mask_T & np.isnan(recomputed)).sum())
    assert row_of(result, "grpo-clip-higher")["blocked"]["all"]["value"] == pytest.approx(
        judged["grpo-clip-higher"].mean()
    )


@pytest.mark.parametrize(
    "name",
    [
        "logp_trainer_T",
        "logp_recomputed_T",
        "advantage_T",
        "topk_logp_trainer_TK",
        "topk_logp_recomputed_TK",
    ],
)
def test_a_batch_without_a_needed_column_is_left_out_and_counted(name):
    """In different steps, so that a rule on whole batches has what it needs."""
    complete, lacking = world(0, 30), world(1, 12)
    lacking = replace(lacking, step_S=lacking.step_S + 100)
    result = checked(complete, replace(lacking, **{name: None}))
    alone = checked(complete)
    assert result.pop("counts") == alone.pop("counts") | {"lacking": {name.rpartition("_")[0]: 12}}
    assert result == alone


def test_responses_left_out_are_counted_by_column_across_shards():
    parts = ((0, 3), (1, 4))
    summary, other = (
        summarise(world(seed, 12), replace(world(9, n), advantage_T=None)) for seed, n in parts
    )
    other.update(replace(world(8, 5), logp_recomputed_T=None))
    summary.merge(other)
    counts = to_json(summary.result(5))["counts"]
    assert counts["lacking"] == {"advantage": 7, "logp_recomputed": 5}
    assert summary.responses_read == 12 + 3 + 12 + 4 + 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tv_full_T", "kl_full_T"])
def test_a_full_divergence_is_not_needed_to_judge(name):
    """If it is missing, for some tokens or for a complete batch, every number except the
    approximation is equal.
    """
    first, second = world(0, 30), world(1, 12)
    complete = checked(first, second)
    some_T = getattr(first, name).copy()
    some_T[::3] = float("nan")
    for batches in (
        (replace(first, **{name: some_T}), second),
        (first, replace(second, **{name: None})),
    ):
        result = checked(*batches)
        for part in result:
            assert (result[part] == complete[part]) is (part != "approximation"), part


def test_a_missing_top_k_list_does_not_count():
    batch = world(0, 30)
    topk = batch.topk_logp_trainer_TK.copy()
    topk[: int(batch.offset_S1[10])] = float("nan")
    result = checked(replace(batch, topk_logp_trainer_TK=topk))
    t = brute.counted(batch, EVERYTHING)
    assert result["counts"]["tokens"] == int(((t["s"] >= 10) & (t["A"] != 0)).sum())


@pytest.mark.parametrize("name", ["recomputed", "entropy_T", "average"])
def test_policies_have_the_columns_that_are_needed_and_no_others(make_batch, name):
    columns = {"logp_trainer": -2, "logp_recomputed": -3, "entropy_trainer": 4, "logp_average": -5}
    batch = make_batch([[-1]], **{column: [[value]] for column, value in columns.items()})
    (gaps,) = token_gaps(batch, PAIRS["total"])
    needs = Needs(advantages=False, recomputed=False, top_k=0)
    policies = policies_of(gaps, replace(needs, **{name.removesuffix("_T"): True}))
    values = {"recomputed": -3, "entropy_T": 4, "average": -5}
    assert (policies.rollout, policies.trainer) == (-1, -2)
    assert {other: getattr(policies, other) for other in values} == {
        other: value if other == name else None for other, value in values.items()
    }
