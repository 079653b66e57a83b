"""What a manifest may hold: the types of everything that readers join, compare, compute with or
look into.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from reprlib import repr as brief
from textwrap import shorten
from typing import Any

from mismatch_cli.base.errors import MismatchError

_Check = Callable[[Any], bool]
_KeysByCheck = dict[_Check, str]
_MOST = 2**63  # numbers are below this, in Arrow and numpy
_MOST_SHARDS = 10**5  # their names have five digits
_SHOWN = 60  # characters of a wrong value
# What reports show of a section: if the section is present, so are these keys.
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
    # `isinstance` would take true and false for numbers.
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


# The keys of values that pass each check; `*` is every key of an object, or item of a list.
# Lists and objects come before what they hold: a message then names the outermost wrong value.
_OF_SIDES: _KeysByCheck = {
    _list: "router_layers",
    _text: (
        "model dtype device engine version name transformers torch architecture quantization "
        "kv_cache_dtype head_dtype attn_implementation attention_backend attention_leaves_out "
        "logprobs_mode compilation_mode cudagraph_mode weights_note routes served_model url "
        "adapter adapter_digest adapter_targets"
    ),
    _count: (
        "tensor_parallel_size max_num_seqs max_num_batched_tokens max_model_len batch_size "
        "num_experts experts_per_token positions_rescaled_above adapter_rank parameters "
        "vocab_size threads concurrency router_layers.*"
    ),
    _whole: "seed",
    _number: "head_divisor head_multiplier head_softcap adapter_alpha",
    _flag: "prefix_caching chunked_prefill enforce_eager cascade_attention adapter_merged packed",
}
_MAYBE_NULL: _KeysByCheck = {
    _object: "config.sampling config.engine_args config.trainer config.prompts",
    _text: "prompts.digest prompts.source prompts.template",
    _count: "threads top_logprobs config.top_logprobs shard_rows.*",
    _whole: "config.seed prompts.count",
    _flag: "equal_weights",
}
_NEVER_NULL: _KeysByCheck = {
    _list: "prompts.skipped",
    _object: (
        "rollout trainer recomputed config prompts imported rescored libraries flags training "
        "imported.left_out imported.left_out_first imported.noted prompts.skipped.*"
    ),
    _text: (
        "command algorithm environment cut_short imported.title imported.format imported.holds"
    ),
    _number: "config.sampling.temperature config.sampling.top_p config.sampling.min_p",
    _whole: "config.sampling.top_k config.sampling.max_tokens",
    _count: (
        "imported.file_count imported.rows imported.tokens imported.steps "
        "imported.rows_with_trainer imported.rows_with_newer_trainer "
        "imported.rows_with_unknown_finish imported.rows_without_minibatch "
        "imported.left_out.* imported.noted.*"
    ),
    _shard_count: "shards",
    _shard_rows: "shard_rows",
}


def _by_key(keys_by_check: _KeysByCheck, *sections: str) -> dict[str, _Check]:
    """The check of every key, below each of these sections."""
    checks: dict[str, _Check] = {}
    for section in sections:
        for check, keys in keys_by_check.items():
            checks |= {f"{section}{key}": check for key in keys.split()}
    return checks


OPTIONAL = _by_key(_OF_SIDES, "rollout.", "trainer.", "recomputed.") | _by_key(_MAYBE_NULL, "")
REQUIRED = _by_key(_NEVER_NULL, "")


def check_contents(path: Path, content: dict[str, Any]) -> None:
    """Raise a `MismatchError` if something that readers use or show is missing or has the wrong
    type.
    """
    for key in (*REQUIRED, *OPTIONAL):
        for name, value in _values(content, key.split(".")):
            if not may_hold(key, value):
                wrong = shorten(brief(value), _SHOWN, placeholder=" …")
                raise damaged_manifest(path, name, f"is {wrong}")
    for section, names in NEEDED.items():
        missing = set(names).difference(content.get(section, names))
        if missing:
            raise damaged_manifest(path, f"{section}.{min(missing)}", "is missing")


def may_hold(key: str, value: Any) -> bool:
    """Whether a manifest may hold this value under this key, such as `rollout.version`."""
    if key in OPTIONAL and value is None:
        return True
    check = REQUIRED.get(key) or OPTIONAL.get(key)
    return check is None or check(value)


def _values(content: Any, key: list[str]) -> Iterator[tuple[str, Any]]:
    """Every value under a key, after the key's full name, which has a name for each `*`."""
    if not key:
        yield "", content
        return
    first, *rest = key
    inner: dict[Any, Any] = {}
    if isinstance(content, dict):
        inner = content
    elif isinstance(content, list):
        inner = dict(enumerate(content))
    for name in inner:
        if first in ("*", name):
            for ending, value in _values(inner[name], rest):
                yield f"{name}.{ending}".rstrip("."), value


def damaged_manifest(path: Path, name: str, fault: str) -> MismatchError:
    """The error for a manifest whose value under this name has this fault."""
    return MismatchError(
        f"{path} is damaged ({name} {fault}). Record the trace again, or restore the file."
    )
