"""Traces that a `Recorder` writes inside a run: the facts that the run states, and the notes of
each rank.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from operator import itemgetter
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import MismatchError, unreadable
from mismatch_cli.base.text import parse_json
from mismatch_cli.trace.manifest import read_manifest, shard_entries
from mismatch_cli.trace.manifest_types import NEEDED, OPTIONAL, REQUIRED, check_contents
from mismatch_cli.trace.stores import StoreError

RECORD = "record"  # the command in such a manifest
NOTE = "recorder-{:05d}.json"  # a rank's note of what it has written so far
_SHARD = re.compile(r"shard-(\d{5})-\d{6}\.parquet")
_SIDES = ("rollout", "trainer", "recomputed")
SECTIONS = (*_SIDES, "config")
_NEAR = 0.8  # similarity at which a key counts as misspelt: a run may state keys of its own
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
    content = {name: dict(section) for name, section in facts.items() if name != "sampling"}
    strange = sorted(content.keys() - {*SECTIONS})
    if strange:
        raise MismatchError(
            f"manifest has no section {strange[0]}: it has {', '.join(_SIDES)} and sampling"
        )
    sampling = dict(facts.get("sampling", {}))
    stated = {name: value for name, value in sampling.items() if value is not None}
    if stated:
        content["config"] = content.get("config", {}) | {"sampling": stated}
    for name, needed in NEEDED.items():
        if name in content:
            content[name] = dict.fromkeys(needed) | content[name]
    as_json = dict(json.loads(json.dumps(content, default=_name)))
    check_contents(Path("what the recorder was told"), as_json)
    return as_json


def misspelt_keys(sections: Mapping[str, Any]) -> list[str]:
    """`rollout.engin (engine?)` for each key that readers do not know, but that resembles one that
    the run does not state; other unknown keys are its own.
    """
    stated = {name: sections.get(name, {}) for name in _SIDES}
    stated["config.sampling"] = sections.get("config", {}).get("sampling", {})
    misspelt = []
    for section, facts in stated.items():
        parts = [name.rpartition(".") for name in (*OPTIONAL, *REQUIRED)]
        read_keys = {key for owner, _, key in parts if owner == section}
        missing = sorted(key for key in read_keys if facts.get(key) is None)
        for key in sorted(facts.keys() - read_keys):
            for near in get_close_matches(key, missing, n=1, cutoff=_NEAR):
                misspelt.append(f"{section.removeprefix('config.')}.{key} ({near}?)")
    return misspelt


def _name(value: Any) -> str:
    """The name of a value that JSON cannot hold: a torch.dtype is `bfloat16`."""
    return str(value).removeprefix("torch.")


def rank_of(shard: Path) -> str:
    """The rank that has written a shard of a recorded trace; empty for any other shard."""
    recorded_shard = _SHARD.fullmatch(shard.name)
    return recorded_shard.group(1) if recorded_shard else ""


def manifest_with_notes(folder: Path) -> dict[str, Any]:
    """The manifest of any trace; for a recorded one, with the notes of its ranks."""
    manifest = read_manifest(folder)
    if manifest.get("command") != RECORD:
        return manifest
    notes = list(map(read_note, sorted(folder.glob(NOTE.replace("{:05d}", "*")))))
    return {**manifest, **_manifest_entries(notes)}


def read_note(path: Path) -> dict[str, Any]:
    """A rank's note; a `MismatchError` for a file that no recorder wrote."""
    try:
        note = parse_json(path.read_text(encoding="utf-8"))
        counts = [note["rank"], *note["left_out"].values(), *note["noted"].values()]
        for shard in note["shards"].values():
            counts += [shard[name] for name in _COUNTS]
        if set(map(type, counts)) != {int} or type(note["closed"]) is not bool:
            raise ValueError("it holds values of the wrong type")
        return dict(note)
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(path, error, "Restore it from a copy.") from error


def _manifest_entries(notes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The notes in a manifest's form; while a rank records, its shards are not promised."""
    shards: dict[str, Mapping[str, int]] = {}
    for note in notes:
        shards |= note["shards"]
    counts = list(_COUNTS)
    # Shards of earlier versions lack this count: a sum without them would be too low.
    if None not in [facts.get("rows_without_minibatch") for facts in shards.values()]:
        counts.append("rows_without_minibatch")
    imported = {
        "format": RECORD,
        "title": "a recorder in the run",
        "holds": "logp_trainer",
        "file_count": len(notes),
        **{name: sum(map(itemgetter(name), shards.values())) for name in counts},
        "left_out": _added(note["left_out"] for note in notes),
        "noted": _added(note["noted"] for note in notes),
        "left_out_first": _left_out_first(notes),
    }
    growing = [str(note["rank"]) for note in notes if not note["closed"]]
    if growing:
        ranks = f"rank {', '.join(growing)}"
        why = f"it is still being recorded, or the recorder was not closed ({ranks})"
        return {"imported": imported, "cut_short": why}
    rows = {name: facts["rows"] for name, facts in shards.items()}
    return {"imported": imported, **shard_entries(rows)}


def _left_out_first(notes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Where each reason for leaving a row out was met first; notes of earlier versions lack it."""
    where: dict[str, str] = {}
    for note in notes:
        first = note.get("left_out_first")
        if isinstance(first, dict):
            for reason, row in first.items():
                where.setdefault(reason, str(row))
    return where


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sums of counts by name."""
    return dict(sum(map(Counter, counts), Counter[str]()))
