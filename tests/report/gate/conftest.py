"""The bundled traces, measured once."""

from __future__ import annotations

import pytest

from mismatch_cli import dialects
from mismatch_cli.bundled import bundled
from mismatch_cli.studies.limit_checks import Measurement
from mismatch_cli.trace.reader import Trace


@pytest.fixture(scope="session")
def training() -> Measurement:
    """A training run: mismatch, staleness and total."""
    return Measurement([Trace.open(bundled("traces") / "fp8-kv")], dialects.names())


@pytest.fixture(scope="session")
def control() -> Measurement:
    """Everything in float32, at equal weights."""
    return Measurement([Trace.open(bundled("traces") / "float32")], ["slime"])
