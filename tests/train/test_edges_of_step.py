"""The metrics of one step, under a framework's names too."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa

from mismatch_cli.base.places import bundled
from mismatch_cli.frameworks import dialects
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.trace.reader import Trace
from mismatch_cli.train.bounds import no_bounds
from mismatch_cli.train.step import StepResponses, _groups, _where_sampled, step_record


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
