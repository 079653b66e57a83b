"""What the folder of a killed run must look like, and what that of a resumed run must equal."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mismatch_cli.app.cli import run as cli

UNFINISHED = (".*.mismatch-cli.part", ".lock", "distributions")


def phase(command: str, folder: Path, said: str) -> str:
    """What a run was doing when it ended, from its output and its files."""
    if any(folder.rglob(UNFINISHED[0])):
        return "writing a shard" if command == "probe" else "writing a checkpoint or a trace"
    last = (said.splitlines() or [""])[-1]
    if "Next: " in said or last.startswith(f"Wrote {folder}/report.html"):
        return "exit"
    if "Measuring" in said or "Drawing" in said:
        return "report"
    if command == "train":
        if last.startswith(("step", "Accuracy", "Wrote", "Stopp")):
            return "model" if last.startswith("Wrote") else "steps"
        return "start-up" if not last else "loading"
    if last.startswith("Scoring") or "into the trainer" in last:
        return "scoring"
    if (folder / "trace" / "manifest.json").is_file() and last:
        return "sampling"
    return "loading" if last else "start-up"


def half_files(folder: Path) -> list[str]:
    """Incomplete files under a final name."""
    return [f"{path.relative_to(folder)}: {error}" for path, error in _damaged(folder)]


def _damaged(folder: Path) -> Iterator[tuple[Path, str]]:
    checks = {
        "*.parquet": lambda path: pq.read_table(path),
        "*.json": lambda path: json.loads(path.read_text()),
        "*.png": lambda path: _ends(path, b"IEND\xaeB`\x82"),
        "*.html": lambda path: _ends(path, b"</html>\n"),
        "*.safetensors": _read_safetensors,
        "state.pt": lambda path: torch.load(path, map_location="cpu", weights_only=True),
    }
    for pattern, check in checks.items():
        for path in folder.rglob(pattern):
            if not any(part.startswith(".") for part in path.relative_to(folder).parts):
                try:
                    check(path)
                except Exception as error:
                    yield path, repr(error)[:200]
    for model in folder.glob("model"):
        missing = {"config.json", "model.safetensors", "tokenizer.json"} - {
            path.name for path in model.iterdir()
        }
        if missing:
            yield model, f"lacks {sorted(missing)}"


def _ends(path: Path, end: bytes) -> None:
    content = path.read_bytes()
    if not content.rstrip().endswith(end.rstrip()):
        raise ValueError("is cut off")


def _read_safetensors(path: Path) -> None:
    with safe_open(path, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            tensors.get_tensor(name)


def look(folder: Path, scratch: Path, *, draw: bool) -> dict[str, Any]:
    """Exit codes of `report` and `diagnose` on a folder, with or without figures, and what is
    wrong.
    """
    outcome: dict[str, Any] = {"wrong": []}
    for command in ("report", "diagnose"):
        out, err = io.StringIO(), io.StringIO()
        figures = (
            contextlib.nullcontext()
            if draw
            else mock.patch("mismatch_cli.report.figures.plots_for", _none)
        )
        with figures, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli(
                [command, str(folder), "--quiet", "--force", "--output", str(scratch / command)]
            )
        said = " ".join(err.getvalue().split())
        outcome[command] = code
        if (
            code not in (0, 1)
            or "Traceback" in said
            or "bug" in said
            or (code == 1 and err.getvalue().count("\n") != 1)
        ):
            outcome["wrong"].append(f"{command}: {code}: {said[-300:]}")
        if code == 1:
            outcome[f"{command}_said"] = said.replace(str(folder), "RUN")
    return outcome


def _none(_: Any) -> Iterator[Any]:
    return iter(())


def left_over(folder: Path) -> list[str]:
    """Temporary files that a finished run left behind."""
    return sorted(
        {str(path.relative_to(folder)) for pattern in UNFINISHED for path in folder.rglob(pattern)}
    )


def differences(folder: Path, unbroken: Path, without: Container[str] = ()) -> list[str]:
    """Files in which a resumed run differs from the unbroken one, except for times and its name."""
    names, expected = (
        {name for name in files_of(each) if name not in without} for each in (folder, unbroken)
    )
    differing = [f"{name}: only in one of them" for name in sorted(names ^ expected)]
    return differing + [
        name for name in sorted(names & expected) if not _same(folder / name, unbroken / name)
    ]


def files_of(folder: Path) -> set[str]:
    """The files of a result: neither logs nor anything hidden."""
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in files if not name.startswith((".", "log/")) and "/." not in name}


def _same(path: Path, other: Path) -> bool:
    if path.suffix == ".jsonl":
        return [_without_times(json.loads(line)) for line in path.read_text().splitlines()] == [
            _without_times(json.loads(line)) for line in other.read_text().splitlines()
        ]
    if path.suffix == ".json":
        return bool(
            _without_times(json.loads(path.read_text()))
            == _without_times(json.loads(other.read_text()))
        )
    if path.suffix == ".pt":
        return _equal(
            *(torch.load(file, map_location="cpu", weights_only=True) for file in (path, other))
        )
    # A column for each number of metrics.jsonl, times among them
    if path.name == "metrics.parquet":
        return _without_seconds(path) == _without_seconds(other)
    if path.suffix == ".safetensors":  # whose tensors may be in any order
        return _equal(load_file(path), load_file(other))
    if path.suffix == ".html" or path.name == "time.png":  # they name the folder, or show times
        return True
    return path.read_bytes() == other.read_bytes()


def _without_seconds(path: Path) -> dict[str, Any]:
    columns = pq.read_table(path).to_pydict()
    return {name: repr(values) for name, values in columns.items() if "seconds" not in name}


_VOLATILE = {"seconds", "traces", "output", "phases", "folder", "runs"}


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if key not in _VOLATILE}
    return [_without_times(item) for item in value] if isinstance(value, list) else repr(value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
