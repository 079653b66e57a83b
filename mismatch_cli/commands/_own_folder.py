"""Where a command writes its report: its own earlier one is renewed, nothing else is ever replaced unasked."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from mismatch_cli.errors import MismatchError


def own_folder(folder: Path, report_format: str, force: bool) -> Path:
    """Make the folder, or take it where it is empty or its summary.json has this format; else a `MismatchError`.

    That it can be written is tried now, and not found out after an hour of work.
    """
    if folder.exists() and not folder.is_dir():
        raise MismatchError(f"{folder} is a file. Choose another --output.")
    if folder.exists() and any(folder.iterdir()) and not force and not _is_ours(folder, report_format):
        raise MismatchError(f"{folder} already exists. Replace its report with --force, or choose another --output.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise MismatchError(f"{folder} cannot be written ({error.strerror}). Choose another --output.") from error
    return folder


def _is_ours(folder: Path, report_format: str) -> bool:
    try:
        return bool(json.loads((folder / "summary.json").read_text(encoding="utf-8")).get("format") == report_format)
    except (OSError, ValueError, AttributeError):
        return False
