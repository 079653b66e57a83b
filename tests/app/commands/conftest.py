"""Shared by the tests of commands: pictures stay blank, except in runs that a module makes once."""

from __future__ import annotations

import pytest

from tests import pictures


@pytest.fixture(autouse=True)
def _blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures.leave_blank(monkeypatch)
