"""A trace scored again: recorded numbers come back, old and new ones never mix, and the input
stays untouched.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.places import bundled
from mismatch_cli.probe.config import EQUAL, NEWER, RescoreConfig
from mismatch_cli.probe.rescore import _carried, rescore
from mismatch_cli.probe.rescore_plan import (
    OF_RECOMPUTED,
    OF_ROUTERS,
    OF_TRAINER,
    RescorePlan,
    plan_rescoring,
)
from mismatch_cli.probe.score import noise_responses_of
from mismatch_cli.report.preamble import who_facts
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.trace.columns import COLUMNS, Maker, made_by
from mismatch_cli.trace.manifest import read_manifest, write_manifest
from mismatch_cli.trace.manifest_types import NEEDED
from mismatch_cli.trace.origin import About
from mismatch_cli.trace.reader import Trace
from tests.changed_models import copied, scaled
from tests.frameworks.dialects.conftest import rows as rows_of_log_probs
from tests.frameworks.dialects.conftest import written
from tests.warm import Forked, cli

MODEL = str(bundled("model"))
FLOAT32, FP8 = bundled("traces") / "float32", bundled("traces") / "fp8-kv"
NOT_IN_NUMBERS = {"command", "flags"}
NEW = {"command": "rescore", "flags": {}}


def talking() -> Any:
    """A progress that keeps its messages."""
    said: list[str] = []
    counting = lambda *_, **__: nullcontext(lambda _: None)  # noqa: E731
    return SimpleNamespace(said=said, say=said.append, counting=counting)


def config(
    trace: Path, model: str = MODEL, dtype: str = "float32", noise: int = 128, **more
) -> RescoreConfig:
    settings = {
        "trace": str(trace),
        "trainer_model": model,
        "trainer_dtype": dtype,
        "noise_responses": noise,
        "threads": 1,
    }
    return RescoreConfig.of(settings | more)


def rescored(folder: Path, trace: Path, **settings) -> Trace:
    rescore(config(trace, **settings), folder, dict(NEW), talking())
    return Trace.open(folder)


def rows(trace: Trace) -> dict[str, list]:
    """Every column of a trace, as Python values with exact floats."""
    return pa.concat_tables(pq.read_table(path) for path in trace.shards).to_pydict()


def flat(trace: Trace, name: str) -> np.ndarray:
    return np.concatenate([getattr(batch, name) for batch in trace.batches()])


def pairs(trace: Trace) -> dict[str, float]:
    result = analyse_mismatch([trace], 0).to_json()["pairs"]
    return {name: pair["metrics"]["tv_binary_mean"]["value"] for name, pair in result.items()}


def changed_copy(trace: Path, folder: Path, change, manifest=lambda content: content) -> Path:
    """A copy of a trace with `change` applied to every shard's table, and a changed manifest."""
    shutil.copytree(trace, folder)
    for path in Trace.open(folder).shards:
        pq.write_table(change(pq.read_table(path)), path)
    write_manifest(folder, manifest(read_manifest(folder)))
    return folder


def without(*names: str):
    return lambda table: table.drop_columns([name for name in names if name in table.column_names])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def same(tmp_path_factory) -> Trace:
    """The float32 trace, scored in float32 by the model that sampled."""
    return rescored(tmp_path_factory.mktemp("same") / "run", FLOAT32)


@pytest.fixture(scope="module")
def moved(tmp_path_factory) -> str:
    """A later checkpoint of the bundled model, with its tokenizer."""
    weight = scaled("model.layers.1.mlp.down_proj.weight", 1.05)
    return copied(MODEL, tmp_path_factory.mktemp("moved") / "model", tensors=weight)


def test_the_schema_says_who_made_every_column():
    made = {maker: made_by(maker) for maker in Maker}
    assert sorted(sum(made.values(), ())) == sorted(COLUMNS)
    others = {"tv_full", "kl_full", "logp_average"}  # of its distributions, and of its weights
    assert {*OF_TRAINER} == {name for name in COLUMNS if "trainer" in name} | others
    assert {*OF_RECOMPUTED} == {name for name in COLUMNS if "recomputed" in name}
    assert {*OF_ROUTERS} == {name for name in COLUMNS if name.startswith("route_")}


def test_a_column_that_nobody_is_known_to_have_made_is_not_carried(tmp_path):
    """A trainer's column need not be called so: its values do not belong to the new log π."""

    def with_margin(table: pa.Table) -> pa.Table:
        return table.append_column("margin", table.column("logp_trainer"))

    source = changed_copy(FLOAT32, tmp_path / "source", with_margin)
    assert "margin" in Trace.open(source).columns()
    talk = talking()
    rescore(config(source, noise=0), tmp_path / "run", dict(NEW), talk)
    new_trace = Trace.open(tmp_path / "run")
    assert "margin" not in new_trace.columns() and "logp_trainer" in new_trace.columns()
    assert any("Left out: margin. The schema does not say" in said for said in talk.said)


def test_float32_gives_the_recorded_numbers_back_and_leaves_the_input(same):
    before = Trace.open(FLOAT32)
    for name in (
        "logp_trainer_T",
        "logp_trainer_repeat_T",
        "entropy_trainer_T",
        "topk_logp_trainer_TK",
    ):
        np.testing.assert_allclose(flat(same, name), flat(before, name), rtol=1e-5, atol=1e-6)
    old, new = rows(before), rows(same)
    assert old.keys() == new.keys()
    for name in set(old) - {
        "rank_trainer",
        *(n for n in old if "logp_trainer" in n),
        "entropy_trainer",
    }:
        assert old[name] == new[name], name
    assert same.count("grading_timeouts") == before.count("grading_timeouts")
    assert same.vocabulary.decode(range(300)) == before.vocabulary.decode(range(300))


def test_the_input_is_only_read(tmp_path):
    source = Path(shutil.copytree(FLOAT32, tmp_path / "source"))
    before = contents(source)
    rescored(tmp_path / "run", source, noise=0)
    assert contents(source) == before


def test_bfloat16_differs_by_its_rounding(same, tmp_path):
    rough = rescored(tmp_path / "run", FLOAT32, dtype="bfloat16", noise=0)
    assert rough.manifest["trainer"]["dtype"] == "bfloat16"
    assert pairs(same)["mismatch"] < 1e-6 < 1e-4 < pairs(rough)["mismatch"] < 1e-2
    # The old noise floor is gone, and no new one was requested
    assert "logp_trainer_repeat" not in rough.columns()


@pytest.mark.slow
def test_a_trace_with_only_the_rollout_gets_everything(same, tmp_path):
    only_mu = changed_copy(
        FLOAT32,
        tmp_path / "mu",
        without(*OF_TRAINER, "version_rollout"),
        lambda m: {name: m[name] for name in ("format", "format_version")},
    )
    (only_mu / "vocab.parquet").unlink()
    talk = talking()
    rescore(config(only_mu), tmp_path / "run", dict(NEW), talk)
    new_trace = Trace.open(tmp_path / "run")
    assert "assuming temperature 1 and no truncation" in " ".join(talk.said)
    assert new_trace.manifest["trainer"]["temperature"] == 1.0
    assert np.array_equal(flat(new_trace, "logp_trainer_T"), flat(same, "logp_trainer_T"))
    assert pairs(new_trace) == pairs(same)
    # From the model's tokenizer
    assert new_trace.vocabulary.decode(range(300)) == same.vocabulary.decode(range(300))


def test_a_later_checkpoint_separates_mismatch_staleness_and_total(moved, same, tmp_path):
    later = rescored(tmp_path / "run", FLOAT32, model=moved, weights="newer")
    assert not later.manifest["equal_weights"]
    assert (
        later.manifest["recomputed"]["model"] == "sample_data/model"
        and later.manifest["trainer"]["model"] == moved
    )
    assert np.array_equal(
        flat(later, "logp_recomputed_T"), flat(Trace.open(FLOAT32), "logp_trainer_T")
    )
    assert np.array_equal(
        flat(later, "topk_logp_recomputed_TK"), flat(Trace.open(FLOAT32), "topk_logp_trainer_TK")
    )
    result = pairs(later)
    assert result["mismatch"] < 1e-6 and result["staleness"] > 1e-4
    assert result["total"] == pytest.approx(result["staleness"], rel=0.02)
    assert pairs(rescored(tmp_path / "wrong", FLOAT32, model=moved, noise=0)).keys() == {"mismatch"}


@pytest.mark.slow
def test_what_the_trace_knew_is_kept_for_a_still_later_checkpoint(tmp_path):
    source, later = (
        Trace.open(FP8),
        rescored(tmp_path / "run", FP8, dtype="bfloat16", weights="newer"),
    )
    assert np.array_equal(flat(later, "logp_recomputed_T"), flat(source, "logp_recomputed_T"))
    assert set(rows(later)["version_trainer"]) == {49}
    assert not {"tv_full", "kl_full"} & later.columns()
    assert {"tv_full", "kl_full", "logp_trainer", "rank_trainer"} <= set(
        later.manifest["rescored"]["replaced"]
    )
    assert pairs(later)["mismatch"] == pairs(source)["mismatch"]
    assert pairs(later)["total"] != pairs(source)["total"]


@pytest.mark.slow
def test_with_some_of_the_sampling_weights_the_mismatch_is_that_of_their_responses(tmp_path):
    talk = talking()
    rescore(config(FP8, dtype="bfloat16", weights="0"), tmp_path / "run", dict(NEW), talk)
    new_trace = Trace.open(tmp_path / "run")
    assert pairs(new_trace).keys() == {"mismatch", "total"}
    columns = rows(new_trace)
    first = [
        ids
        for ids, at in zip(columns["response_ids"], columns["version_rollout"], strict=True)
        if at == 0
    ]
    assert 0 < len(first) < new_trace.num_responses
    assert analyse_mismatch([new_trace], 0).to_json()["pairs"]["mismatch"]["counts"][
        "tokens"
    ] == sum(map(len, first))
    assert "two trainers would mix" in " ".join(talk.said)
    assert "recomputed" not in new_trace.manifest


def test_keep_trainer_adds_what_is_missing(tmp_path):
    def first_step(table):
        return without("logp_recomputed", "topk_logp_recomputed")(
            table.filter(pa.compute.equal(table["step"], 0))
        )

    source = Path(shutil.copytree(FP8, tmp_path / "source"))
    for path in Trace.open(source).shards[1:]:
        path.unlink()
    (shard,) = Trace.open(source).shards
    expected = flat(Trace.open(source), "logp_recomputed_T")
    pq.write_table(first_step(pq.read_table(shard)), shard)
    talk = talking()
    tokens: list[int] = []

    def counting(_phase: str, total: int, done: int, **_: Any) -> Any:
        tokens.extend([-total, done])
        return nullcontext(tokens.append)

    talk.counting = counting
    rescore(config(source, dtype="bfloat16", keep_trainer=True), tmp_path / "run", dict(NEW), talk)
    filled = Trace.open(tmp_path / "run")
    # All that was counted is done: nothing is scored twice where the old trainer stays
    assert min(tokens) < -1000 and sum(tokens) == 0
    apart_T = np.abs(flat(filled, "logp_recomputed_T") - expected)
    # bfloat16 rounds differently on each kind of processor
    assert apart_T.mean() < 5e-3 and apart_T.max() < 0.25
    for name in set(OF_TRAINER) - {"logp_average"}:  # which the bundled trace lacks
        assert rows(filled)[name] == rows(Trace.open(source))[name]
    assert pairs(filled).keys() == {"mismatch", "staleness", "total"}
    assert (
        filled.manifest["trainer"]["model"] == "sample_data/model"
        and filled.manifest["recomputed"]["model"] == MODEL
    )


def test_keep_trainer_without_versions_trusts_the_user(tmp_path):
    source = changed_copy(
        FLOAT32, tmp_path / "source", without("version_trainer", "version_rollout")
    )
    filled = rescored(tmp_path / "run", source, keep_trainer=True, noise=0)
    assert set(rows(filled)["version_rollout"]) == {0} and set(rows(filled)["version_trainer"]) == {
        1
    }
    assert np.array_equal(
        flat(filled, "logp_trainer_T"), flat(Trace.open(FLOAT32), "logp_trainer_T")
    )


@pytest.mark.parametrize(
    ("trace", "settings", "message"),
    [
        (
            FP8,
            {},
            r"sampled at 6 versions of the weights \(0 to 40\).*--weights 0, or --weights newer",
        ),
        (FLOAT32, {"keep_trainer": True}, "scored 96 responses at the weights that sampled"),
        (FLOAT32, {"keep_trainer": True, "weights": "newer"}, "needs --weights equal"),
        (FLOAT32, {"model": "/no/such/model"}, "There is no model folder"),
        (FLOAT32, {"temperature": 0.0}, "--temperature 0.0 is out of range"),
    ],
)
def test_impossible_requests_are_refused_before_anything_is_written(
    trace, settings, message, tmp_path
):
    with pytest.raises((MismatchError, UsageError), match=message):
        rescored(tmp_path / "run", trace, **settings)
    assert not (tmp_path / "run" / "trace").exists()


def test_nothing_to_keep_is_an_error(tmp_path):
    source = changed_copy(FLOAT32, tmp_path / "source", without(*OF_TRAINER))
    with pytest.raises(UsageError, match="has no logp_trainer"):
        rescored(tmp_path / "run", source, keep_trainer=True)


@pytest.mark.parametrize("empty", [None, []])
def test_responses_without_a_prompt_are_counted_in_the_error(empty, tmp_path):
    def change(table):
        prompts = [empty, *table["prompt_ids"].to_pylist()[1:]]
        column = pa.array(prompts, pa.list_(pa.int32()))
        return table.set_column(table.column_names.index("prompt_ids"), "prompt_ids", column)

    source = changed_copy(FLOAT32, tmp_path / "source", change)
    with pytest.raises(MismatchError, match="lacks the prompt of 1 of its 96 responses"):
        rescored(tmp_path / "run", source)


def test_a_response_without_a_token_needs_no_prompt(tmp_path):
    columns = rows_of_log_probs([[], [-1.0], [-1.0, -2.0], [-1.0]])
    trace = written(tmp_path, columns | {"prompt_ids": [[], [], None, [1]]})
    with pytest.raises(MismatchError, match="lacks the prompt of 2 of its 4 responses"):
        plan_rescoring(trace, config(tmp_path))


def test_tokens_that_the_model_lacks_are_named(save_model, tmp_path):
    with pytest.raises(MismatchError, match="the trainer's vocabulary ends at 99"):
        rescored(tmp_path / "run", FLOAT32, model=save_model("Qwen3", vocab_size=100))


def test_a_model_without_a_tokenizer_leaves_tokens_as_numbers(save_model, tmp_path):
    source = changed_copy(FLOAT32, tmp_path / "source", lambda table: table)
    (source / "vocab.parquet").unlink()
    talk = talking()
    model = save_model("Qwen3", vocab_size=2048)
    rescore(config(source, model=model, noise=0), tmp_path / "run", dict(NEW), talk)
    assert "Tokens will be shown as numbers" in " ".join(talk.said)
    assert Trace.open(tmp_path / "run").vocabulary.decode([7]) == "⟨7⟩"


def test_row_groups_are_scored_one_by_one_and_top_k_may_be_null(same, tmp_path):
    def change(table):
        topk = [
            None if row % 3 == 0 else ids for row, ids in enumerate(table["topk_ids"].to_pylist())
        ]
        names = table.column_names
        table = table.set_column(
            names.index("topk_ids"), "topk_ids", pa.array(topk, pa.list_(pa.int32()))
        )
        return table.drop_columns(["topk_logp_rollout", "topk_logp_trainer"])

    source = changed_copy(FLOAT32, tmp_path / "source", change)
    (path,) = Trace.open(source).shards
    pq.write_table(pq.read_table(path), path, row_group_size=7)
    new_trace = rescored(tmp_path / "run", source, noise=3)
    assert pq.ParquetFile(new_trace.shards[0]).num_row_groups == 14
    np.testing.assert_allclose(
        flat(new_trace, "logp_trainer_T"), flat(same, "logp_trainer_T"), rtol=1e-5, atol=1e-5
    )
    columns = rows(new_trace)
    assert [row is None for row in columns["topk_logp_trainer"]] == [n % 3 == 0 for n in range(96)]
    assert sum(row is not None for row in columns["logp_trainer_repeat"]) == 3


def test_another_temperature_is_measured_and_reported(same, tmp_path):
    talk = talking()
    rescore(config(FLOAT32, temperature=0.8, noise=0), tmp_path / "run", dict(NEW), talk)
    new_trace = Trace.open(tmp_path / "run")
    assert "Sampled with temperature 1, scored with 0.8" in " ".join(talk.said)
    assert new_trace.manifest["trainer"]["temperature"] == 0.8
    x, y = (
        flat(trace, "topk_logp_trainer_TK").reshape(-1, 20).astype(np.float64)
        for trace in (same, new_trace)
    )
    x, y = x[:, 0] - x[:, 1], y[:, 0] - y[:, 1]
    assert float((x @ x) / (x @ y)) == pytest.approx(0.8, abs=1e-4)


def test_what_an_import_noted_about_its_pi_is_dropped_with_it(tmp_path):
    imported = {
        "title": "a dump",
        "file_count": 1,
        "left_out": {},
        "left_out_first": {},
        "noted": {},
    }
    of_pi = {
        "pi": "trainer",
        "holds": "old_log_probs",
        "rows_with_trainer": 96,
        "rows_with_newer_trainer": 0,
    }
    source = changed_copy(
        FLOAT32,
        tmp_path / "source",
        lambda table: table.set_column(0, "step", pa.array(range(96), pa.int32())),
        lambda manifest: manifest | {"imported": imported | of_pi},
    )
    talk = talking()
    rescore(config(source, noise=0), tmp_path / "run", dict(NEW), talk)
    assert "has 96 steps and one version of the weights" in " ".join(talk.said)
    new_trace = Trace.open(tmp_path / "run")
    assert new_trace.manifest["imported"] == imported
    assert new_trace.manifest["rescored"]["before"]["imported"]["holds"] == "old_log_probs"
    assert ("Imported from", "a dump · 1 file") in who_facts(About.of([new_trace]))


def start(output: Path, *more: str) -> Forked:
    flags = [
        "--trainer-model",
        MODEL,
        "--weights",
        "newer",
        "--token-budget",
        "400",
        "--threads",
        "1",
        "--quiet",
    ]
    return cli("rescore", str(FP8), *flags, "--output", str(output), *more)


@pytest.mark.slow
def test_killed_and_resumed_equals_unbroken(tmp_path):
    killed = tmp_path / "killed"
    process = start(killed, "--noise-responses", "128")
    while not (killed / "trace" / "shard-00001.parquet").is_file():
        assert process.poll() is None, process.said()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.ended()
    part = Trace.open(killed)
    assert 2 <= len(part.shards) < 6
    assert sum(batch.num_responses for batch in part.batches()) == 32 * len(part.shards)
    written_at = {path.name: path.stat().st_mtime_ns for path in part.shards}
    content = json.loads((killed / "trace" / "manifest.json").read_text())
    whole = config(FP8, dtype="auto", weights="newer", token_budget=400)
    rescore(whole, killed, content, talking())
    rescore(whole, tmp_path / "unbroken", dict(NEW), talking())
    resumed, unbroken = Trace.open(killed), Trace.open(tmp_path / "unbroken")
    assert {
        path.name: path.stat().st_mtime_ns for path in resumed.shards if path.name in written_at
    } == written_at
    assert rows(resumed) == rows(unbroken)
    assert resumed.manifest.keys() == unbroken.manifest.keys()
    assert {k: v for k, v in resumed.manifest.items() if k not in NOT_IN_NUMBERS} == {
        k: v for k, v in unbroken.manifest.items() if k not in NOT_IN_NUMBERS
    }


def test_a_run_whose_source_has_changed_is_not_resumed(tmp_path):
    source = changed_copy(FLOAT32, tmp_path / "source", lambda table: table)
    done = rescored(tmp_path / "run", source, noise=0)
    (path,) = Trace.open(source).shards
    pq.write_table(pq.read_table(path).slice(0, 50), path)
    with pytest.raises(MismatchError, match="has changed since this run began"):
        rescore(config(source, noise=0), tmp_path / "run", done.manifest, talking())
    assert np.isfinite(flat(done, "logp_trainer_T")).all()


def test_without_a_number_a_fifth_is_scored_twice():
    assert [noise_responses_of(None, count) for count in (5, 40, 200, 5000)] == [16, 16, 40, 128]
    assert [noise_responses_of(wanted, 40) for wanted in (0, 3, 500)] == [0, 3, 500]


def test_the_model_that_sampled_is_named_as_it_was_typed(tmp_path):
    """A server may have a different name for it; without a rollout, nothing has sampled."""
    unnamed, adapted = "does not name the model to score with", "--trainer-adapter tuned"
    trace = written(tmp_path, rows_of_log_probs([[-1.0]]))
    facts = dict.fromkeys(NEEDED["rollout"], "unknown") | {"model": "served-as-this"}
    rollout = {"rollout": facts}
    for sampler, more, weights, refusal in (
        (rollout, {}, EQUAL, ""),
        (rollout, {"adapter": "tuned"}, EQUAL, adapted),
        (rollout, {}, NEWER, unnamed),
        ({}, {}, EQUAL, unnamed),
    ):
        manifest = {"command": "curate", "config": {"model": MODEL} | more} | sampler
        write_manifest(trace.folder, manifest)
        settings = {"trace": str(trace.folder), "weights": weights}
        if refusal:
            with pytest.raises(UsageError, match=refusal):
                RescoreConfig.of(settings)
        else:
            assert RescoreConfig.of(settings).scorer.model == MODEL


def planned(
    folder: Path, weights: str, rollout: list[int], trainer: list[int], recomputed: bool = True
) -> RescorePlan:
    """The plan for two responses, sampled and scored at these versions of the weights."""
    logp = [[-1.0], [-2.0]]
    columns = {"logp_trainer": logp} | ({"logp_recomputed": logp} if recomputed else {})
    versions = {"version_rollout": rollout, "version_trainer": trainer}
    trace = written(folder, rows_of_log_probs(logp, **columns, **versions))
    return plan_rescoring(trace, config(folder, weights=weights))


@pytest.mark.parametrize("weights", [EQUAL, NEWER, "3"])
def test_a_trace_without_responses_has_nothing_to_score(weights, tmp_path):
    trace = written(tmp_path, rows_of_log_probs([[-1.0]]))
    (shard,) = trace.shards
    pq.write_table(pq.read_table(shard).slice(0, 0), shard)
    with pytest.raises(MismatchError, match="has no responses to score"):
        plan_rescoring(Trace.open(trace.folder), config(tmp_path, weights=weights))


@pytest.mark.parametrize("has_own_pi", [True, False])
def test_newer_weights_keep_log_pi_at_the_weights_that_sampled_if_the_trace_has_it(
    has_own_pi, tmp_path
):
    plan = planned(tmp_path, NEWER, [0, 0], [3, 3], recomputed=has_own_pi)
    assert plan.carried == (("logp_recomputed",) if has_own_pi else ())
    assert (
        any("has no log π at the weights that sampled" in note for note in plan.notes) != has_own_pi
    )


@pytest.mark.parametrize(
    ("sampled_at", "version", "mixed"),
    [([0, 4], 4, True), ([4, 4], 4, False), ([0, 4], 5, False)],
)
def test_only_some_of_the_weights_that_sampled_would_mix_two_trainers(
    sampled_at, version, mixed, tmp_path
):
    plan = planned(tmp_path, str(version), sampled_at, [5, 5])
    assert any("two trainers would mix" in note for note in plan.notes) == mixed
    assert plan.carried == (("logp_recomputed",) if version == 5 else ())


@pytest.mark.parametrize(("weights", "version"), [(NEWER, 6), (EQUAL, 3), ("4", 4)])
def test_newer_weights_are_the_version_after_all_others(weights, version, tmp_path):
    assert planned(tmp_path, weights, [3, 3], [0, 5]).version == version


def test_what_is_carried_is_the_recomputed_policy_and_not_the_engine_s():
    table = next(iter(Trace.open(bundled("traces/fp8-kv")).tables()))
    carried = _carried(table, SimpleNamespace(carried=("logp_recomputed",)))
    for name in ("logp_recomputed", "topk_logp_recomputed"):
        own = table.column(name).combine_chunks()
        for row, values in zip(own.to_pylist()[:5], carried[name][:5], strict=True):
            np.testing.assert_allclose(values.ravel(), np.array(row, dtype="f").ravel())
