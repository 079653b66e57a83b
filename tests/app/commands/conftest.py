"""Shared by the tests of commands: pictures stay blank, except in runs that a module makes once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mismatch_cli.app.cli import run
from tests import pictures


@pytest.fixture(autouse=True)
def _blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures.leave_blank(monkeypatch)


@pytest.fixture
def typed(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Type a command in the present folder: its exit code, stdout and stderr."""

    def answer(*words: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run([*map(str, words)])
        return code, *capfd.readouterr()

    return answer
