"""trackio: its own database on this machine (TRACKIO_DIR), shown by `trackio show`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mismatch_cli.app.trackers import Log
    from mismatch_cli.app.trackers._tracking import TrackedRun

LOOK = ("trackio", "show", "--project", "{project}")


@contextmanager
def tracking(run: TrackedRun) -> Iterator[Log]:
    """trackio identifies a run only by its name, so the name ends with the id; TRACKIO_SPACE_ID
    and the like work.
    """
    import trackio

    logged = trackio.init(
        run.project,
        f"{run.name}-{run.id}",
        config=dict(run.config),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )

    def log(step: int, metrics: Mapping[str, float]) -> None:
        logged.log(dict(metrics), step=step)

    yield log
    logged.finish()
