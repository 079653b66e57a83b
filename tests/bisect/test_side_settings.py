"""Both sides from a manifest, changes that combine, and the settings that can be changed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.options import replace_settings
from mismatch_cli.base.places import bundled
from mismatch_cli.bisect import runner
from mismatch_cli.bisect.baseline_stage import _model_experiments
from mismatch_cli.bisect.fixed_tokens import choose, versions
from mismatch_cli.bisect.search_config import BisectConfig
from mismatch_cli.bisect.side_settings import RolloutSide, TrainerSide, combined, engine_part
from mismatch_cli.bisect.toggles import Toggle, toggles
from mismatch_cli.trace.reader import Trace

MODEL = str(bundled("model"))
MANIFEST: dict[str, Any] = {
    "command": "probe",
    "config": {
        "model": MODEL,
        "engine": "vllm",
        "engine_args": {},
        "sampling": {"temperature": 1.0},
        "seed": 3,
    },
    "rollout": {
        "engine": "vllm",
        "model": MODEL,
        "dtype": "bfloat16",
        "device": "cpu",
        "max_num_seqs": 256,
    },
    "trainer": {
        "model": MODEL,
        "dtype": "bfloat16",
        "head_dtype": "bfloat16",
        "attn_implementation": "sdpa",
    },
}


def manifest(**changes: dict[str, Any]) -> dict[str, Any]:
    return combined(MANIFEST, changes)


def turned(**changes: dict[str, Any]) -> list[Toggle]:
    config = BisectConfig.of({"trainer_adapter": changes.get("trainer", {}).get("adapter")})
    rollout = RolloutSide.of(manifest(**changes), config)
    return toggles(rollout, TrainerSide.of(manifest(**changes), config, rollout))


def settings(toggles: list[Toggle]) -> set[tuple[str, str]]:
    return {(toggle.setting, toggle.side) for toggle in toggles}


def test_changes_combine_key_by_key():
    first = {"engine_args": {"hf_overrides": {"head_dtype": "float32"}, "kv_cache_dtype": None}}
    other = {
        "engine_args": {"hf_overrides": {"rope_theta": None}},
        "dtype": "float32",
        "alone": True,
    }
    both = combined(first, other)
    assert both["engine_args"] == {
        "hf_overrides": {"head_dtype": "float32", "rope_theta": None},
        "kv_cache_dtype": None,
    }
    assert engine_part(both) == {name: both[name] for name in ("engine_args", "dtype")}
    assert first["engine_args"]["hf_overrides"] == {"head_dtype": "float32"}, (
        "nothing is changed in place"
    )


def test_an_engine_is_asked_for_what_the_trace_says_and_for_a_change():
    recorded = manifest(
        config={"engine_args": {"kv_cache_dtype": "fp8", "hf_overrides": {"rope_theta": 5e5}}}
    )
    side = RolloutSide.of(recorded, BisectConfig())
    unchanged = side.settings({})
    assert (unchanged.dtype, unchanged.seed, unchanged.replays) == ("bfloat16", 3, True)
    assert unchanged.extra == {"kv_cache_dtype": "fp8", "hf_overrides": {"rope_theta": 5e5}}
    changed = side.settings(
        {"engine_args": {"kv_cache_dtype": None, "hf_overrides": {"rope_theta": None}}}
    )
    assert changed.extra == {}


def test_flags_win_over_the_manifest():
    config = BisectConfig.of(
        {
            "engine": "hf",
            "rollout_dtype": "float32",
            "trainer_dtype": "float32",
            "trainer_model": "./other",
        }
    )
    rollout = RolloutSide.of(MANIFEST, config)
    trainer = TrainerSide.of(MANIFEST, config, rollout)
    assert (rollout.engine, rollout.dtype, trainer.config.scorer.dtype) == (
        "hf",
        "float32",
        "float32",
    )
    assert trainer.config.scorer.model == "./other"


def test_an_adapter_of_the_rollout_is_not_given_to_a_known_trainer():
    recorded, typed = manifest(config={"adapter": "a"}), BisectConfig.of({"rollout_adapter": "a"})
    with pytest.raises(UsageError, match='was recorded with rollout_adapter = "a"'):
        RolloutSide.of(recorded, BisectConfig())
    rollout = RolloutSide.of(recorded, typed)
    assert rollout.adapter == "a"
    assert TrainerSide.of(recorded, typed, rollout).config.scorer.adapter is None
    unknown = {name: section for name, section in recorded.items() if name != "trainer"}
    assert TrainerSide.of(unknown, BisectConfig(), rollout).config.scorer.adapter == "a"


def test_a_mistyped_trace_is_not_a_hub_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert not BisectConfig.of({"trace": "runs/nothing"}).is_model
    assert not BisectConfig.of({"trace": "./nothing"}).is_model
    assert BisectConfig.of({"trace": "some/model"}).is_model


def test_a_dump_without_engine_or_model_says_what_to_name():
    with pytest.raises(UsageError, match=r"--model and --engine.*mismatch-cli diagnose"):
        RolloutSide.of({"rollout": {}, "config": {}}, BisectConfig())


def test_the_bundled_model_is_found_wherever_the_traces_are():
    bundled_manifest = Trace.open(bundled("traces") / "bfloat16").manifest
    assert RolloutSide.of(bundled_manifest, BisectConfig()).model == MODEL


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rollout": {"kv_cache_dtype": "fp8"}}, {("kv_cache_dtype", "rollout")}),
        (
            {"config": {"engine_args": {"hf_overrides": {"rope_theta": 5e5}}}},
            {("hf_overrides.rope_theta", "rollout")},
        ),
        ({"trainer": {"temperature": 0.7}}, {("temperature", "trainer")}),
        (
            {"trainer": {"dtype": "float32", "head_dtype": "float32"}},
            {("dtype", "rollout"), ("dtype", "trainer")},
        ),
        (
            {"trainer": {"head_dtype": "float32"}},
            {("head_dtype", "trainer"), ("head_dtype", "rollout")},
        ),
        ({"rollout": {"enforce_eager": False}}, {("enforce_eager", "rollout")}),
        ({"rollout": {"chunked_prefill": True}}, {("chunked_prefill", "rollout")}),
        ({"rollout": {"tensor_parallel_size": 2}}, {("tensor_parallel_size", "rollout")}),
        ({"rollout": {"quantization": "fp8"}}, {("quantization", "rollout")}),
        (
            {"rollout": {"device": "cuda"}},
            {("batch_invariant", "rollout"), ("attention_backend", "rollout")},
        ),
        ({"trainer": {"adapter": "a", "adapter_merged": True}}, {("adapter_merged", "trainer")}),
    ],
)
def test_a_setting_that_can_cause_gaps_is_changed(changes, expected):
    assert expected <= settings(turned(**changes))


def test_on_a_healthy_trace_precisions_batches_caches_and_attention_are_changed():
    assert settings(turned()) == {
        ("dtype", "both"),
        ("head_dtype", "rollout"),
        ("head_dtype", "trainer"),
        ("head_dtype", "both"),
        ("attn_implementation", "trainer"),
        ("token_budget", "trainer"),
        ("max_num_seqs", "rollout"),
        ("prefix_caching", "rollout"),
    }


def test_float32_on_both_sides_leaves_no_precision_to_change():
    wide = {
        "rollout": {"dtype": "float32"},
        "trainer": {"dtype": "float32", "head_dtype": "float32"},
    }
    assert not {"dtype", "head_dtype"} & {toggle.setting for toggle in turned(**wide)}


def test_changes_without_a_restart_come_first_and_only_shared_precision_is_a_floor():
    toggles = turned(rollout={"kv_cache_dtype": "fp8"})
    starts = [toggle.starts for toggle in toggles]
    assert starts == sorted(starts)
    assert [toggle.setting for toggle in toggles if toggle.floor] == ["dtype"]
    own = turned(trainer={"dtype": "float32", "head_dtype": "float32"})
    assert not any(toggle.floor for toggle in own), (
        "dtypes that differ are a difference, not a floor"
    )


def test_every_prompt_has_a_response_before_one_has_two():
    trace = Trace.open(bundled("traces") / "bfloat16")
    first, *others = choose(trace, 256, None)
    assert len(set(first["prompt_id"].to_pylist())) == len(first) == 64
    whole = pa.concat_tables([first, *others])
    assert len(whole) == 256
    assert len(set(whole.slice(0, 128)["prompt_id"].to_pylist())) == 128


def test_only_responses_at_the_named_version_are_chosen():
    """The bundled training run: six versions, each with log π of later weights."""
    trace = Trace.open(bundled("traces") / "fp8-kv")
    assert versions(trace) == [0, 8, 16, 24, 32, 40]
    tables = choose(trace, 64, 8, equal=True)
    whole = pa.concat_tables(tables)
    assert (len(whole), set(whole["version_rollout"].to_pylist())) == (32, {8})
    source = pa.concat_tables([t for t in trace.tables() if t["version_rollout"][0].as_py() == 8])
    recomputed = dict(
        zip(
            zip(source["prompt_id"].to_pylist(), source["sample_index"].to_pylist(), strict=True),
            source["logp_recomputed"].to_pylist(),
            strict=True,
        )
    )
    for row in whole.to_pylist():
        assert row["logp_trainer"] == recomputed[row["prompt_id"], row["sample_index"]]
    with pytest.raises(MismatchError, match="weights that a model here has"):
        choose(trace, 64, 7, equal=True)


@pytest.mark.parametrize("stages", ["4", "", "0;1", "first"])
def test_stages_that_do_not_exist_are_refused(stages):
    with pytest.raises(UsageError, match="--stages"):
        BisectConfig.of({"stages": stages})


def test_prompts_are_only_for_a_model():
    with pytest.raises(UsageError, match="--prompts"):
        BisectConfig.of({"prompts": "prompts.jsonl"})
    assert BisectConfig.of({"trace": MODEL, "prompts": "prompts.jsonl"}).is_model


def test_a_head_less_precise_than_the_weights_is_undone():
    """With everything else in float32 there is no float32 head to try; the override is what
    differs.
    """
    float32 = {
        "rollout": {"dtype": "float32"},
        "trainer": {"dtype": "float32", "head_dtype": "float32"},
    }
    (head,) = (
        toggle
        for toggle in turned(
            config={"engine_args": {"hf_overrides": {"head_dtype": "bfloat16"}}}, **float32
        )
        if toggle.setting == "head_dtype"
    )
    assert (head.side, head.value) == ("rollout", "bfloat16")
    assert head.rollout == {"engine_args": {"hf_overrides": {"head_dtype": None}}}
    assert "head_dtype" not in {toggle.setting for toggle in turned(**float32)}


def test_another_engine_does_not_get_the_settings_of_the_one_that_sampled():
    recorded = manifest(
        config={"engine_args": {"kv_cache_dtype": "fp8"}}, rollout={"kv_cache_dtype": "fp8"}
    )
    side = RolloutSide.of(recorded, BisectConfig.of({"engine": "hf"}))
    assert (side.engine, side.dtype, side.settings({}).extra, side.described) == (
        "hf",
        "bfloat16",
        {},
        {},
    )


def test_a_flag_has_the_value_that_the_engine_takes():
    """1 equals True, but is typed as 1."""
    changes = {
        "tensor_parallel_size": 2,
        "quantization": "fp8",
        "chunked_prefill": True,
        "enforce_eager": False,
    }
    flags = {toggle.setting: toggle.flags for toggle in turned(rollout=changes)}
    for setting, argument in (
        ("tensor_parallel_size", "tensor_parallel_size=1"),
        ("quantization", "quantization=null"),
        ("chunked_prefill", "enable_chunked_prefill=false"),
        ("enforce_eager", "enforce_eager=true"),
        ("max_num_seqs", "max_num_seqs=1"),
    ):
        assert flags[setting] == ("--engine-arg", argument)


@pytest.mark.parametrize(("rollout_adapter", "own"), [("a", None), (None, "b"), ("a", "b")])
def test_a_trainer_with_the_adapter_of_the_rollout(rollout_adapter, own, monkeypatch):
    """It is loaded with that adapter, and with no other that a run folder may name."""
    config = BisectConfig()
    rollout = replace(RolloutSide.of(MANIFEST, config), adapter=rollout_adapter)
    trainer = TrainerSide.of(MANIFEST, config, rollout)
    trainer = replace(trainer, config=replace_settings(trainer.config, trainer_adapter=own))
    loaded: list[str | None] = []
    monkeypatch.setattr(runner, "load_trainer", lambda _, adapter, *__: loaded.append(adapter))
    both = runner.Runner(SimpleNamespace(progress=None, ranks=None), rollout, trainer)
    for change in ({}, {"trainer_adapter": rollout_adapter}, {"trainer_adapter": "elsewhere"}):
        with both.loaded_trainer(change):
            pass
    assert loaded == [own, rollout_adapter, rollout_adapter]


def test_every_difference_of_two_models_is_an_experiment():
    """A tensor of unknown relation has no detail to give; a value with one differing part is named
    by that part.
    """
    groups = (("up", ["up"]), ("layers.1", ["layers.1.q", "layers.1.k"]))
    differing = (("up", "other", ""), ("layers.1.q", "scaled", "× 1.0100"))
    weights = {
        "groups": [{"name": name, "relation": "", "tensors": own} for name, own in groups],
        "differing": [
            {"tensor": tensor, "relation": relation, "detail": detail}
            for tensor, relation, detail in differing
        ],
        "config": [
            {"key": "rope", "inner": ["theta"], "rollout": {"theta": 1}, "trainer": {"theta": 2}},
            {"key": "eps", "inner": [], "rollout": 1, "trainer": 2},
        ],
    }
    config = BisectConfig()
    rollout = RolloutSide.of(MANIFEST, config)
    sides = SimpleNamespace(rollout=rollout, trainer=TrainerSide.of(MANIFEST, config, rollout))
    run = SimpleNamespace(search=SimpleNamespace(weights=weights), runner=sides)
    experiments = {each["setting"]: (each, change) for each, change in _model_experiments(run)}
    assert list(experiments) == ["up", "layers.1", "rope.theta", "eps"]
    same = "load the same weights on both sides: "
    assert experiments["up"][0]["change"] == f"{same}up differs"
    both, change = experiments["layers.1"]
    assert both["change"] == f"{same}layers.1.q differs (scaled: × 1.0100), and 1 more"
    assert change == {"tensors": {"layers.1": ["layers.1.q", "layers.1.k"]}}
    rope, change = experiments["rope.theta"]
    assert (rope["value"], rope["better"]) == ({"theta": 2}, {"theta": 1})
    assert change == {"model_config": {"rope": {"theta": 1}}}
