"""What the tests of commands share: pictures stay blank, but for those of the runs that a module makes once."""

from __future__ import annotations

import pytest

from tests import pictures


@pytest.fixture(autouse=True)
def _blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures.leave_blank(monkeypatch)
