"""The command lines of the goldens: every reading command on every bundled trace and dump."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mismatch_cli.app.cli import COMMANDS
from mismatch_cli.base import registry
from mismatch_cli.base.places import bundled

TRACES = tuple(sorted(folder.name for folder in bundled("traces").iterdir() if folder.is_dir()))
DUMPS = tuple(sorted(folder.name for folder in bundled("dumps").iterdir() if folder.is_dir()))
WIDTHS = (80, 200)
LIMITS = ("verl", "nemo-rl", "prime-rl")
_PAIRS = (("float32", "bfloat16"), ("bfloat16", "fp8-kv"), ("moe", "moe-replayed"))


@dataclass(frozen=True)
class Line:
    """A command, the width of its terminal, the folder that it makes, if its pages are kept, and a
    command to run before.
    """

    name: str  # of the stored file
    arguments: tuple[str, ...]
    width: int = 80
    makes: str = ""
    codes: tuple[int, ...] = (0,)
    first: tuple[str, ...] = ()


def lines() -> list[Line]:
    return [*_of_traces(), *_of_pairs(), *_of_dumps(), *_of_nothing(), *_of_helps()]


def _screens(name: str, *arguments: str, codes: tuple[int, ...] = (0,)) -> Iterator[Line]:
    """A command at both widths."""
    for width in WIDTHS:
        yield Line(f"{name}.{width}", arguments, width, codes=codes)


def _of_traces() -> Iterator[Line]:
    for trace in TRACES:
        for command in ("report", "clipstats", "diagnose"):
            yield from _screens(f"{trace}/{command}", command, trace)
            yield Line(f"{trace}/{command}.full", (command, trace, "--full"), 200)
            yield Line(f"{trace}/{command}.json", (command, trace, "--json"))
            made = f"made-{command}-{trace}"
            drawn = (command, trace, "--output", made, "--plots", "svg", "--quiet")
            yield Line(f"{trace}/{command}.page", drawn, makes=made)
        yield Line(f"{trace}/as-all", ("report", trace, "--as", "all"), 200)
        for limits in LIMITS:
            gate = ("gate", trace, "--limits", limits)
            yield from _screens(f"{trace}/gate-{limits}", *gate, codes=(0, 3))
        yield Line(
            f"{trace}/gate.json", ("gate", trace, "--limits", "verl", "--json"), codes=(0, 3)
        )
        yield Line(
            f"{trace}/watch", ("watch", trace, "--limits", "verl", "--once", "--json"), codes=(0, 3)
        )


def _of_pairs() -> Iterator[Line]:
    for first, second in _PAIRS:
        name, pair = f"{first}-and-{second}", ("compare", first, second)
        yield from _screens(f"{name}/compare", *pair)
        yield Line(f"{name}/compare.full", (*pair, "--full"), 200)
        yield Line(f"{name}/compare.json", (*pair, "--json"))
        made = f"made-compare-{name}"
        yield Line(
            f"{name}/compare.page",
            (*pair, "--output", made, "--plots", "svg", "--quiet"),
            makes=made,
        )


def _of_dumps() -> Iterator[Line]:
    for dump in DUMPS:
        imported = f"made-{dump}"
        first = ("import", dump, "--output", imported)
        yield from _screens(f"{dump}/import", *first)
        readers = [
            *_screens(f"{dump}/report", "report", imported),
            Line(f"{dump}/report.json", ("report", imported, "--json")),
            Line(f"{dump}/clipstats.json", ("clipstats", imported, "--json")),
            *_screens(f"{dump}/watch", "watch", imported, "--once"),
        ]
        yield from (replace(line, first=first) for line in readers)


def _of_nothing() -> Iterator[Line]:
    yield from _screens("alone/algorithms", "algorithms")
    yield Line("alone/algorithms.json", ("algorithms", "--json"))
    yield from _screens("alone/verdict", "verdict")
    yield from _screens(
        "alone/verdict-trl", "verdict", "trl", "sampling/sampling_logp_difference/mean=0.02"
    )
    yield Line("alone/verdict.json", ("verdict", "k3=0.0015", "--model", "moe", "--json"))
    yield from _screens("alone/verdict-list", "verdict", "--list")
    yield Line("alone/import-schema", ("import", "--schema"))


def _of_helps() -> Iterator[Line]:
    yield from _screens("help/mismatch-cli", "--help")
    for command in registry.names(COMMANDS):
        yield from _screens(f"help/{command}", command, "--help")


def put_bundled_data(line: Line, folder: Path) -> None:
    """Copies of the bundled traces and dumps that a line names, since commands write beside them."""
    for kind, names in (("traces", TRACES), ("dumps", DUMPS)):
        for name in {*names} & {*line.arguments, *line.first}:
            shutil.copytree(bundled(kind) / name, folder / name)
