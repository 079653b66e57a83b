"""Commands that messages advise can be copied into a shell, whatever the name of the folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.errors import quoted, suggest
from mismatch_cli.base.places import bundled
from tests import pictures
from tests.paths import PACKAGE

NAMES = ("a b", "-rf", "it's;ls", "$HOME", 'x"y')


def test_every_word_arrives_as_it_was_meant():
    for name in NAMES:
        words = shlex.split(suggest("report", Path(name), "--worst", "10"))
        assert words[:2] == ["mismatch-cli", "report"] and words[3:] == ["--worst", "10"]
        assert Path(words[2]) == Path(name) and not words[2].startswith("-")
    assert quoted("--output", Path("-o")) == "--output ./-o"
    assert suggest("rescore", Path("runs/a"), "--trainer-model", "MODEL").endswith(
        "runs/a --trainer-model MODEL"
    )


def test_no_message_puts_a_command_together_by_itself():
    """Values in a command that is shown go through `suggest`, the only function that quotes for
    shells.
    """
    by_hand = re.compile(r"mismatch-cli [a-z]+ [^\"`]*\{[a-z_]*(folder|path|output|trace)")
    lines = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "import shlex" in line or by_hand.search(line)
    ]
    assert lines == ["base/errors.py: import shlex"]


@pytest.mark.parametrize("name", NAMES)
def test_what_commands_advise_can_be_typed(name, tmp_path, monkeypatch, capfd):
    pictures.leave_blank(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert run(["import", str(bundled("dumps")), "-o", f"./{name}"]) == 0
    advised = [line.partition("mismatch-cli ")[2] for line in capfd.readouterr().err.splitlines()]
    advised = [shlex.split(line) for line in advised if line]
    assert [(words[0], Path(words[1])) for words in advised] == [
        (command, Path(name)) for command in ("diagnose", "report", "clipstats")
    ]
    assert run([*advised[1], "-q"]) == 0
    Path(name, "file").touch()
    capfd.readouterr()
    for command in (["report", f"./{name}/file"], ["compare", f"./{name}"]):
        assert run([*command, "-q"]) in (1, 2)
        words = shlex.split(capfd.readouterr().err.rpartition(": mismatch-cli ")[2])
        assert Path(words[1]).parts[0] == name
