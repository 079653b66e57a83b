"""Which settings of one trace are suspects, in which order, and which commands test them."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.limits.causes import CAUSES, cause_rank
from mismatch_cli.limits.suspects import suspects

ENGINE = {
    "engine": "vllm",
    "model": "m",
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "device": "cuda",
}
TRAINER = {"model": "m", "dtype": "float32", "head_dtype": "float32"}


def manifest(name: str) -> dict[str, Any]:
    return json.loads((bundled("traces") / name / "manifest.json").read_text(encoding="utf-8"))


def found(rollout: dict | None = None, trainer: dict | None = None, **how: Any) -> list[str]:
    about = {
        "rollout": ENGINE | (rollout or {}),
        "trainer": TRAINER | (trainer or {}),
        **how.pop("about", {}),
    }
    return [suspect.setting for suspect in suspects(about, "run", **how)]


def test_the_fp8_cache_of_the_bundled_trace_comes_first():
    first, *others = suspects(manifest("fp8-kv"), "run")
    assert (first.setting, first.value) == ("rollout.kv_cache_dtype", "fp8")
    assert "NeMo-RL PR#1212" in first.source and first.seen
    assert any("--kv-cache-dtype auto" in line for line in first.test)
    assert [suspect.setting for suspect in others][:2] == ["rollout.dtype", "trainer.head_dtype"]


def test_a_control_in_float32_has_no_suspects():
    assert suspects(manifest("float32"), "run") == ()
    assert suspects({}, "run") == ()


@pytest.mark.parametrize(
    ("rollout", "trainer", "setting"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, {}, "rollout.kv_cache_dtype"),
        ({"kv_cache_dtype": "nvfp4"}, {}, "rollout.kv_cache_dtype"),
        ({"quantization": "fp8"}, {}, "rollout.quantization"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, {}, "trainer.dtype"),
        ({}, {"head_dtype": "bfloat16"}, "trainer.head_dtype"),
        ({}, {"attention_leaves_out": "sinks"}, "trainer.attn_implementation"),
        ({"cascade_attention": True}, {}, "rollout.cascade_attention"),
        ({"attention_backend": "FLASHINFER"}, {}, "rollout.attention_backend"),
        ({"chunked_prefill": True}, {}, "rollout.chunked_prefill"),
        ({"enforce_eager": False}, {}, "rollout.enforce_eager"),
        ({"tensor_parallel_size": 4}, {}, "rollout.tensor_parallel_size"),
        ({"max_num_seqs": 256}, {}, "rollout.max_num_seqs"),
        ({"adapter": "lora"}, {}, "rollout.adapter"),
        ({}, {"adapter": "lora"}, "trainer.adapter"),
        ({"model": "other"}, {}, "rollout.model"),
    ],
)
def test_a_setting_known_to_cause_gaps_is_a_suspect(rollout, trainer, setting):
    assert setting in found(rollout, trainer)
    assert setting not in found()


def test_two_adapters_are_a_suspect_where_they_should_be_one():
    """By their numbers: a copy of an adapter is the same one, and in training they differ."""
    sides = [{"adapter": name, "adapter_digest": digest} for name, digest in ("a1", "b2")]
    assert found(*sides) == ["rollout.adapter"]
    assert "rollout.adapter" not in found(*sides, pair="total")
    assert "rollout.adapter" not in found(*sides, about={"training": {}})
    assert found(sides[0], sides[1] | {"adapter_digest": "1"}) == []
    assert found(sides[0], {"adapter": "b"}) == found({"adapter": "a"}, sides[1]) == []
    # One side alone, whose digest the other cannot have
    assert found(sides[0]) == ["rollout.adapter"] and found({}, sides[1]) == ["trainer.adapter"]


def test_requested_engine_settings_count():
    requested = {
        "config": {
            "engine_args": {
                "speculative_config": {"method": "mtp"},
                "hf_overrides": {"rope_theta": 1e6},
            }
        }
    }
    assert found(about=requested) == ["rollout.hf_overrides", "rollout.speculative_config"]
    sampled = {"config": {"sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": 0.0}}}
    assert found(about=sampled) == ["config.sampling.temperature", "config.sampling.top_p"]
    assert found({"logprobs_mode": "raw_logprobs"}, about=sampled)[0] == "rollout.logprobs_mode"
    assert "config.sampling.temperature" not in found(
        {"logprobs_mode": "processed_logprobs"}, about=sampled
    )


def test_experts_are_suspects_only_if_rounding_can_flip_them():
    assert found({"num_experts": 64}) == []
    assert "rollout.num_experts" in found(
        {"num_experts": 64, "dtype": "bfloat16"}, {"dtype": "bfloat16"}
    )


def test_the_order_is_the_one_of_all_commands():
    rollout = {
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "chunked_prefill": True,
        "enforce_eager": False,
    }
    order = [
        cause_rank(setting) for setting in found(rollout, {"head_dtype": "bfloat16"}, pair="total")
    ]
    assert order == sorted(order) and order[0] == cause_rank("equal_weights")
    assert len(set(order)) == len(order)


def test_a_setting_cleared_by_a_test_is_not_a_suspect():
    assert found({"chunked_prefill": True}, cleared={"rollout.chunked_prefill"}) == []


def test_commands_are_quoted():
    about = {
        "rollout": ENGINE | {"kv_cache_dtype": "fp8", "model": "my model; ls"},
        "trainer": TRAINER,
    }
    (first, *_) = suspects(about, "a run")
    for line in first.test:
        assert shlex.split(line)[0] == "mismatch-cli"
    assert "my model; ls" in shlex.split(first.test[0])


def test_every_suspect_is_a_known_cause():
    for cause in CAUSES:
        assert cause.source
    rollout = {
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "chunked_prefill": True,
        "max_num_seqs": 8,
    }
    for suspect in suspects({"rollout": ENGINE | rollout, "trainer": TRAINER}, "run"):
        assert (
            cause_rank(suspect.setting) is not None
            and suspect.why
            and suspect.change
            and suspect.test
        )
        assert json.dumps(suspect.to_json())
