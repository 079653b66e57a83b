"""The metrics of one step, under a framework's names too."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.frameworks import dialects
from mismatch_cli.models.scoring.trainer import ResponseScores
from mismatch_cli.probe.tasks.prompts import Problem
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.batch import Episode, Rollout
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.routes import compare_routes
from mismatch_cli.train.bounds import no_bounds
from mismatch_cli.train.learner import Update
from mismatch_cli.train.step import (
    Minibatch,
    Step,
    StepResponses,
    UsedMinibatch,
    _groups,
    _where_sampled,
    join_responses,
    mean_reward,
    step_record,
    step_responses,
    step_table,
)
from mismatch_cli.train.task import EncodedProblem


def test_a_step_has_the_numbers_that_its_trace_would_show_as_another_framework():
    trace = Trace.open(bundled("traces/float32"))
    table = pa.concat_tables(trace.tables()).combine_chunks()
    count = table.num_rows
    ones_S = np.ones(count)
    responses = StepResponses(table, ones_S, ones_S, ones_S, ones_S > 1, no_bounds())
    update = SimpleNamespace(stepped=True, grad_norm=0.5)
    step = SimpleNamespace(
        number=3,
        sample_index=[0, 1],
        sampled=None,
        uses=[SimpleNamespace(version=2, update=update)],
    )
    record = step_record(step, responses, parse_algorithm("pg-is"), framework="trl")
    of_trace = dialects.readings([trace], ["trl"]).by_framework["trl"]
    assert record["as"] == {"trl": dialects.values_by_name(of_trace)} and record["as"]["trl"]
    assert "as" not in step_record(step, responses, parse_algorithm("pg-is"))


def test_a_group_teaches_nothing_if_all_of_its_own_responses_earn_the_same():
    """Two problems with three responses each: one is all right, none is all wrong."""
    assert _groups(np.array([[1, 1, 1], [0, 1, 0]])) == {
        "groups_all_right": 0.5,
        "groups_all_wrong": 0.0,
    }


def test_values_of_an_environment_s_tokens_count_nowhere():
    rollout = SimpleNamespace(sampled_T=np.array([True, False, True]))
    values_TK = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert _where_sampled(rollout, None) is None
    for values in (values_TK, values_TK[:, 0]):
        masked = _where_sampled(rollout, values)
        assert np.isnan(masked[1]).all() and masked.dtype == np.float32
        np.testing.assert_array_equal(masked[[0, 2]], values[[0, 2]])
    assert _where_sampled(SimpleNamespace(sampled_T=None), values_TK) is values_TK


def _numbers(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def _used_twice(recomputed: list | None = None, average: bool = False) -> Step:
    """Two responses, the second of which has an environment's token; they are swapped in the
    second update.
    """
    own = Rollout([1], [2, 3], _numbers(-1, -2), np.ones(2, np.int32), None, None, "length")
    turns = Episode(
        [4], [5, 6, 7], _numbers(-3, np.nan, -4), np.ones(3, np.int32), None, None, "stop",
        loss_mask_T=np.array([True, False, True]), turns=2,
    )  # fmt: skip
    posed = [EncodedProblem(Problem(number, "", None), []) for number in (8, 9)]
    step = Step(
        3, 4, posed, [0, 1], [own, turns], np.array([1, np.nan]), np.array([0.5, -0.25]), recomputed
    )
    logp = [_numbers(-1.5, -2.5), _numbers(-3.5, np.nan, -4.5)]
    entropy = [_numbers(0.1, 0.2), _numbers(0.3, np.nan, 0.4)]
    for number, rows, shift in ((0, [0, 1], 0), (1, [1, 0], -8)):
        update = Update(
            [logp[row] + np.float32(shift) for row in rows],
            [entropy[row] for row in rows],
            1.0 + number,
            number == 0,
            [None, None],
            [None, None],
            [logp[row] - 1 for row in rows] if average else None,
        )
        step.uses.append(UsedMinibatch(Minibatch(number, 1 - number, rows), 4 + number, update))
    return step


def test_the_rows_of_a_step_are_its_uses():
    rows = step_table(_used_twice()).to_pylist()
    fixed = ("epoch", "minibatch", "prompt_id", "sample_index", "version_trainer", "finish_reason")
    assert [tuple(row[name] for name in fixed) for row in rows] == [
        (0, 1, 8, 0, 4, "length"),
        (0, 1, 9, 1, 4, "stop"),
        (1, 0, 9, 1, 5, "stop"),
        (1, 0, 8, 0, 5, "length"),
    ]
    assert {(row["step"], row["version_rollout"]) for row in rows} == {(3, 4)}
    assert [row["reward"] for row in rows] == [1, None, None, 1]
    assert [row["advantage"] for row in rows[:2]] == [[0.5, 0.5], [-0.25, 0, -0.25]]
    assert [row["loss_mask"] for row in rows[:2]] == [[True, True], [True, False, True]]
    assert (rows[3]["logp_trainer"], rows[3]["prompt_ids"]) == ([-9.5, -10.5], [1])
    assert "logp_average" not in rows[0] and "topk_ids" not in rows[0]
    # At the weights that sampled, log π is the recomputed one; later it was not measured
    assert rows[0]["logp_recomputed"] == [-1.5, -2.5] and rows[3]["logp_recomputed"] is None


def test_recomputed_and_average_log_probs_are_of_their_responses():
    scores = [_numbers(-0.1, -0.2), _numbers(-0.3, -0.4, -0.5)]
    recomputed = []
    for logp_T in scores:
        recomputed.append(ResponseScores(logp_T, logp_T, None, None, None, None))
    step = _used_twice(recomputed, average=True)
    rows = step_table(step).to_pylist()
    np.testing.assert_array_equal(rows[0]["logp_recomputed"], [-1.5, -2.5])
    np.testing.assert_array_equal(rows[2]["logp_recomputed"], _numbers(-0.3, np.nan, -0.5))
    np.testing.assert_array_equal(rows[1]["logp_average"], _numbers(-4.5, np.nan, -5.5))
    np.testing.assert_array_equal(rows[3]["logp_average"], [-2.5, -3.5])
    assert step.first_logp is step.uses[0].update.logp
    del step.uses[0]
    np.testing.assert_array_equal(np.concatenate(step.first_logp), np.concatenate(scores[::-1]))
    step.recomputed = None
    assert step.first_logp is step.uses[0].update.logp


def test_top_k_and_routes_are_of_their_responses_and_updates():
    """Two ids a token; routes only where the weights are still those that sampled."""
    step = _used_twice()
    ids = [np.array([[1, 2], [3, 4]], np.int32), np.array([[5, 6], [0, 0], [7, 8]], np.int32)]
    for row, (ids_TK, rollout) in enumerate(zip(ids, step.rollouts, strict=True)):
        step.rollouts[row] = replace(
            rollout, topk_ids_TK=ids_TK, topk_logp_rollout_TK=-ids_TK.astype(np.float32)
        )
    for place, use in enumerate(step.uses):
        routes = []
        topk_logp = []
        for row in use.minibatch.rows:
            length = len(ids[row])
            engine_TMK = np.full((length, 1, 1), row)
            margin_TM, counted_T = np.full((length, 1), np.nan), np.ones(length, dtype=bool)
            trainer_TMK = np.zeros_like(engine_TMK)
            routes.append(compare_routes(engine_TMK, trainer_TMK, margin_TM, counted_T))
            topk_logp.append(ids[row] * np.float32(-10 - place))
        step.uses[place] = replace(
            use, update=replace(use.update, routes=routes, topk_logp=topk_logp)
        )
    rows = step_table(step).to_pylist()
    assert rows[1]["topk_ids"] == rows[2]["topk_ids"] == [5, 6, 0, 0, 7, 8]
    assert rows[3]["topk_logp_rollout"] == [-1, -2, -3, -4]
    assert rows[0]["topk_logp_trainer"] == [-10, -20, -30, -40]
    assert rows[3]["topk_logp_trainer"] == [-11, -22, -33, -44]
    assert "topk_logp_recomputed" not in rows[0]
    # The trainer chose expert 0, the engine 0 for the first response and 1 for the second
    assert [row["route_flips"] for row in rows] == [[0, 0], [1, 1, 1], None, None]
    step.recomputed = []
    for ids_TK in ids:
        logp_T, logp_TK = np.zeros(len(ids_TK), np.float32), -2 * ids_TK.astype(np.float32)
        step.recomputed.append(ResponseScores(logp_T, logp_T, logp_T, logp_TK))
    rows = step_table(step).to_pylist()
    np.testing.assert_array_equal(
        rows[2]["topk_logp_recomputed"], _numbers(-10, -12, np.nan, np.nan, -14, -16)
    )
    assert rows[3]["topk_logp_recomputed"] == [-2, -4, -6, -8]


def test_the_line_of_a_step_by_hand():
    step = _used_twice()
    step.sampled = {"groups": 5}
    responses = step_responses(step)
    assert responses.length_S.tolist() == [2, 2] and responses.turns_S.tolist() == [1, 2]
    assert responses.truncated_S.tolist() == [True, False]
    record = step_record(step, join_responses([responses]), parse_algorithm("pg-is"))
    # The second update overflowed: it made no step, and its gradient does not count
    line = {"step": 3, "updates": 5, "reward": 1.0, "length": 2.0, "turns": 1.5, "truncated": 0.5}
    line |= {"grad_norm": 1.0, "unjudged": 1, "sampled": {"groups": 5}}
    line |= {"groups_all_right": 0.0, "groups_all_wrong": 0.0}
    assert {name: record[name] for name in line} == line and "bounds" not in record
    mu, pi = np.exp([-1, -2, -3, -4]), np.exp([-1.5, -2.5, -3.5, -4.5])
    assert record["mismatch"]["abs_dp_mean"] == pytest.approx(np.abs(pi - mu).mean(), rel=1e-5)
    later = np.concatenate([pi, pi * np.exp(-8)]) - np.tile(mu, 2)
    assert record["current"]["abs_dp_mean"] == pytest.approx(np.abs(later).mean(), rel=1e-5)
    assert record["entropy"] == pytest.approx(0.25)


def test_responses_of_all_ranks_are_joined_in_their_order():
    first, second = step_responses(_used_twice()), step_responses(_used_twice(average=True))
    joined = join_responses([first, second])
    assert joined.table.num_rows == 8 and joined.table["logp_average"].null_count == 4
    assert joined.turns_S.tolist() == [1, 2, 1, 2]
    assert mean_reward(joined.reward_S) == 1.0
    with pytest.raises(MismatchError, match="graded none of 2 responses"):
        mean_reward(np.full(2, np.nan))
