"""What kind of model and precision a trace is of, as far as its manifest tells: whose numbers it can be held beside."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mismatch_cli.verdict.reference import Family

_EXPERTS = re.compile(
    "moe|mixtral|gptoss|deepseekv[2-9]|qwen3next|llama4|dbrx|minimax|longcat|grok|arctic|kimi|step3", re.IGNORECASE
)
_EITHER = re.compile("nemotronh|jamba", re.IGNORECASE)  # architectures that exist with experts and without
_PRECISIONS = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
_COARSEST_FIRST = ("fp4", "fp8", "int8", "bf16", "fp16", "fp32")
_SIDES = ("rollout", "trainer", "recomputed")
_DTYPES = ("dtype", "kv_cache_dtype", "quantization")


def family(about: Mapping[str, Any]) -> Family:
    """`moe` or `dense` from the number of experts or the architecture's name; empty where nothing is known."""
    sides = list(_sides(about))
    experts = [side["num_experts"] for side in sides if isinstance(side.get("num_experts"), int)]
    if experts:
        return "moe" if max(experts) > 1 else "dense"
    names = [str(side["architecture"]) for side in sides if side.get("architecture")]
    if any(_EXPERTS.search(name) for name in names):
        return "moe"
    return "dense" if names and not any(_EITHER.search(name) for name in names) else ""


def precision(about: Mapping[str, Any]) -> str:
    """The coarsest precision in play on either side: of weights, KV cache or quantisation; empty if unknown."""
    named = [str(side[key]).lower() for side in _sides(about) for key in _DTYPES if side.get(key)]
    short = [_PRECISIONS.get(name, name) for name in named]
    return next((one for one in _COARSEST_FIRST if any(one in name for name in short)), "")


def _sides(about: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (about[name] for name in _SIDES if isinstance(about.get(name), Mapping))
