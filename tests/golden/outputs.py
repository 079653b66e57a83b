"""Runs the command lines as a person would, and returns their outputs in readable form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.golden import readable
from tests.golden.lines import Line, lines, put_bundled_data
from tests.golden.planted import planted_outputs
from tests.paths import ROOT

_PROCESSES = 2


def all_outputs(only: str = "") -> dict[str, str]:
    """Readable outputs by name, of the lines whose name contains `only`."""
    chosen = [line for line in lines() if only in line.name]
    results: dict[str, str] = {}
    with ThreadPoolExecutor(_PROCESSES) as pool:
        for output in pool.map(outputs_of, chosen):
            results |= output
    return results | library_outputs(only) | planted_outputs(only)


def outputs_of(line: Line) -> dict[str, str]:
    """What one line prints on stdout, or the pages and figures that it makes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        put_bundled_data(line, folder)
        if line.first:
            typed(line.first, line, folder)
        # Its exit code is among what is compared
        ran = typed(line.arguments, line, folder)
        if line.makes:
            return pages_of(line, folder)
        return {line.name: printed(line, ran.returncode, ran.stdout, folder)}


def printed(line: Line, code: int, stdout: str, folder: Path) -> str:
    """The readable form of what a line printed, and its exit code."""
    text = readable.masked(stdout, folder)
    if "--json" in line.arguments:
        text = readable.as_text(readable.json_lines(text))
    return f"exit code {code}\n{text}"


def typed(words: Sequence[str], line: Line, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command typed into a terminal of the line's width; it must end as the line says."""
    settings = {"COLUMNS": str(line.width), "TZ": "UTC", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-m", "mismatch_cli", *words],
        cwd=folder,
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode not in line.codes:
        typed_line = f"mismatch-cli {' '.join(words)}"
        raise SystemExit(f"{typed_line} ended with {ran.returncode}:\n{ran.stderr}")
    return ran


def pages_of(line: Line, folder: Path) -> dict[str, str]:
    """The outlines of the page and of every figure in the folder that a line has made."""
    made = folder / line.makes
    page = readable.masked((made / "report.html").read_text(encoding="utf-8"), folder)
    outlines = {line.name: readable.as_text(readable.page_lines(page))}
    for figure in sorted((made / "plots").glob("*.svg")):
        outline = readable.figure_lines(figure.read_text(encoding="utf-8"))
        outlines[f"{line.name.removesuffix('.page')}.{figure.stem}"] = readable.as_text(outline)
    return outlines


def library_outputs(only: str) -> dict[str, str]:
    """The frames of the library on every bundled trace; its JSON must be that of the commands."""
    import mismatch_cli
    from mismatch_cli.base.places import bundled
    from tests.golden.lines import TRACES

    results = {}
    for trace in TRACES:
        name = f"{trace}/library"
        if only in name:
            run = mismatch_cli.open(str(bundled("traces") / trace))
            results[name] = ""
            for title, frame in {"metrics": run.metrics, "tokens": run.tokens.describe()}.items():
                records = json.loads(frame.reset_index().to_json(orient="records"))
                results[name] += readable.as_text(readable.flat(records, title))
    return results
