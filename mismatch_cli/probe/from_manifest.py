"""What a manifest may set of a command that starts something: `--like`, `--resume`, `bisect`,
`rescore` read it here.

A trace may be somebody else's. Numbers, choices and plain names are taken from its manifest if they
have the type and the range of the setting; a model or a file is taken as data, from this machine or
the hub's cache. Whatever runs code, names a host or adds an adapter is shown instead, for the user
to type.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from textwrap import shorten
from typing import Any, get_args, get_origin

from mismatch_cli.base.errors import MismatchError, UsageError, quoted
from mismatch_cli.base.options import (
    ADAPTER,
    DATA,
    MODEL,
    Setting,
    is_typed_only,
    settings_of,
)
from mismatch_cli.base.places import BUNDLED_MODEL, bundled
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.base.values import toml, toml_line
from mismatch_cli.models.engines import engine_names
from mismatch_cli.models.loading import not_only_data
from mismatch_cli.models.torch_settings import DTYPES
from mismatch_cli.probe.engine_arguments import (
    is_count,
    is_listed,
    is_name_on_server,
    is_number,
    is_word,
    spelled,
)

_NAME = re.compile(r"[\w.:, -]{0,200}")  # of a field, a split, a device: no path and no URL
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def taken_from(
    kind: type, recorded: Mapping[str, Any], typed: Collection[str], source: Path
) -> dict[str, Any]:
    """The settings of this kind in the manifest of `source`, except those that are `typed` on the
    command line.

    Raises a `MismatchError` for a value of another type or range, and a `UsageError` that shows
    what has to be typed.
    """
    taken: dict[str, Any] = {}
    words: list[str] = []
    lines: list[str] = []
    for setting in settings_of(kind):
        value = recorded.get(setting.key)
        is_unset = value is None or value == setting.nothing
        if is_unset or setting.key in typed:
            continue
        if not (_fits(value, setting.type) and _in_range(value, setting.about)):
            raise damaged_setting(source, setting.key, value)
        if not _must_be_typed(setting, value):
            taken[setting.key] = _as_data(setting, value, source)
        elif setting.is_typed:
            words += _words_to_type(setting, value)
        else:
            lines.append(toml_line(setting, value))
    if words or lines:
        raise must_be_typed(source, words, lines)
    return taken


def _must_be_typed(setting: Setting, value: Any) -> bool:
    """Whether only the user may set this value: it starts code, names a host or is an adapter."""
    is_adapter = setting.about.get("path") == ADAPTER and bool(value)
    return is_adapter or is_typed_only(setting, value)


def _as_data(setting: Setting, value: Any, source: Path) -> Any:
    """The value of a manifest as data: a model, a file, a plain name, a number."""
    kind_of_path = setting.about.get("path")
    if kind_of_path == MODEL:
        return model_of(value, source, setting.flag)
    if kind_of_path == DATA:
        check_file(value, source, setting)
    is_free_text = isinstance(value, str) and not kind_of_path and "choices" not in setting.about
    if is_free_text and not _is_name(setting, value):
        raise damaged_setting(source, setting.key, value)
    return value


def must_be_typed(source: Path, words: Sequence[str], lines: Sequence[str] = ()) -> UsageError:
    """The error for settings that a manifest has but must not set: words to type, and lines of a
    file for what has no flag.
    """
    shown: list[str] = []
    ways: list[str] = []
    if words:
        shown.append(quoted(*words))
        ways.append("add these words to your command")
    if lines:
        shown += lines
        ways.append("write this into a file that --config names")
    return UsageError(
        f"{source} was recorded with {'; '.join(shown)}. A manifest starts no code, asks no host "
        f"and loads no adapter: if you trust what it names, {' and '.join(ways)}."
    )


def model_of(name: Any, source: Path, flag: str) -> str:
    """The model that a manifest names, as data: a folder, or a name in the hub's cache, without
    code and pickles.

    The hub is not asked for it. Raises a `UsageError` that says what to type for any other.
    """
    if name == BUNDLED_MODEL:
        return str(bundled("model"))
    if not isinstance(name, str) or "://" in name:
        raise damaged_setting(source, flag, name)
    reason = not_only_data(name)
    if reason:
        # An argument has no flag: its name is in capitals.
        words = [name] if flag.isupper() else [flag, name]
        raise UsageError(
            f"{source} names the model {name}, {reason} Name another, or this one if you trust "
            f"it: {quoted(*words)}"
        )
    if not Path(name).expanduser().is_dir():
        keep_off_the_hub()
    return name


def adapter_of(typed: str | None, recorded: Any, source: Path, key: str) -> str | None:
    """The adapter that was typed; a `UsageError` if only the manifest names one."""
    if not typed and recorded:
        raise must_be_typed(source, (), [f"{key} = {toml(str(recorded))}"])
    return typed


def engine_arguments(arguments: Any, typed: Collection[str], source: Path) -> dict[str, Any]:
    """The engine's arguments in a manifest, without those `typed` on the command line and without a
    server's URL.

    Raises a `UsageError` that shows those which have to be typed.
    """
    taken: dict[str, Any] = {}
    unlisted: dict[str, Any] = {}
    for name, value in dict(arguments or {}).items():
        if name == "url" or name in typed:
            continue
        if is_listed(name, value):
            taken[name] = value
        else:
            unlisted[name] = value
    if unlisted:
        raise must_be_typed(source, spelled(unlisted))
    return taken


def sampler_of(recorded: Any) -> dict[str, Any]:
    """The sampler's settings in a section of a manifest, for `SamplingSettings`, which checks
    their range.
    """
    if not isinstance(recorded, Mapping):
        return {}
    taken: dict[str, Any] = {}
    for field in fields(SamplingSettings):
        value = recorded.get(field.name)
        is_valid = is_count if field.name in ("top_k", "max_tokens") else is_number
        if is_valid(value):
            taken[field.name] = value
    return taken


def engine_of(name: Any, source: Path) -> str:
    """The engine that a manifest names."""
    if name not in engine_names():
        raise damaged_setting(source, "engine", name)
    return str(name)


def dtype_of(section: Mapping[str, Any], source: Path) -> str:
    """The dtype in a section of a manifest; the checkpoint's own if it names none."""
    dtype = section.get("dtype") or "auto"
    if dtype not in DTYPES:
        raise damaged_setting(source, "dtype", dtype)
    return str(dtype)


def attention_of(section: Mapping[str, Any], source: Path) -> str | None:
    """The attention implementation in a section of a manifest: a plain name, not code on the
    hub.
    """
    name = section.get("attn_implementation")
    if name is not None and not is_word(name):
        raise damaged_setting(source, "attn_implementation", name)
    return name


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value read from JSON has the type of a setting; numbers and lists may stand for
    others.
    """
    if get_origin(kind) in (list, tuple):
        item = get_args(kind)[0]
        return isinstance(value, list | tuple) and all(_fits(each, item) for each in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def _in_range(value: Any, limits: Mapping[str, Any]) -> bool:
    """Whether a number is one that the command line would accept; configurations check the rest
    themselves.
    """
    if not isinstance(value, int | float):
        return True
    return bool(limits.get("least", value) <= value <= limits.get("most", value))


def _is_name(setting: Setting, value: str) -> bool:
    if setting.key == "served_model":
        return not value or is_name_on_server(value)
    return _NAME.fullmatch(value) is not None and "://" not in value


def check_file(value: str, source: Path, setting: Setting) -> None:
    """A file or folder of this machine, or the name of a data set, which is read from the hub's
    cache.
    """
    path = Path(value)
    if "://" in value:
        raise must_be_typed(source, _words_to_type(setting, value))
    if (path / "config.json").is_file():
        # What `bisect MODEL` searches is a model here: it is probed first.
        model_of(value, source, setting.flag)
    elif not path.is_absolute() and not path.exists():
        if not _HUB_NAME.fullmatch(value):
            raise damaged_setting(source, setting.key, value)
        keep_off_the_hub()


def keep_off_the_hub() -> None:
    """Let names that a manifest gave be looked up in the hub's cache alone, in this process and
    its children.
    """
    import huggingface_hub.constants

    # Children read the environment; here the library has read it already, into a constant.
    os.environ["HF_HUB_OFFLINE"] = "1"
    huggingface_hub.constants.HF_HUB_OFFLINE = True


def _words_to_type(setting: Setting, value: Any) -> list[str]:
    """The words that type this value; a flag that can be repeated once for each item."""
    words: list[str] = []
    for item in value if isinstance(value, list | tuple) else [value]:
        if not setting.about.get("argument"):
            words.append(setting.as_flag)
        words.append(str(item))
    return words


def damaged_setting(source: Path, name: str, value: Any) -> MismatchError:
    shown = shorten(repr(value), 60, placeholder=" …")
    return MismatchError(
        f"The manifest of {source} is damaged ({name} is {shown}). Type that setting yourself."
    )
