"""Arguments of rollout engines: how `--engine-arg` is typed, and which a manifest may pass on.

An engine takes hundreds of arguments, and some of them name a module to import, a file to read or a
host to ask. A manifest may come from somebody else, so only the arguments listed here are taken
from it.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import starmap
from typing import Any

from mismatch_cli.base import custom_code
from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.text import parse_json

Test = Callable[[Any], bool]
_LARGEST = 2**48
# The name of a dtype, a backend, a method. Without a dot or a slash it cannot name a module to
# import or a file to read.
_WORD = re.compile(r"[A-Za-z0-9_-]{1,40}")
_SERVED = re.compile(r"[\w.:/ -]{1,200}")
_SPECULATION = {"method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}


def is_word(value: Any) -> bool:
    """Whether this is one plain name, which can be neither a path, a URL nor a module inside a
    package.
    """
    return isinstance(value, str) and _WORD.fullmatch(value) is not None


def is_number(value: Any) -> bool:
    """Whether this is a number of a size that a setting can have; booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _LARGEST


def is_count(value: Any) -> bool:
    """Whether this is a whole number of a size that a setting can have; booleans are none."""
    return is_number(value) and isinstance(value, int)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_name_on_server(value: Any) -> bool:
    """Whether this can be a model's name on a server, which compares it with its own list."""
    return isinstance(value, str) and _SERVED.fullmatch(value) is not None and "://" not in value


def _is_configuration(value: Any) -> bool:
    """Whether these are numbers and words as in a model's config.json, without the `auto_map` that
    names code.
    """
    if isinstance(value, Mapping):
        keys_are_plain = all(map(is_word, value)) and "auto_map" not in value
        return keys_are_plain and all(map(_is_configuration, value.values()))
    return value is None or is_number(value) or isinstance(value, bool | float) or is_word(value)


def _is_speculation(value: Any) -> bool:
    """Whether drafts come from the prompt itself; a draft model would be a second model, which has
    to be typed.
    """
    return isinstance(value, Mapping) and value.keys() <= _SPECULATION and _is_configuration(value)


_COUNTS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "max_logprobs",
    "block_size",
    "batch_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "long_prefill_token_threshold",
    "concurrency",
)
_NUMBERS = ("gpu_memory_utilization", "cpu_offload_gb", "timeout", "patience")
_FLAGS = (
    "enforce_eager",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "enable_expert_parallel",
    "disable_cascade_attn",
    "disable_sliding_window",
    "disable_custom_all_reduce",
    "async_scheduling",
    "calculate_kv_scales",
    "enable_sleep_mode",
)
_WORDS = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "attention_backend",
    "attn_implementation",
    "device_map",
)
_LISTED: dict[str, Test] = {
    **dict.fromkeys(_COUNTS, is_count),
    **dict.fromkeys(_NUMBERS, is_number),
    **dict.fromkeys(_FLAGS, _is_flag),
    **dict.fromkeys(_WORDS, is_word),
    "served_model": is_name_on_server,
    "hf_overrides": _is_configuration,
    "speculative_config": _is_speculation,
}


def is_listed(name: str, value: Any) -> bool:
    """Whether a manifest may set this argument to this value; None leaves it to the engine."""
    return name in _LISTED and (value is None or _LISTED[name](value))


def unlisted_arguments(items: Iterable[str]) -> bool:
    """Whether any of these `--engine-arg` has to be typed."""
    return not all(starmap(is_listed, parsed_arguments(items).items()))


def parsed_arguments(items: Iterable[str]) -> dict[str, Any]:
    """The key=value pairs of `--engine-arg`: numbers, true/false, null and JSON as such;
    anything else is text.
    """
    arguments = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise UsageError(
                f"The engine setting {item!r} is not KEY=VALUE, such as max_num_seqs=64."
            )
        name = key.replace("-", "_")
        if name == "trust_remote_code":
            raise UsageError(
                f"The engine setting {item} would apply to one side only. Use {custom_code.FLAG}."
            )
        try:
            arguments[name] = parse_json(value)
        except ValueError:
            arguments[name] = value
    return arguments


def spelled(arguments: Mapping[str, Any]) -> list[str]:
    """The words KEY=VALUE of these arguments, as a command takes them."""
    words = []
    for name, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value)
        words.append(f"{name}={text}")
    return words
