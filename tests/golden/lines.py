"""The command lines of the goldens: every reading command on every bundled trace and dump."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mismatch_cli.app.cli import COMMANDS
from mismatch_cli.base import registry
from mismatch_cli.base.places import bundled

TRACES = tuple(sorted(folder.name for folder in bundled("traces").iterdir() if folder.is_dir()))
DUMPS = tuple(sorted(folder.name for folder in bundled("dumps").iterdir() if folder.is_dir()))
_NARROW, _WIDE = 80, 200
_PAIRS = (("float32", "bfloat16"), ("bfloat16", "fp8-kv"), ("moe", "moe-replayed"))
# What is stored under a name, and the line that is typed; X and Y are traces or a dump. A name that
# ends with ":" stands for both widths; pages keep what they make.
_OF_TRACES = """
X/report:         report X
X/report.full     report X --full
X/report.json     report X --json
X/report.page     report X --output made-report-X --plots svg --quiet
X/clipstats:      clipstats X
X/clipstats.full  clipstats X --full
X/clipstats.json  clipstats X --json
X/clipstats.page  clipstats X --output made-clipstats-X --plots svg --quiet
X/diagnose:       diagnose X
X/diagnose.full   diagnose X --full
X/diagnose.json   diagnose X --json
X/diagnose.page   diagnose X --output made-diagnose-X --plots svg --quiet
X/as-all          report X --as all
X/gate-verl:      gate X --limits verl
X/gate-nemo-rl:   gate X --limits nemo-rl
X/gate-prime-rl:  gate X --limits prime-rl
X/gate.json       gate X --limits verl --json
X/watch           watch X --limits verl --once --json
"""
_OF_PAIRS = """
X-and-Y/compare:      compare X Y
X-and-Y/compare.full  compare X Y --full
X-and-Y/compare.json  compare X Y --json
X-and-Y/compare.page  compare X Y --output made-compare-X-and-Y --plots svg --quiet
"""
_OF_DUMPS = """
X/import:         import X --output made-X
X/report:         report made-X
X/report.json     report made-X --json
X/clipstats.json  clipstats made-X --json
X/watch:          watch made-X --once
"""
_OF_NOTHING = """
alone/algorithms:      algorithms
alone/algorithms.json  algorithms --json
alone/verdict:         verdict
alone/verdict-trl:     verdict trl sampling/sampling_logp_difference/mean=0.02
alone/verdict.json     verdict k3=0.0015 --model moe --json
alone/verdict-list:    verdict --list
alone/import-schema    import --schema
help/mismatch-cli:     --help
"""


@dataclass(frozen=True)
class Line:
    """A command, the width of its terminal, the folder that it makes, if its pages are kept, and a
    command to run before.
    """

    name: str  # of the stored file
    arguments: tuple[str, ...]
    width: int
    makes: str = ""
    codes: tuple[int, ...] = (0,)
    first: tuple[str, ...] = ()


def lines() -> list[Line]:
    every: list[Line] = []
    for trace in TRACES:
        every += _lines(_OF_TRACES, trace)
    for pair in _PAIRS:
        every += _lines(_OF_PAIRS, *pair)
    for dump in DUMPS:
        every += _lines(_OF_DUMPS, dump)
    commands = [f"help/{name}: {name} --help" for name in registry.names(COMMANDS)]
    every += _lines("\n".join([_OF_NOTHING, *commands]))
    return every


def _lines(table: str, x: str = "", y: str = "") -> Iterator[Line]:
    for row in filter(None, table.splitlines()):
        name, *words = row.replace("X", x).replace("Y", y).split()
        has_limits = words[0] in ("gate", "watch") and x in TRACES
        codes = (0, 3) if has_limits else (0,)
        first = ("import", x, "--output", f"made-{x}") if f"made-{x}" in words[:2] else ()
        makes = words[words.index("--output") + 1] if name.endswith(".page") else ""
        widths = [_WIDE] if name.endswith((".full", "as-all")) else [_NARROW]
        if name.endswith(":"):
            widths = [_NARROW, _WIDE]
        for width in widths:
            yield Line(name.replace(":", f".{width}"), tuple(words), width, makes, codes, first)


def put_bundled_data(line: Line, folder: Path) -> None:
    """Copies of the bundled traces and dumps that a line names, since commands write beside them."""
    for kind, names in (("traces", TRACES), ("dumps", DUMPS)):
        for name in {*names} & {*line.arguments, *line.first}:
            shutil.copytree(bundled(kind) / name, folder / name)
