"""A row per token: its values equal plain numpy on the recorded columns, and the counts of
clipstats.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.studies.clipping import analyse_clipping
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.studies.tokens import blocked_tables, number_of_tokens, token_tables
from tests.metrics.clipping.world import without, world
from tests.studies.written import write_trace

SPECS = ("grpo-clip-higher", "dppo-binary-tv:delta=0.05", "dppo-topk-kl", "gspo")


def columns(tables) -> dict[str, np.ndarray]:
    """Columns with NaN for a missing number, None for a missing flag."""
    whole = pa.concat_tables(tables)
    return {name: np.array(whole[name].to_pylist()) for name in whole.column_names} | {
        "rows": whole.num_rows
    }


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """The second shard lacks what the first one has."""
    batches = world(0, 24), without(world(1, 12), "logp_recomputed_T", "entropy_trainer_T")
    return write_trace(tmp_path_factory.mktemp("run") / "trace", *batches)


def test_a_row_per_token_and_its_gap(trace):
    table = columns(list(token_tables([trace])))
    batches = list(trace.batches())
    assert table["rows"] == number_of_tokens([trace]) == sum(batch.num_tokens for batch in batches)
    rollout = np.concatenate([batch.logp_rollout_T for batch in batches])
    trainer = np.concatenate([batch.logp_trainer_T for batch in batches])
    counts = np.concatenate([batch.loss_mask_T for batch in batches]) & ~np.isnan(trainer)
    with np.errstate(invalid="ignore"):
        d = trainer - rollout
    assert counts.any() and not counts.all()
    np.testing.assert_array_equal(table["d"][counts].astype(np.float32), d[counts])
    assert all(value is None for value in table["d"][~counts])
    np.testing.assert_allclose(table["ratio"][counts].astype(float), np.exp(d[counts]), rtol=1e-6)
    tv = np.abs(np.exp(trainer.astype(float)) - np.exp(rollout.astype(float)))
    np.testing.assert_allclose(
        table["tv_binary"][counts].astype(float), tv[counts], rtol=1e-4, atol=1e-7
    )
    assert all(
        table[name][counts][0] is not None for name in ("kl_binary", "k3", "tv_topk", "kl_topk")
    )
    assert (
        table["position"]
        == np.concatenate([np.arange(n) for b in batches for n in np.diff(b.offset_S1)])
    ).all()


def test_mismatch_and_staleness_add_up_if_both_were_measured(trace):
    table = columns(list(token_tables([trace])))
    measured = np.array([value is not None for value in table["d_staleness"]])
    assert measured.any() and not measured.all()  # the second shard has no recomputed log-probs
    parts = table["d_mismatch"][measured].astype(float) + table["d_staleness"][measured].astype(
        float
    )
    finite = np.isfinite(parts)
    np.testing.assert_allclose(parts[finite], table["d"][measured].astype(float)[finite], atol=1e-5)


def test_turns_equal_the_reports(trace):
    table, study = columns(list(token_tables([trace]))), analyse_mismatch([trace])
    counted = np.array([value is not None for value in table["d"]])
    turns = table["turn"][counted].astype(int)
    rows = study.result.pairs["total"].turns
    assert len(rows) > 2
    for row in rows[:-1]:
        abs_d_N = np.abs(table["d"][counted][turns == row.first].astype(float))
        assert len(abs_d_N) == row.tokens
        mean = abs_d_N[np.isfinite(abs_d_N)].mean()
        assert mean == pytest.approx(row.abs_d_mean.value, rel=1e-5)


def test_blocked_tokens_are_those_that_clipstats_counts(trace):
    study = analyse_clipping([trace], [parse_algorithm(spec) for spec in SPECS])
    table = columns(list(blocked_tables([trace], study.summary.question)))
    for row in study.result.algorithms:
        judged = [flag for flag in table[row.name] if flag is not None]
        assert len(judged) == study.result.counts.tokens
        assert np.mean(judged) == row.blocked.all.value > 0, row.name


OWN = """
from mismatch_cli import Decision
SCOPE = "SCOPE"
def collect(compared, advantage_T, *, share: float = 1.0):
    return abs(compared.log_ratio_T)[:, None]
def settle(rows_UM, *, share: float = 1.0):
    return [share * rows_UM[:, 0].mean()]
def trust_region(compared, advantage_T, settled_TF, *, share: float = 1.0):
    return Decision(abs(compared.log_ratio_T) <= settled_TF[:, 0], compared.log_ratio_T)
"""


def test_masks_on_batches_and_groups_block_what_their_whole_decides(tmp_path):
    """In pooled traces whose batches are spread over shards; the means are formed here."""
    for scope in ("batch", "group"):
        (tmp_path / f"{scope}_mask.py").write_text(
            OWN.replace('SCOPE = "SCOPE', f'SCOPE = "{scope}')
        )
    specs = ["m2po:tau=0.01", "clip-cov:share=0.1", "top-entropy"]
    own = [str(tmp_path / f"{scope}_mask.py") for scope in ("batch", "group")]
    parts = [
        replace(world(seed, 24, steps=2), step_S=world(0, 24, steps=2).step_S) for seed in range(4)
    ]
    traces = [
        write_trace(tmp_path / name, *parts[start : start + 2], seed=start)
        for start, name in ((0, "one"), (2, "two"))
    ]
    study = analyse_clipping(traces, [parse_algorithm(spec) for spec in (*specs, *own)])
    blocked = columns(list(blocked_tables(traces, study.summary.question)))
    tokens = columns(list(token_tables(traces)))
    judged = blocked["batch_mask"] != None  # noqa: E711 - elementwise
    for row in study.result.algorithms:
        assert (judged == (blocked[row.name] != None)).all()  # noqa: E711
        assert blocked[row.name][judged].mean() == row.blocked.all.value > 0
    size, keys = np.abs(tokens["d"].astype(float)), ("trace", "step", "epoch")
    needed = (
        size,
        *(tokens[name].astype(float) for name in ("entropy_trainer", "logp_recomputed")),
    )
    counted = np.isfinite(needed).all(axis=0) & tokens["loss_mask"].astype(bool)
    for scope, last in (("batch", "minibatch"), ("group", "prompt_id")):
        key = np.array([tokens[name] for name in (*keys, last)]).T
        for one in np.unique(key, axis=0):
            whole = (key == one).all(axis=1) & counted
            mean, of = size[whole].mean(), whole & judged
            assert np.array_equal(blocked[f"{scope}_mask"][of].astype(bool), size[of] > mean)


def test_without_advantages_each_sign_has_a_column(tmp_path):
    trace = write_trace(tmp_path / "trace", world(0, 24), without=("advantage",))
    study = analyse_clipping([trace], [parse_algorithm(SPECS[0])])
    table, (row,) = (
        columns(list(blocked_tables([trace], study.summary.question))),
        study.result.algorithms,
    )
    for sign in ("positive", "negative"):
        judged = [flag for flag in table[f"{SPECS[0]}_if_{sign}"] if flag is not None]
        assert np.mean(judged) == row.blocked.of(sign).value


def test_an_unscored_trace_has_its_tokens(tmp_path):
    absent = (
        "logp_trainer",
        "logp_recomputed",
        "topk_logp_trainer",
        "topk_logp_recomputed",
        "advantage",
    )
    (table,) = token_tables([write_trace(tmp_path / "trace", world(0, 6), without=absent)])
    assert "logp_rollout" in table.column_names
    assert not [
        name
        for name in table.column_names
        if name.startswith(("d", "ratio", "blocked", "logp_trainer"))
    ]


def test_pooled_traces_are_distinguishable_and_share_columns(tmp_path):
    traces = [
        write_trace(tmp_path / "0" / "trace", world(0, 6)),
        write_trace(tmp_path / "1" / "trace", without(world(1, 6), "entropy_trainer_T"), seed=1),
    ]
    tables = list(token_tables(traces))
    assert tables[0].schema == tables[1].schema
    assert [table["trace"].unique().to_pylist() for table in tables] == [[0], [1]]
    assert tables[1]["entropy_trainer"].null_count == len(tables[1])
