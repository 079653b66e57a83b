"""`--open` shows the written page in the reader's browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run

SHORT = ("report", "fp8-kv", "--no-plots", "--open")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses given to the browser."""
    addresses: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: addresses.append(address) or True)
    return addresses


def test_the_page_is_opened_by_its_file_address(tmp_path: Path, opened: list[str]) -> None:
    folder = tmp_path / "a #1"
    assert run([*SHORT, "--quiet", "-o", str(folder)]) == 0
    assert opened == [(folder / "report.html").as_uri()]
    assert opened[0].startswith("file:///") and opened[0].endswith("a%20%231/report.html")


def test_a_relative_folder_and_json_open_the_page_too(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([*SHORT, "--json", "--quiet", "-o", "here"]) == 0
    assert opened == [(tmp_path / "here" / "report.html").as_uri()]


def test_a_machine_without_a_browser_says_where_the_page_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda _address: False)
    assert run([*SHORT, "-o", str(tmp_path / "here")]) == 0
    *_, last = capfd.readouterr().err.splitlines()
    assert last == f"No browser can be opened here. The page: {tmp_path / 'here' / 'report.html'}"
