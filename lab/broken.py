"""What the folder of a killed run must look like, and what that of a resumed run must equal."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Container, Iterator
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
    if not last:
        return "start-up"
    return _phase_of_train(last) if command == "train" else _phase_of_probe(last, folder)


def _phase_of_train(last: str) -> str:
    if last.startswith("Wrote"):
        return "model"
    return "steps" if last.startswith(("step", "Accuracy", "Stopp")) else "loading"


def _phase_of_probe(last: str, folder: Path) -> str:
    if last.startswith("Scoring") or "into the trainer" in last:
        return "scoring"
    return "sampling" if (folder / "trace" / "manifest.json").is_file() else "loading"


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
            is_hidden = "/." in f"/{path.relative_to(folder)}"
            if not is_hidden:
                try:
                    check(path)
                except Exception as error:
                    yield path, repr(error)[:200]
    for model in folder.glob("model"):
        needed = {"config.json", "model.safetensors", "tokenizer.json"}
        missing = needed.difference(os.listdir(model))
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
        flags = ["--quiet", "--force", "--output", str(scratch / command)]
        # Figures cost more than the rest of a report
        with contextlib.ExitStack() as stack:
            if not draw:
                stack.enter_context(mock.patch("mismatch_cli.report.figures.plots_for", _none))
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            code = cli([command, str(folder), *flags])
        said = " ".join(err.getvalue().split())
        outcome[command] = code
        is_one_line = err.getvalue().count("\n") == 1
        is_clean = code == 0 or (code == 1 and is_one_line)
        if not is_clean or "Traceback" in said or "bug" in said:
            outcome["wrong"].append(f"{command}: {code}: {said[-300:]}")
        if code == 1:
            outcome[f"{command}_said"] = said.replace(str(folder), "RUN")
    return outcome


def _none(_: Any) -> Iterator[Any]:
    return iter(())


def left_over(folder: Path) -> list[str]:
    """Temporary files that a finished run left behind."""
    paths: set[Path] = set()
    for pattern in UNFINISHED:
        paths.update(folder.rglob(pattern))
    return sorted(str(path.relative_to(folder)) for path in paths)


def differences(folder: Path, unbroken: Path, without: Container[str] = ()) -> list[str]:
    """Files in which a resumed run differs from the unbroken one, except for times and its name."""
    names, expected = files_of(folder), files_of(unbroken)
    lone, common = [], []
    for name in sorted(names | expected):
        if name in without:
            continue
        if name not in names & expected:
            lone.append(f"{name}: only in one of them")
        elif not _same(folder / name, unbroken / name):
            common.append(name)
    return lone + common


def files_of(folder: Path) -> set[str]:
    """The files of a result: neither logs nor anything hidden."""
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in files if not name.startswith((".", "log/")) and "/." not in name}


def _same(path: Path, other: Path) -> bool:
    # A page names the folder, this figure shows times
    if path.suffix == ".html" or path.name == "time.png":
        return True
    read = _READERS.get(path.suffix, Path.read_bytes)
    # A column for each number of metrics.jsonl, times among them
    if path.name == "metrics.parquet":
        read = _without_seconds
    return _equal(read(path), read(other))


def _read_json(path: Path) -> Any:
    return _without_times(json.loads(path.read_text()))


def _read_json_lines(path: Path) -> Any:
    return [_without_times(json.loads(line)) for line in path.read_text().splitlines()]


def _read_checkpoint(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _without_seconds(path: Path) -> dict[str, Any]:
    columns = pq.read_table(path).to_pydict()
    return {name: repr(values) for name, values in columns.items() if "seconds" not in name}


# Tensors of a safetensors file may be in any order
_READERS: dict[str, Callable[[Path], Any]] = {
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".pt": _read_checkpoint,
    ".safetensors": load_file,
}
_VOLATILE = {"seconds", "traces", "output", "phases", "folder", "runs"}


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if key not in _VOLATILE}
    if isinstance(value, list):
        return list(map(_without_times, value))
    return repr(value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
