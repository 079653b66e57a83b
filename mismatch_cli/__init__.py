"""Measure the gap between the rollout engine and the trainer of a language model in
reinforcement learning.
"""

from __future__ import annotations

from mismatch_cli.base.lazy import lazy

TYPE_CHECKING = False  # instead of importing typing for it
if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from mismatch_cli.base.errors import MismatchError, UsageError
    from mismatch_cli.frameworks.recording.recorder import Recorder
    from mismatch_cli.library.opened_run import Run
    from mismatch_cli.rules.trust_regions import Decision

__all__ = ["Decision", "MismatchError", "Recorder", "Run", "UsageError", "__version__", "open"]
__version__ = "0.1.0"

# Version 3 of 12 June 2026, also that of ICML 2026 (PMLR 306). Earlier versions do not number
# equations 8 and 23; in them, equations 9, 10 and 11 are 8, 9 and 10, equation 12 is 11 and 12, and
# appendices A to F are B to G.
DPPO = "DPPO, arXiv 2602.04879v3"

_MODULES = {
    "Decision": "rules.trust_regions",
    "MismatchError": "base.errors",
    "Recorder": "frameworks.recording.recorder",
    "Run": "library.opened_run",
    "UsageError": "base.errors",
}


def open(
    run: str | PathLike[str] | Sequence[str | PathLike[str]] = (),
    *,
    workers: int | str = 1,
    cache: str | PathLike[str] | None = None,
    skip_broken: bool = False,
) -> Run:
    """Open a recorded run by its folder, or pool the runs of several folders; by default the
    bundled one.

    `workers` processes read it, or a cluster (`"ray"`); a script that uses several needs an `if
    __name__ == "__main__"` guard. `cache` is a folder for partial results; `skip_broken` leaves out
    shards that cannot be read. An invalid folder raises a `MismatchError`, a trace that lacks a
    part warns.
    """
    from pathlib import Path

    from mismatch_cli.library.opened_run import Run
    from mismatch_cli.processes.workers import Workers

    read_by = Workers(workers, None if cache is None else Path(cache), skip_broken)
    if isinstance(run, str) or hasattr(run, "__fspath__"):
        return Run([run], read_by)
    return Run(run, read_by)


# Importing a name only when it is used, a program pays only for what it uses.
# Type checkers must not see this function: they would accept any name.
if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, _MODULES)
