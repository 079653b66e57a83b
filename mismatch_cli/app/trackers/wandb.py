"""Weights & Biases: files to `wandb sync` later, or online if WANDB_MODE or WANDB_API_KEY say
so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mismatch_cli.app.trackers import Log
    from mismatch_cli.app.trackers._tracking import TrackedRun

LOOK = ("wandb", "sync", "{folder}")


@contextmanager
def tracking(run: TrackedRun) -> Iterator[Log]:
    """Offline, every session writes a folder of its own, all under the id of the run."""
    # Or it would send its own errors to wandb, even offline
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    mode: Any = os.environ.get("WANDB_MODE") or (
        "online" if os.environ.get("WANDB_API_KEY") else "offline"
    )
    quiet = wandb.Settings(console="off", disable_git=True, disable_code=True, x_disable_stats=True)
    logged = wandb.init(
        project=run.project,
        name=run.name,
        id=run.id,
        dir=str(run.folder.parent),
        config=dict(run.config),
        mode=mode,
        resume="allow" if mode == "online" else None,
        settings=quiet,
    )

    def log(step: int, metrics: Mapping[str, float]) -> None:
        logged.log(dict(metrics), step=step)

    yield log
    logged.finish()
