"""The folder that `watch` looks at, and the one for its state: both are checked before anything
reads a trace.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import MismatchError, unreadable
from mismatch_cli.base.registry import did_you_mean
from mismatch_cli.base.text import parse_json
from mismatch_cli.frameworks.importing import KINDS, PICKLES
from mismatch_cli.trace.drafts import UNFINISHED
from mismatch_cli.trace.ownership import LOCK
from mismatch_cli.trace.run_folder import check_apart, claim_folder
from mismatch_cli.trace.training_folder import CONFIG, METRICS, WATCH_FILE

FORMAT, VERSION = "mismatch-cli watch", 2
_SETTING = "prompts_per_step"  # of `train`: other programs write a config.toml too
_LOCKS = ".*lock"


def kind_of(run: Path) -> str:
    """What there is to watch: `train`, `trace` or `dump`; empty if nothing exists yet, or if it
    has just started.
    """
    if (run / METRICS).is_file() or _is_ours(run / CONFIG):
        return "train"
    if any((folder / "manifest.json").is_file() for folder in (run, run / "trace")):
        return "trace"
    if any(run.glob(_LOCKS)):
        # Somebody has begun to write a run or a trace: until its first file is complete, it would
        # be taken for a dump.
        return ""
    for path in [run] if run.is_file() else run.rglob("[!.]*"):
        if path.suffix.lower() in (*KINDS, *PICKLES) and path.is_file():
            return "dump"
    return ""


def _is_ours(config: Path) -> bool:
    return config.is_file() and _SETTING in config.read_text(encoding="utf-8", errors="replace")


def check_there(run: Path) -> None:
    """A `MismatchError` if the run does not exist and cannot appear."""
    if not kind_of(run) and not run.absolute().parent.is_dir():
        raise MismatchError(
            f"{run} does not exist, nor does the folder around it. Check the path of the run to "
            "watch."
        )


def awaited(run: Path) -> str:
    """What a run that has nothing to watch lacks, and the folders whose names are nearest to it."""
    if run.exists():
        return f"{run} has no step, no trace and no dump yet: waiting for the first."
    try:
        siblings = [path.name for path in run.absolute().parent.iterdir() if path.is_dir()]
    except OSError:  # a folder that may be entered but not listed
        siblings = []
    return f"{run} does not exist yet: waiting for it. {did_you_mean(run.name, siblings)}".rstrip()


def watch_folder(folder: Path, run: Path) -> AbstractContextManager[None]:
    """Lock the folder for the state: a new one, or that of the same run; a `MismatchError` for
    any other.
    """
    return claim_folder(folder, lambda: check_watch_folder(folder, run))


def check_watch_folder(folder: Path, run: Path) -> None:
    """A `MismatchError` if the folder holds the state of another run, or something else."""
    check_apart(folder, run)
    names = {path.name for path in folder.glob("*")} - {LOCK}
    if all(map(UNFINISHED.fullmatch, names)):
        return  # empty, or left by a process that was killed before it wrote anything
    watched = state_in(folder).get("run")
    if watched is None:
        raise MismatchError(
            f"{folder} already exists, but not from `watch`. Choose another --output."
        )
    if watched != str(run.absolute()):
        raise MismatchError(f"{folder} belongs to a watch of {watched}. Choose another --output.")


def state_in(folder: Path) -> dict[str, Any]:
    """The state as it was last saved; empty if the folder is new."""
    path = folder / WATCH_FILE
    try:
        state = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise unreadable(path, error, "Remove the folder, or choose another --output.") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        return {}
    if state.get("version") != VERSION:
        raise MismatchError(
            f"{folder} is from another version of mismatch-cli. Remove the folder, or choose "
            "another --output."
        )
    return state
