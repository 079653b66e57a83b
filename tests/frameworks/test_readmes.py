"""Each framework's folder has a README: what was read when, and for which of its files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mismatch_cli import frameworks
from mismatch_cli.base import registry

_ROOT = Path(frameworks.__file__).parent
_SHARED = ("dialects", "importing", "plain", "recording")  # plain is the schema of no framework
_DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
_VERSION = re.compile(r"\b\d+\.\d+\.\d+\b|\b[0-9a-f]{7,40}\b")  # of a wheel, or a commit
_MOST_LINES, _MOST_COLUMNS = 40, 100

FOLDERS = sorted(
    path.parent.name for path in _ROOT.glob("*/__init__.py") if path.parent.name not in _SHARED
)


def files_of(folder: Path) -> list[str]:
    """What somebody read a framework for: its code, without `__init__`, and its data."""
    kinds = [path.name for path in folder.iterdir() if path.suffix in (".py", ".toml")]
    return sorted(name for name in kinds if not name.startswith("_"))


def test_the_folders_are_those_of_the_registries():
    patterns = (frameworks.IMPORTERS, frameworks.RECORDERS, frameworks.DASHBOARDS)
    registered = {name for pattern in patterns for name in registry.names(pattern)}
    assert {name.replace("_", "-") for name in FOLDERS} == registered - {*_SHARED}


@pytest.mark.parametrize("name", FOLDERS)
def test_it_says_what_was_read_when_and_for_what(name):
    text = (_ROOT / name / "README.md").read_text(encoding="utf-8")
    head, renew, rest = text.partition("\n## To renew\n")
    assert _DATE.search(head) and _VERSION.search(head)
    assert renew and "\n## Known differences\n" in rest
    unread = [file for file in files_of(_ROOT / name) if f"`{file}`" not in head]
    assert not unread, f"{name}/README.md does not say what was read for {', '.join(unread)}"


@pytest.mark.parametrize("name", FOLDERS)
def test_it_fits_a_screen(name):
    lines = (_ROOT / name / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= _MOST_LINES
    assert not [line for line in lines if len(line) > _MOST_COLUMNS]


def test_a_commit_or_a_wheel_is_a_version_and_a_year_is_not():
    assert _VERSION.search("the wheel trl 1.16.0") and _VERSION.search("commit 7ea279abf of")
    assert not _VERSION.search("read in August 2026, as before")
