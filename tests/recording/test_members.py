"""Runs that one command makes in processes of their own."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from mismatch_cli.recording.members import Member, run_members


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
