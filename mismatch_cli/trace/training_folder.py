"""The folder of a training run: its files, and which folders are such runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import unreadable
from mismatch_cli.base.text import parse_toml

METRICS, CONFIG = "metrics.jsonl", "config.toml"
WATCH_FILE = "watch.json"
AS = "as"  # the group of a record whose names are a framework's own


def training_runs(folder: Path) -> list[Path]:
    """The folder of a training run, or the folders of several in it; a folder of `watch`, which has
    metrics too, is left out.
    """
    if (folder / METRICS).is_file():
        return [folder]
    inner = (file.parent for file in folder.glob(f"*/{METRICS}"))
    return sorted(run for run in inner if not (run / WATCH_FILE).is_file())


def read_config(path: Path) -> dict[str, Any]:
    """The settings; a run without the file is still read, under the name of its folder."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise unreadable(
            path, error, "Restore it from a copy of the run.", "cannot be read ({})"
        ) from error
