"""`guide`: every page opens, on a terminal without Markdown's marks and without a link that
leads nowhere.
"""

from __future__ import annotations

import re
import sys

import pytest

from mismatch_cli.cli import run
from mismatch_cli.commands.guide import for_reading
from mismatch_cli.places import guide_pages
from tests.docs.pages import DOCS, ROOT
from tests.terminal import Terminal


def test_without_a_name_it_lists_every_page_with_its_title(capsys):
    assert run(["guide"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in lines if "  " in line)
    assert listed.keys() == guide_pages().keys() and lines[0].startswith("README ")
    assert listed["normal"] == "Is my number normal?" and all(listed.values())


NAMES = {
    "gate": "gate.md",
    "gate.md": "gate.md",
    "docs/gate.md": "gate.md",
    "json/gate": "json/gate.md",
}
NAMES |= {
    "summary": "json/summary.md",
    "json": "json/README.md",
    "docs/options/gate.md": "options/gate.md",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_gets_the_page_unchanged(capsys, name):
    assert run(["guide", name]) == 0
    assert capsys.readouterr().out == (DOCS / NAMES[name]).read_text(encoding="utf-8")


def test_the_path_of_a_page_and_a_missing_page(capsys):
    assert run(["guide", "gate", "--path"]) == 0
    assert capsys.readouterr().out.strip() == str(DOCS / "gate.md")
    assert run(["guide", "--path"]) == 0
    assert capsys.readouterr().out.strip() == str(DOCS)
    assert run(["guide", "which"]) == 2
    assert "Unknown page 'which'. Did you mean which-knob?" in capsys.readouterr().err


def test_what_is_read_on_a_terminal_names_only_what_can_be_typed_or_found():
    for name, path in guide_pages().items():
        text = for_reading(path.read_text(encoding="utf-8"), path.relative_to(DOCS).as_posix())
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        assert not re.search(r"\]\([^)]*\)|^<!--", prose, re.M), name
        assert set(re.findall(r"\(guide ([\w/-]+)\)", prose)) <= guide_pages().keys(), name
        sources = re.findall(r"\(([^()]+) in the source code\)", prose)
        assert all((ROOT / source.partition("#")[0]).exists() for source in sources), (
            name,
            sources,
        )
    formulas = for_reading((DOCS / "formulas.md").read_text(encoding="utf-8"), "formulas.md")
    assert "(benchmarks/README.md in the source code)" in formulas


def test_on_a_terminal_a_page_is_formatted_and_no_cell_is_cut():
    terminal = Terminal([sys.executable, "-m", "mismatch_cli", "guide", "gate"], 70, PAGER="cat")
    assert terminal.finish() == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", terminal.text).splitlines()
    assert max(map(len, lines)) <= 70 and len(lines) > 100
    text = " ".join(" ".join(lines).split())
    assert "A file of limits" in text and "**" not in text and "## " not in text
    assert not re.search(r"\w…( |$)", text)
