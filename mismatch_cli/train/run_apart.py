"""`train --devices`: several runs at once, each in a process and on a device of its own, and one
report at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mismatch_cli.app.common import Common
from mismatch_cli.app.typed import words
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.numbers import things
from mismatch_cli.train.train_config import FILE_NAME, TrainConfig

if TYPE_CHECKING:
    from mismatch_cli.processes.members import Outcome

_OF_ALL = (
    "algorithm",
    "seed",
    "seeds",
    "output",
    "resume",
    "devices",
    "quiet",
    "full",
    "json",
    "track_name",
)


def _name(context: typer.Context, folder: Path) -> tuple[str, ...]:
    """The flag for the name that trackers give one run."""
    name = context.params["track_name"]
    return () if name is None else ("--track-name", f"{name}-{folder.name}")


def train_apart(
    context: typer.Context,
    configs: Sequence[TrainConfig],
    folders: Sequence[Path],
    devices: str,
    common: Common,
) -> None:
    """Start or continue each run, as many at once as there are devices; a `MismatchError` if one
    failed.
    """
    from mismatch_cli.processes.members import RAY, Member, run_members, run_on_ray

    typed = (str(context.info_name), *words(context, without=_OF_ALL, resolved=True))
    members = [
        Member(
            folder.absolute(),
            (
                *typed,
                "--algorithm",
                config.algorithm,
                "--seed",
                str(config.sampler.seed),
                *_name(context, folder),
            ),
            Path.cwd(),
            note=FILE_NAME,
            result="model/config.json",
            fresh=(),
        )
        for config, folder in zip(configs, folders, strict=True)
    ]
    todo = [member for member in members if not member.finished]
    common.progress.say(
        f"{things(len(members), 'run')}, {len(members) - len(todo)} of them finished"
    )

    def report(outcome: Outcome) -> None:
        common.progress.say(f"{outcome.member.name}: {outcome.fault or 'done'}")

    if devices == RAY or devices.startswith(f"{RAY}://"):
        outcomes = run_on_ray(todo, devices, report)
    else:
        outcomes = run_members(todo, devices.split(","), report)
    if failed := [outcome.member.name for outcome in outcomes if outcome.fault]:
        raise MismatchError(
            f"{len(failed)} of {len(members)} runs failed for the reasons above: "
            f"{', '.join(failed)}. Type the same command with --resume to retry them from their "
            "last checkpoints."
        )
