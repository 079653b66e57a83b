"""MLflow: a file store in the run folder, or MLFLOW_TRACKING_URI if it is set."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mismatch_cli.app.trackers import Log
    from mismatch_cli.app.trackers._tracking import TrackedRun

LOOK = ("env", "MLFLOW_ALLOW_FILE_STORE=true", "mlflow", "ui", "--backend-store-uri", "{folder}")
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
_ID = "mismatch_cli.id"
_AT_ONCE = 1000  # metrics per call


@contextmanager
def tracking(run: TrackedRun) -> Iterator[Log]:
    """A project is an MLflow experiment; a killed run is found again by its tag."""
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        os.environ.setdefault(name, "true")
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or run.folder.absolute().as_uri())
    known = client.get_experiment_by_name(run.project)
    experiment = known.experiment_id if known else client.create_experiment(run.project)
    before = client.search_runs([experiment], f"tags.`{_ID}` = '{run.id}'")
    logged = (
        before[0]
        if before
        else client.create_run(experiment, tags={_ID: run.id}, run_name=run.name)
    ).info.run_id
    if before:
        client.update_run(logged, "RUNNING")
    else:
        client.log_batch(
            logged, params=[Param(key, str(value)) for key, value in run.config.items()]
        )

    def log(step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        found = [
            Metric(_NOT_IN_NAMES.sub("_", name), value, now, step)
            for name, value in metrics.items()
        ]
        for first in range(0, len(found), _AT_ONCE):
            client.log_batch(logged, found[first : first + _AT_ONCE])

    yield log
    client.set_terminated(logged)
