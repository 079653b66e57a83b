"""Traces that a `Recorder` writes inside a run: the facts that the run states, and the notes of
each rank.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import MismatchError, unreadable
from mismatch_cli.base.text import parse_json
from mismatch_cli.trace.manifest import read_manifest, shard_entries
from mismatch_cli.trace.manifest_types import NEEDED, check_contents
from mismatch_cli.trace.stores import StoreError

RECORD = "record"  # the command in such a manifest
NOTE = "recorder-{:05d}.json"  # a rank's note of what it has written so far
_SHARD = re.compile(r"shard-(\d{5})-\d{6}\.parquet")
SECTIONS = ("rollout", "trainer", "recomputed", "config")
_COUNTS = (
    "rows",
    "tokens",
    "rows_with_trainer",
    "rows_with_newer_trainer",
    "rows_with_unknown_finish",
)


def manifest_sections(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that a run states, in a manifest's form: `sampling` goes into `config`, and missing
    facts are None.

    Raises `MismatchError` for an unknown section, or a value of a type that readers do not expect.
    """
    sides = {name: dict(section) for name, section in facts.items() if name != "sampling"}
    if strange := sorted(sides.keys() - {*SECTIONS}):
        raise MismatchError(
            f"manifest has no section {strange[0]}: it has {', '.join(SECTIONS[:3])} and sampling"
        )
    if sampling := {
        name: value for name, value in dict(facts.get("sampling", {})).items() if value is not None
    }:
        sides["config"] = sides.get("config", {}) | {"sampling": sampling}
    for name, needed in NEEDED.items():
        if name in sides:
            sides[name] = dict.fromkeys(needed) | sides[name]
    found = dict(json.loads(json.dumps(sides, default=_name)))
    check_contents(Path("what the recorder was told"), found)
    return found


def _name(value: Any) -> str:
    """The name of a value that JSON cannot hold: a torch.dtype is `bfloat16`."""
    return str(value).removeprefix("torch.")


def rank_of(shard: Path) -> str:
    """The rank that has written a shard of a recorded trace; empty for any other shard."""
    found = _SHARD.fullmatch(shard.name)
    return found.group(1) if found else ""


def manifest_with_notes(folder: Path) -> dict[str, Any]:
    """The manifest of any trace; for a recorded one, with the notes of its ranks."""
    manifest = read_manifest(folder)
    return (
        {**manifest, **_of_ranks(_notes(folder))} if manifest.get("command") == RECORD else manifest
    )


def _notes(folder: Path) -> list[dict[str, Any]]:
    return [read_note(path) for path in sorted(folder.glob(NOTE.replace("{:05d}", "*")))]


def read_note(path: Path) -> dict[str, Any]:
    """A rank's note; a `MismatchError` for a file that no recorder wrote."""
    try:
        note = parse_json(path.read_text(encoding="utf-8"))
        facts = note["shards"].values()
        counts = [note["rank"], *(shard[name] for shard in facts for name in _COUNTS)]
        counts += [*note["left_out"].values(), *note["noted"].values()]
        if not all(type(count) is int for count in counts) or type(note["closed"]) is not bool:
            raise ValueError("it holds values of the wrong type")
        return dict(note)
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(path, error, "Restore it from a copy.") from error


def _of_ranks(notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The notes in a manifest's form; while a rank records, its shards are not promised."""
    shards = {name: facts for note in notes for name, facts in note["shards"].items()}
    growing = ", ".join(str(note["rank"]) for note in notes if not note["closed"])
    found = {
        "format": RECORD,
        "title": "a recorder in the run",
        "holds": "logp_trainer",
        "file_count": len(notes),
        **{name: sum(facts[name] for facts in shards.values()) for name in _COUNTS},
        **_known_by_all(shards.values(), "rows_without_minibatch"),
        **{name: _added(note[name] for note in notes) for name in ("left_out", "noted")},
        "left_out_first": {
            reason: str(first) for note in notes for reason, first in _first(note).items()
        },
    }
    if growing:
        why = f"it is still being recorded, or the recorder was not closed (rank {growing})"
        return {"imported": found, "cut_short": why}
    return {
        "imported": found,
        **shard_entries({name: facts["rows"] for name, facts in shards.items()}),
    }


def _known_by_all(facts: Iterable[Mapping[str, int]], name: str) -> dict[str, int]:
    """The sum of a count that shards of earlier versions lack; nothing if one lacks it."""
    counts = [shard.get(name) for shard in facts]
    return {} if None in counts else {name: sum(count for count in counts if count is not None)}


def _added(counts: Any) -> dict[str, int]:
    return dict(sum(map(Counter, counts), Counter[str]()))


def _first(note: Mapping[str, Any]) -> dict[str, Any]:
    found = note.get("left_out_first", {})
    return found if isinstance(found, dict) else {}
