"""Where the runs of a `train` go: a folder for each, held for as long as any of them is trained."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.recording.folder import check_free, check_no_links, claimed, training_folder
from mismatch_cli.recording.ours import LOCK, LOG, REPORT
from mismatch_cli.rl.config import FILE_NAME, TrainConfig
from mismatch_cli.trace.files import UNFINISHED

_LEFT_BY_A_FAILED_START = {LOG, LOCK}


@contextmanager
def held_folders(configs: Sequence[TrainConfig], output: Path, resume: bool) -> Iterator[list[Path]]:
    """Hold the folder of every run, and of all of them; a `MismatchError` where one may not be written."""
    folders = run_folders(configs, output)
    with ExitStack() as held:
        if len(configs) > 1:
            held.enter_context(training_folder(output))
        for config, folder in zip(configs, folders, strict=True):
            held.enter_context(claimed(folder, partial(_check, folder, config, resume)))
        yield folders


def run_folders(configs: Sequence[TrainConfig], output: Path) -> list[Path]:
    """One run has the whole folder, of several each has its own; a `UsageError` where two have the same name."""
    if len(configs) == 1:
        return [output]
    by_name: dict[str, TrainConfig] = {}
    for config in configs:
        other = by_name.setdefault(_run_name(config), config)
        if other is not config:
            raise UsageError(
                f"-a {other.algorithm} and -a {config.algorithm} would both be the run {_run_name(config)}. "
                "Leave one out, or train it into another --output."
            )
    return [output / name for name in by_name]


def _run_name(config: TrainConfig) -> str:
    return f"{Path(config.algorithm).name.replace(':', '-').replace(',', '-')}-seed-{config.seed}"


def _check(run_folder: Path, config: TrainConfig, resume: bool) -> None:
    """Never write over anything; a resumed run must be the same run."""
    saved = run_folder / FILE_NAME
    if os.path.lexists(run_folder) and not run_folder.is_dir():
        raise MismatchError(f"{run_folder} is a file. Choose another --output.")
    found = {path.name for path in run_folder.iterdir()} if run_folder.exists() else set()
    in_it = {name for name in found if not UNFINISHED.fullmatch(name)}
    if in_it - _LEFT_BY_A_FAILED_START and not saved.is_file():
        what = "holds no training run to resume" if resume else "already exists, and holds no training run"
        raise MismatchError(f"{run_folder} {what}. Choose another --output.")
    same = saved.is_file() and saved.read_bytes() == config.to_toml().encode()
    if not resume and in_it - _LEFT_BY_A_FAILED_START:
        how = "Go on with --resume, or choose" if same else "Its settings are others. Choose"
        raise MismatchError(f"{run_folder} already exists. {how} another --output.")
    if resume and saved.is_file() and not same:
        raise UsageError(f"{saved} has other settings. Resume with the flags of that run, or choose another --output.")
    check_no_links(run_folder)
    check_free(run_folder, *REPORT, LOG, LOCK)
