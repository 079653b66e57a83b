"""Runs that one command makes in processes of their own."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from mismatch_cli.processes.members import Member, run_members
from mismatch_cli.trace.drafts import NEW, RUN


@dataclass(frozen=True)
class Program(Member):
    """A member that is some Python code."""

    code: str = ""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self.code]


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("", ""),
        ("raise SystemExit(7)", "it ended with 7"),
        ("import sys; sys.exit('first\\nmismatch-cli: no such model\\n')", "no such model"),
    ],
)
def test_a_failure_is_its_last_words_or_its_code(code, fault, tmp_path):
    member = Program(tmp_path / "run", (), tmp_path, code=code)
    told: list[str] = []
    (outcome,) = run_members([member], [], lambda outcome: told.append(outcome.fault))
    assert outcome.fault == fault and told == [fault]


@pytest.mark.parametrize(
    ("place", "replaces", "how"),
    [
        (None, False, "--force"),
        (".", False, "--resume"),
        (".", True, "--force"),
        (f"{RUN}/{NEW}", False, "--resume"),
        (f"{RUN}/{NEW}", True, "--resume"),
    ],
)
def test_a_run_is_resumed_if_it_has_begun_in_its_folder_or_in_a_draft(
    tmp_path, place, replaces, how
):
    """An older run in the folder is replaced if that was asked for, not resumed."""
    folder = tmp_path / "run"
    member = Member(folder, ("probe",), tmp_path, replaces=replaces)
    if place is not None:
        note = folder / place / "trace" / "manifest.json"
        note.parent.mkdir(parents=True)
        note.touch()
    assert member.command[-5:] == ["probe", "--output", str(folder), "--quiet", how]
