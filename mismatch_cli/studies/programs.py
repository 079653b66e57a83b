"""Studies that a program brings: what it keeps in a folder is read by the program itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from mismatch_cli.base import registry
from mismatch_cli.base.errors import MismatchError

_STUDIES = "mismatch_cli.*.studies.NAME"  # where programs keep theirs
_TRAINING = "stored-runs"
_PROGRAM = "train"


def training_study(folders: Sequence[Path]) -> ModuleType:
    """The module that makes a study of training runs with its `study_of(folders)`.

    Raises a `MismatchError` where the program that trains is not part of the installation.
    """
    if _TRAINING not in registry.modules(_STUDIES):
        raise MismatchError(
            f"{folders[0]} is a training run. The program `{_PROGRAM}` shows those, and this "
            "installation comes without it. Install mismatch-cli whole, or name one of the run's "
            "traces: RUN/traces/step-N."
        )
    return registry.load(_STUDIES, _TRAINING, "study")
