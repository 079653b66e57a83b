"""Folders of small files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def write_files(folder: Path, texts: Mapping[str, str]) -> Path:
    """Write texts by their names below a folder."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def texts(folder: Path) -> dict[str, str]:
    return {name: content.decode() for name, content in contents(folder).items()}


def change_json(path: Path, **content: object) -> None:
    """Write other values of a JSON object into its file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | content))
