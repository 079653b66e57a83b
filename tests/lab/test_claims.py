"""The table of what was measured and the programs in `lab/` name each other."""

from __future__ import annotations

import importlib
import pkgutil
import re

import lab
from tests.paths import ROOT

LAB = ROOT / "lab"
_ROW = re.compile(r"\| .* \| .* \| .+ \| 20\d\d-\d\d-\d\d.* \| (CPU|H100) \|")


def test_every_program_is_named_and_every_command_runs_one() -> None:
    text = (LAB / "README.md").read_text(encoding="utf-8")
    programs = {
        path.stem
        for path in LAB.glob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    assert set(re.findall(r"\| `lab\.(\w+)", text)) == programs


def test_every_claim_has_a_figure_a_command_a_date_and_a_machine() -> None:
    text = (LAB / "README.md").read_text(encoding="utf-8")
    rows = text.split("|---|---|---|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert [row for row in rows if not _ROW.fullmatch(row)] == []


def test_every_program_of_lab_can_be_imported():
    for module in pkgutil.walk_packages(lab.__path__, "lab."):
        importlib.import_module(module.name)
