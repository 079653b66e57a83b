"""Shared by tests that record and look at what was recorded alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def no_report() -> Iterator[None]:
    """A report would take longer than the probes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mismatch_cli.app.common.Common.study_mismatch", lambda *_, **__: None)
        yield
