"""Every key of the files that readers believe, with every hostile value: in order, not at
random.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq

from mismatch_cli import Recorder
from mismatch_cli.base.places import bundled, bundled_names
from mismatch_cli.base.text import parsed_toml
from mismatch_cli.trace.manifest import recorded
from tests.frameworks.importing import layouts
from tests.fuzz import world
from tests.fuzz.properties import judge
from tests.fuzz.strategies import PAYLOAD

SECONDS = 10  # per command, on a trace of a few responses
ROWS = 4
Path_ = tuple[str | int, ...]
_HERE = "the value of this case"
ABSENT = ""  # the key is not there
VALUES = {  # as JSON
    "absent": ABSENT,
    **{
        text: text
        for text in (
            "null",
            "true",
            "0",
            "1",
            "-3",
            "0.5",
            "NaN",
            "Infinity",
            "[]",
            "{}",
            '""',
            '"x"',
            '"7"',
        )
    },
    "64 bits": str(2**64),
    "400 digits": "9" * 400,
    "5,000 digits": "9" * 5000,
    "1 MB of text": json.dumps("z" * 10**6),
    "control": json.dumps("\x1b[31m\u202egnp.exe\x00\r\n"),
    "markup": json.dumps(PAYLOAD + "[/][link=file:///x]$\\frac{"),
    "half a character": '"\\ud800"',
    "list": '[[1], {"a": null}, "x"]',
    "object": '{"model": {"dtype": [1]}, "": null, "\\u202e": "x"}',
    **{f"{levels} brackets": "[" * levels + "]" * levels for levels in (60, 900, 5000)},
}
READERS = (
    ["report", "run", "--output", "new"],
    ["clipstats", "run", "--output", "new"],
    ["diagnose", "run", "--output", "new"],
    ["compare", "run", "other", "--output", "new"],
    ["gate", "run", "--limits", "limits.toml"],
    ["report", "run", "--as", "all", "--json"],
    ["compare", "other", "run", "--json"],
    ["report", "run", "--output", "new", "--export", "csv"],
    ["watch", "run", "--once", "--every", "0.1", "--no-plots", "--output", "new"],
    ["report", "run", "other"],
)
OF_TRAINING = (
    ["report", "run", "--output", "new"],
    ["report", "run", "other", "--output", "new"],
    ["report", "other", "run", "--json"],
    ["watch", "run", "--once", "--every", "0.1", "--no-plots", "--output", "new"],
)
OF_WATCHED = (
    ["watch", "other", "--once", "--every", "0.1", "--no-plots", "--output", "run"],
    ["report", "run", "--output", "new"],
)
# The files of each kind of run that are changed, and the commands that read them.
DOCUMENTS = {
    **dict.fromkeys((*bundled_names(), "imported"), (("manifest.json",), READERS)),
    "recorded": (("manifest.json", "recorder-00000.json"), READERS),
    "training": (("metrics.jsonl", "config.toml"), OF_TRAINING),
    "watched": (("watch.json", "metrics.jsonl"), OF_WATCHED),
}


@dataclass(frozen=True)
class Case:
    """A value in the place of another, in a file of a kind of run, and the command that reads
    it.
    """

    kind: str
    file: str
    path: Path_
    value: str
    command: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.kind}/{self.file}: {'.'.join(map(str, self.path))} = {self.value}: "
            f"{' '.join(self.command)}"
        )

    def lay(self, run: Path) -> None:
        """Change the run."""
        document = run / self.file
        *before, text = _parts(document)
        document.write_text(
            "".join(before) + _changed(text, self.path, VALUES[self.value], document.suffix)
        )


def cases(commands: int = 1, more: dict[str, Path] | None = None) -> Iterator[Case]:
    """Each place once, in the first kind that has it, with every value, read by so many of the
    commands in turn.

    `more` are further traces, by name.
    """
    seen: set[tuple[str, Path_]] = set()
    for kind, folder in {**folders(), **(more or {})}.items():
        files, readers = DOCUMENTS.get(kind, (("manifest.json",), READERS))
        turn = cycle(map(tuple, readers))
        for file in files:
            for path in _paths(_content(_parts(folder / file)[-1], Path(file).suffix)):
                if (file, path) not in seen:
                    seen.add((file, path))
                    for value in VALUES:
                        yield from (
                            Case(kind, file, path, value, next(turn)) for _ in range(commands)
                        )


def _parts(document: Path) -> list[str]:
    """The lines of JSON lines, of which the last is changed; another file as a whole."""
    text = document.read_text(encoding="utf-8")
    return text.splitlines(keepends=True) if document.suffix == ".jsonl" else [text]


def _content(text: str, suffix: str) -> Any:
    return parsed_toml(text) if suffix == ".toml" else json.loads(text)


def _paths(content: Any, above: Path_ = ()) -> Iterator[Path_]:
    """Every place in a JSON value, of a list only the first one."""
    first = dict(enumerate(content[:1])) if isinstance(content, list) else {}
    for key, value in (content if isinstance(content, dict) else first).items():
        yield (*above, key)
        yield from _paths(value, (*above, key))


def _changed(text: str, path: Path_, value: str, suffix: str) -> str:
    """The text with another value at this place."""
    if suffix == ".toml":
        lines = (line for line in text.splitlines(keepends=True) if line.split(" = ")[0] != path[0])
        return "".join(lines) + (f"{path[0]} = {value}\n" if value != ABSENT else "")
    content = json.loads(text)
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = _HERE
    if value == ABSENT:
        del place[path[-1]]
    return json.dumps(content).replace(json.dumps(_HERE), value) + "\n"


@cache
def folders() -> dict[str, Path]:
    """A run of each kind, with a few responses."""
    root = Path(world._made.name) / "kinds"
    made = {name: shortened(bundled("traces") / name, root / name) for name in bundled_names()}
    rows = layouts.real_rows(ROWS)
    layouts.write_lines(root / "dump.jsonl", map(layouts.plain_record, rows))
    layouts.imported(root / "dump.jsonl", into=root / "imported")
    _record(rows, root / "recorded")
    shutil.copytree(world.template() / "training", root / "training")
    with _laid(root / "absent", root / "float32") as folder:
        world.call(folder, *OF_WATCHED[0])
        shutil.copytree(folder / "run", root / "watched")
    return made | {name: root / name for name in ("imported", "recorded", "training", "watched")}


def shortened(source: Path, folder: Path) -> Path:
    """A trace of the first responses of another."""
    folder.mkdir(parents=True)
    shard = next(source.glob("shard-*.parquet"))
    pq.write_table(pq.read_table(shard).slice(0, ROWS), folder / "shard-00000.parquet")
    pq.write_table(pq.read_table(source / "vocab.parquet").slice(0, 300), folder / "vocab.parquet")
    manifest = json.loads((source / "manifest.json").read_text(encoding="utf-8"))
    (folder / "manifest.json").write_text(
        json.dumps(manifest | recorded({"shard-00000.parquet": ROWS}))
    )
    return folder


def _record(rows: list[layouts.Row], folder: Path) -> None:
    manifest = json.loads(
        (bundled("traces") / "fp8-kv" / "manifest.json").read_text(encoding="utf-8")
    )
    facts = {name: manifest[name] for name in ("rollout", "trainer")} | {
        "sampling": {"temperature": 1.0}
    }
    recorder = Recorder(folder, manifest=facts)
    for row in rows:
        recorder.add(**{name: value for name, value in row.items() if name != "route_flips"})
    recorder.close()
    shard = next(folder.glob("shard-*.parquet"))
    assert pq.read_metadata(shard).num_rows == ROWS


@contextlib.contextmanager
def _laid(run: Path, other: Path) -> Iterator[Path]:
    """A working folder with copies of two runs, limits, and a file to keep."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        folder = Path(temporary) / "a" / "b" / "c"
        (folder / "existing").mkdir(parents=True)
        (folder / "existing" / "precious.txt").write_text("keep me")
        (folder / "limits.toml").write_text(world.LIMITS)
        for source, name in ((run, "run"), (other, "other")):
            if source.exists():
                shutil.copytree(source, folder / name)
        # It names what it watched by its full path
        if (state := folder / "run" / "watch.json").is_file():
            content = json.loads(state.read_text(encoding="utf-8"))
            state.write_text(json.dumps(content | {"run": str(folder / "other")}))
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)


def try_case(case: Case, more: dict[str, Path] | None = None) -> str:
    """The properties of every command line, within ten seconds."""
    runs = folders() | (more or {})
    other = runs["float32" if case.kind == "watched" else case.kind]
    with _laid(runs[case.kind], other) as folder, mock.patch.object(world, "SECONDS", SECONDS):
        case.lay(folder / "run")
        outcome = world.call(folder, *case.command)
        # It is continued
        return judge(replace(outcome, before={}) if case.kind == "watched" else outcome, folder)
