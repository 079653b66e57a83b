"""TensorBoard: event files in the run folder, a new one per session."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mismatch_cli.app.trackers import Log
    from mismatch_cli.app.trackers._tracking import TrackedRun

LOOK = ("tensorboard", "--logdir", "{folder}")


@contextmanager
def tracking(run: TrackedRun) -> Iterator[Log]:
    """The settings become the text `config`. TensorBoard has no projects: a run is its folder."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(run.folder / run.name))

    def add(step: int, summary: Summary) -> None:
        writer.add_event(Event(step=step, wall_time=time.time(), summary=summary))
        writer.flush()

    def log(step: int, metrics: Mapping[str, float]) -> None:
        add(
            step,
            Summary(
                value=[Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
            ),
        )

    if not run.resumed:
        # As Markdown
        settings = "".join(
            f"    {key} = {json.dumps(value)}\n" for key, value in run.config.items()
        )
        add(0, text_pb("config", f"project {run.project}\n\n{settings}"))
    yield log
    writer.close()
