"""The bundled traces: complete, what they say they are, lively enough to show something, and
small.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
import torch

from mismatch_cli.app.cli import run
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.rules.divergences import sampled_in_topk, topk_divergences
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.trace.reader import Trace
from tests.paths import ROOT
from tests.rules.test_divergences import binary_kl, binary_tv, prob_difference

FOLDER = ROOT / "sample_data" / "traces"
NAMES = ("fp8-kv", "float32")
MACHINE = '"[/~]|tmp'  # a text that is a path of one
UPDATES = 8  # of a step of fp8-kv
IN_BOTH = {
    *(
        "step",
        "epoch",
        "minibatch",
        "prompt_id",
        "sample_index",
        "version_rollout",
        "version_trainer",
    ),
    *("reward", "advantage", "finish_reason", "entropy_trainer", "rank_rollout", "rank_trainer"),
    *(
        "logp_rollout",
        "logp_trainer",
        "logp_trainer_repeat",
        "topk_ids",
        "topk_logp_rollout",
        "topk_logp_trainer",
    ),
}
STALE_ONLY = {"logp_recomputed", "topk_logp_recomputed", "tv_full", "kl_full"}
OF_A_PROBE = {
    *(
        "config",
        "top_logprobs",
        "threads",
        "libraries",
        "rollout",
        "prompts",
        "shards",
        "equal_weights",
        "trainer",
    ),
}

Column = Callable[[str], torch.Tensor]


def batches(name: str) -> list[TokenBatch]:
    return list(Trace.open(FOLDER / name).batches())


def column_of(name: str) -> Column:
    parts = batches(name)
    return lambda column: torch.tensor(np.concatenate([getattr(part, column) for part in parts]))


@pytest.fixture(scope="module")
def stale() -> Column:
    return column_of("fp8-kv")


@pytest.fixture(scope="module")
def control() -> Column:
    return column_of("float32")


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def share(chosen_T: torch.Tensor, of_T: torch.Tensor) -> float:
    return ((chosen_T & of_T).sum() / of_T.sum()).item()


def rows(name: str, *columns: str) -> list[tuple[int, ...]]:
    table = pa.concat_tables(Trace.open(FOLDER / name).tables(columns)).to_pydict()
    return list(zip(*(table[column] for column in columns), strict=True))


def test_columns():
    assert Trace.open(FOLDER / "fp8-kv").columns() >= IN_BOTH | STALE_ONLY
    assert Trace.open(FOLDER / "float32").columns() >= IN_BOTH
    assert not Trace.open(FOLDER / "float32").columns() & STALE_ONLY


def test_every_value_is_measured(name):
    columns = IN_BOTH | (STALE_ONLY if name == "fp8-kv" else set())
    for table in Trace.open(FOLDER / name).tables(sorted(columns)):
        assert all(table.column(column).null_count == 0 for column in columns)
    for batch in batches(name):
        assert batch.topk_ids_TK.shape == (batch.num_tokens, 20)
        assert (
            np.isfinite(batch.logp_trainer_T).all()
            and np.isfinite(batch.logp_trainer_repeat_T).all()
        )


def test_manifests_are_complete_and_name_no_machine(name):
    manifest = Trace.open(FOLDER / name).manifest
    assert manifest.keys() >= OF_A_PROBE
    assert manifest["shards"] == len(Trace.open(FOLDER / name).shards)
    assert (
        manifest["config"]["model"] == manifest["rollout"]["model"] == manifest["trainer"]["model"]
    )
    assert manifest["prompts"]["source"] == "sample_data/problems.jsonl"
    assert not re.search(MACHINE, json.dumps(manifest))


def test_manifests_say_what_differs():
    stale, control = (json.loads((FOLDER / name / "manifest.json").read_text()) for name in NAMES)
    assert (stale["rollout"]["dtype"], stale["rollout"]["kv_cache_dtype"]) == ("bfloat16", "fp8")
    assert (control["rollout"]["dtype"], control["rollout"]["kv_cache_dtype"]) == (
        "float32",
        "float32",
    )
    assert (stale["trainer"]["dtype"], control["trainer"]["dtype"]) == ("bfloat16", "float32")
    assert stale["prompts"] == control["prompts"]
    assert not stale["equal_weights"] and control["equal_weights"]


def test_each_step_samples_at_the_weights_that_the_last_one_left():
    versions = sorted(set(rows("fp8-kv", "step", "version_rollout", "version_trainer")))
    assert versions == [(step, step * UPDATES, (step + 1) * UPDATES) for step in range(6)]
    assert set(rows("float32", "step", "version_rollout", "version_trainer")) == {(0, 0, 0)}


def test_every_response_is_in_one_minibatch():
    keys = rows("fp8-kv", "step", "minibatch", "prompt_id", "sample_index")
    assert len(set(keys)) == len(keys)
    assert {(step, minibatch) for step, minibatch, _, _ in keys} == {
        (s, m) for s in range(6) for m in range(8)
    }


def test_both_hold_the_same_prompts(stale, control):
    assert (
        set(stale("prompt_id_S").tolist()) == set(control("prompt_id_S").tolist()) == set(range(24))
    )


def test_text_is_readable(name):
    trace = Trace.open(FOLDER / name)
    for table in trace.tables(["response_ids"]):
        texts = [trace.vocabulary.decode(ids) for ids in table["response_ids"].to_pylist()]
        assert sum("\\boxed{" in text for text in texts) > 0.9 * len(texts)


def test_advantages_are_rewards_above_the_mean_of_the_group(name):
    for batch in batches(name):
        first_S = batch.offset_S1[:-1]
        advantage_S = batch.advantage_T[first_S]
        assert np.array_equal(batch.advantage_T, np.repeat(advantage_S, np.diff(batch.offset_S1)))
        for prompt in np.unique(batch.prompt_id_S):
            group = batch.prompt_id_S == prompt
            assert abs(advantage_S[group].sum()) < 1e-5
            expected = batch.reward_S[group] - batch.reward_S[group].mean()
            np.testing.assert_allclose(advantage_S[group], expected, rtol=1.3e-6, atol=1e-5)


def test_binary_divergences_are_lower_bounds_of_the_full_ones(stale):
    mu_T, pi_T = stale("logp_rollout_T"), stale("logp_trainer_T")
    tv_T, kl_T = stale("tv_full_T"), stale("kl_full_T")
    assert (tv_T - binary_tv(mu_T, pi_T)).min() > -5e-6  # the sums over 2,048 tokens are float32
    assert (kl_T - binary_kl(mu_T, pi_T)).min() > -1e-6
    assert (tv_T <= 1).all() and (kl_T >= tv_T.square() * 2 - 1e-6).all()  # Pinsker


def test_top_k_divergences_lie_between(stale):
    inside_T = sampled_in_topk(stale("response_ids_T"), stale("topk_ids_TK"))
    columns = ("logp_rollout_T", "logp_trainer_T", "topk_logp_rollout_TK", "topk_logp_trainer_TK")
    tv_T, kl_T = topk_divergences(*(stale(column) for column in columns), inside_T)
    assert (stale("tv_full_T") - tv_T).min() > -5e-6
    assert (stale("kl_full_T") - kl_T).min() > -5e-6
    assert tv_T.mean() > 0.7 * stale("tv_full_T").mean()


def test_the_control_has_no_gap(control):
    assert binary_tv(control("logp_rollout_T"), control("logp_trainer_T")).mean() < 1e-5
    assert binary_tv(control("logp_trainer_T"), control("logp_trainer_repeat_T")).mean() < 1e-5


def test_the_engine_gap_stays_that_of_fp8_at_every_step():
    """A sync that failed would add the staleness of all updates since."""
    for batch in batches("fp8-kv"):
        mismatch = binary_tv(batch.logp_rollout_T, batch.logp_recomputed_T).mean()
        assert 1e-3 < mismatch < 5e-3
        assert binary_tv(batch.logp_recomputed_T, batch.logp_trainer_T).mean() > 1.5 * mismatch


def test_staleness_is_lively(stale):
    mu_T, pi_T, advantage_T = stale("logp_rollout_T"), stale("logp_trainer_T"), stale("advantage_T")
    ratio_T, signal_T, negative_T = (pi_T - mu_T).exp(), advantage_T != 0, advantage_T < 0
    blocked_T = torch.where(advantage_T > 0, ratio_T > 1.28, ratio_T < 0.8)
    assert signal_T.float().mean() > 0.8
    assert 0.03 <= share(blocked_T, signal_T) <= 0.10
    assert 0.01 <= share(binary_tv(mu_T, pi_T) > 0.15, torch.ones_like(signal_T)) <= 0.05
    assert 0.001 <= share(prob_difference(mu_T, pi_T) <= -0.5, negative_T) <= 0.01


def test_the_reward_does_not_collapse(stale, control):
    assert 0.3 < stale("reward_S").mean() < 0.7 and 0.3 < control("reward_S").mean() < 0.7
    assert min(batch.reward_S.mean() for batch in batches("fp8-kv")) > 0.25


def test_the_ratio_fans_out_where_mu_is_small():
    """Figure 2 of arXiv 2602.04879, in the report itself."""
    rows = analyse_mismatch([Trace.open(FOLDER / "bfloat16")]).result.main.volatility
    spread = {row.mu_low: row.metrics["ratio_sd"].value for row in rows}
    assert (
        min(spread[low] for low in (0.001, 0.01, 0.05, 0.15, 0.3))
        > 10 * spread[0.9]
        > 100 * spread[0.99]
    )
    tv = {row.mu_low: row.metrics["tv_binary_sd"].value for row in rows}
    assert tv[0.01] < tv[0.9], "its TV does not"


def test_routers_flip_near_ties_and_replay_takes_gap_away():
    own, replayed = (
        analyse_mismatch([Trace.open(FOLDER / name)]).result for name in ("moe", "moe-replayed")
    )
    routing = own.routing
    assert 0.01 < routing.metrics["flipped_tokens"].value < 0.05
    assert routing.margins.flipped.p50 < 0.05 * routing.margins.agreeing.p50
    assert not routing.replayed and replayed.routing.replayed
    gaps = [result.main.metrics["abs_d_mean"].value for result in (own, replayed)]
    assert 0.8 * gaps[0] < gaps[1] < 0.95 * gaps[0]
    (first,), (other,) = batches("moe"), batches("moe-replayed")
    assert np.array_equal(first.response_ids_T, other.response_ids_T)
    for name in ("moe", "moe-replayed", "bfloat16"):
        assert not re.search(MACHINE, json.dumps(Trace.open(FOLDER / name).manifest))


def test_size():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {
        "manifest.json",
        "vocab.parquet",
        "shard-00000.parquet",
    }
    assert sum(path.stat().st_size for path in files) <= 8_000_000


def test_a_model_that_is_not_bundled_is_not_replaced_by_the_one_that_is(tmp_path, capsys):
    """Another model would score without a word: both know the same tokens."""
    for command in (["rescore", "moe"], ["probe", "--like", "moe"]):
        assert run([*command, "--output", str(tmp_path / "run")]) != 0
        assert re.search("--trainer-model|tiny-moe", capsys.readouterr().err)
