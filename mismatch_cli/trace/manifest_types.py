"""What a manifest may hold: the types of everything that readers join, compare, compute with or
look into.
"""

from collections.abc import Iterator
from pathlib import Path
from reprlib import repr as brief
from textwrap import shorten
from typing import Any

from mismatch_cli.base.errors import MismatchError

_MOST = 2**63  # numbers are below this, in Arrow and numpy
_MOST_SHARDS = 10**5  # their names have five digits
_SHOWN = 60  # characters of a wrong value
# What reports show of a section, if it is present.
_SIDE = ("model", "dtype", "device")
NEEDED = {
    "rollout": (*_SIDE, "engine", "version", "kv_cache_dtype"),
    **dict.fromkeys(
        ("trainer", "recomputed"), (*_SIDE, "transformers", "head_dtype", "attn_implementation")
    ),
    "prompts": ("count", "source", "template"),
    "imported": ("title", "file_count", "left_out", "left_out_first", "noted"),
}


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _whole(value: Any) -> bool:
    return type(value) is int and -_MOST <= value < _MOST


def _count(value: Any) -> bool:
    return _whole(value) and value >= 0


def _shard_count(value: Any) -> bool:
    return _count(value) and value <= _MOST_SHARDS


def _number(value: Any) -> bool:
    return type(value) in (int, float) and -_MOST <= value < _MOST  # false for NaN


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _shard_rows(value: Any) -> bool:
    return _object(value) and len(value) <= _MOST_SHARDS


def _list(value: Any) -> bool:
    return isinstance(value, list)


# By the path of a key; `*` stands for every key of an object, or item of a list.
_OF_SIDES = {
    _text: (
        "model dtype device engine version name transformers torch architecture quantization "
        "kv_cache_dtype head_dtype attn_implementation attention_backend attention_leaves_out "
        "logprobs_mode compilation_mode cudagraph_mode weights_note routes served_model url "
        "adapter adapter_digest adapter_targets"
    ),
    _count: (
        "tensor_parallel_size max_num_seqs max_num_batched_tokens max_model_len batch_size "
        "num_experts experts_per_token positions_rescaled_above adapter_rank parameters "
        "vocab_size threads concurrency"
    ),
    _whole: "seed",
    _number: "head_divisor head_multiplier head_softcap adapter_alpha",
    _flag: "prefix_caching chunked_prefill enforce_eager cascade_attention adapter_merged packed",
    _list: "router_layers",
}
OPTIONAL = {
    **{
        f"{side}.{name}": check
        for side in ("rollout", "trainer", "recomputed")
        for check, names in _OF_SIDES.items()
        for name in names.split()
    },
    **dict.fromkeys(
        ("rollout.router_layers.*", "trainer.router_layers.*", "recomputed.router_layers.*"), _count
    ),
    **dict.fromkeys(("threads", "top_logprobs", "config.top_logprobs"), _count),
    **dict.fromkeys(("config.seed", "prompts.count"), _whole),
    **dict.fromkeys(
        ("config.sampling", "config.engine_args", "config.trainer", "config.prompts"), _object
    ),
    **dict.fromkeys(("prompts.digest", "prompts.source", "prompts.template"), _text),
    "equal_weights": _flag,
    "shard_rows.*": _count,
}
REQUIRED = {
    **dict.fromkeys(
        ("rollout", "trainer", "recomputed", "config", "prompts", "imported", "rescored"), _object
    ),
    **dict.fromkeys(("libraries", "flags", "training"), _object),
    **dict.fromkeys(("command", "algorithm", "environment", "cut_short"), _text),
    **dict.fromkeys(
        (f"config.sampling.{name}" for name in ("temperature", "top_p", "min_p")), _number
    ),
    **dict.fromkeys((f"config.sampling.{name}" for name in ("top_k", "max_tokens")), _whole),
    **dict.fromkeys(
        (f"imported.{name}" for name in ("left_out", "left_out_first", "noted")), _object
    ),
    **dict.fromkeys((f"imported.{name}" for name in ("title", "format", "holds")), _text),
    **dict.fromkeys(
        (f"imported.{name}" for name in ("file_count", "rows", "tokens", "steps")), _count
    ),
    **dict.fromkeys(
        (f"imported.rows_with_{name}" for name in ("trainer", "newer_trainer", "unknown_finish")),
        _count,
    ),
    **dict.fromkeys(
        ("imported.rows_without_minibatch", "imported.left_out.*", "imported.noted.*"), _count
    ),
    "prompts.skipped": _list,
    "prompts.skipped.*": _object,
    "shards": _shard_count,
    "shard_rows": _shard_rows,
}


def check_contents(path: Path, content: dict[str, Any]) -> None:
    """Raise a `MismatchError` if something that readers use or show is missing or has the wrong
    type.
    """
    for checks, nullable in ((REQUIRED, False), (OPTIONAL, True)):
        for key, check in checks.items():
            for name, value in _places(content, key.split(".")):
                if not (check(value) or (nullable and value is None)):
                    raise damaged_manifest(
                        path, name, f"is {shorten(brief(value), _SHOWN, placeholder=' …')}"
                    )
    for section, names in NEEDED.items():
        if section in content and (missing := set(names) - set(content[section])):
            raise damaged_manifest(path, f"{section}.{min(missing)}", "is missing")


def may_hold(key: str, value: Any) -> bool:
    """Whether a manifest may hold this value under this key, such as `rollout.version`."""
    check = REQUIRED.get(key) or OPTIONAL.get(key)
    return check is None or check(value) or (key in OPTIONAL and value is None)


def _places(content: Any, key: list[str]) -> Iterator[tuple[str, Any]]:
    """The places of a key that exist, each with its value."""
    if not key:
        yield "", content
        return
    inner = (
        content
        if isinstance(content, dict)
        else dict(enumerate(content))
        if isinstance(content, list)
        else {}
    )
    for name in inner if key[0] == "*" else inner.keys() & {key[0]}:
        for rest, value in _places(inner[name], key[1:]):
            yield f"{name}.{rest}".rstrip("."), value


def damaged_manifest(path: Path, name: str, fault: str) -> MismatchError:
    """The error for a manifest whose value under this name has this fault."""
    return MismatchError(
        f"{path} is damaged ({name} {fault}). Record the trace again, or restore the file."
    )
