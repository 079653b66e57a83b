"""What the reading commands print of the bundled traces and dumps is what they printed before.

`python -m tests.golden` compares every digit, the pages and the figures too, and renews.
"""

from __future__ import annotations

import sys
from itertools import groupby

import pytest

from mismatch_cli.app.cli import run
from tests.golden import outputs, planted
from tests.golden.alike import stored, unlike
from tests.golden.lines import Line, lines, put_bundled_data

_MOST_LINES = 20  # of a difference


def _subject(line: Line) -> str:
    """The trace and the command, whatever its form: one test."""
    return f"{line.name.split('/')[0]}/{line.arguments[0]}"


# Pages, figures and wide terminals have tests of their own
_SCREENS = [line for line in lines() if not line.makes and not line.name.endswith(".200")]
SUBJECTS = {
    subject: list(group) for subject, group in groupby(sorted(_SCREENS, key=_subject), _subject)
}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_is_printed_is_as_stored(subject, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("NO_COLOR", "1")
    # Who runs it is named in the usage
    monkeypatch.setattr(sys.modules["__main__"], "__package__", "mismatch_cli")
    monkeypatch.setattr(sys, "argv", ["__main__.py"])
    differences = []
    for number, line in enumerate(SUBJECTS[subject]):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", str(line.width))
        put_bundled_data(line, folder)
        if line.first:
            run(line.first)
        capfd.readouterr()
        code = run(line.arguments)
        made = outputs.printed(line, code, capfd.readouterr().out, folder)
        for difference in unlike(stored(line.name), made):
            differences.append(f"{line.name}: {difference}")
    assert not differences, "\n".join(differences[:_MOST_LINES])


@pytest.mark.parametrize("name", planted.NAMES)
def test_what_is_said_of_a_planted_fault_is_as_stored(name):
    assert list(unlike(stored(name), planted.what_is_said(name))) == []


def test_numbers_are_alike_but_for_their_last_digits():
    alike = [
        ("a 0.123 of 12", "a 0.124 of 12"),
        ("x = 1.5e-06", "x = 1.6e-06"),
        ("9.99 nats", "10.00  nats"),
        ("4 values, 0123456789ab", "4 values, ba9876543210"),
    ]
    for before, now in alike:
        assert not list(unlike(before, now)), (before, now)
    different = [
        ("a 0.123 of 12", "a 0.123 of 13"),
        ("a 0.123 of 12", "a 0.126 of 12"),
        ("x = 1.5e-06", "x = 1.5e-05"),
        ("one\ntwo", "one"),
        ("clear", "found"),
    ]
    for before, now in different:
        assert list(unlike(before, now)), (before, now)
