"""How many elements a page has outside its explorer: thousands more are felt when it is opened."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run
from tests.pictures import leave_blank

MOST = 4500
COMMANDS = (
    "clipstats",
    "clipstats fp8-kv -a ppo -a dppo-binary-tv",
    "report smollm2",
)


class Elements(HTMLParser):
    """Counts elements outside the explorer."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.count, self._explorer = 0, False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "section":
            self._explorer = dict(attrs).get("id") == "explorer"
        self.count += not self._explorer


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_has_few_elements(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_blank(monkeypatch)
    assert run([*command.split(), "--output", str(tmp_path / "made"), "--quiet"]) == 0
    page = (tmp_path / "made" / "report.html").read_text(encoding="utf-8")
    assert 1000 < Elements(page).count <= MOST
