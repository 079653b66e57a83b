"""What docs/dialects.md says of the frameworks: their names, and that the JSON has the rest."""

from __future__ import annotations

import json

from mismatch_cli.app.cli import run
from mismatch_cli.frameworks import dialects
from mismatch_cli.frameworks.dialects._clips import clip_means
from tests.paths import DOCS

PAGE = DOCS / "dialects.md"


def test_the_page_names_every_framework():
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in dialects.names())


def test_the_json_has_what_the_page_leaves_to_it(capfd, monkeypatch, tmp_path):
    """Every metric with its formula, what it compares, its notes and its source."""
    monkeypatch.chdir(tmp_path)
    assert run(["report", "--as", "all", "--json"]) == 0
    frameworks = json.loads(capfd.readouterr().out)["frameworks"]
    for framework in dialects.names():
        assert frameworks[framework]["when"] == dialects.when(framework)
        printed = {row["name"]: row for row in frameworks[framework]["metrics"]}
        lines = dialects.lines(framework)
        assert list(printed) == [line.name for line in lines]
        for line in lines:
            row = printed[line.name]
            assert row["formula"] == line.formula and row["source"] == line.source, line.name
            assert row["formula"] and row["source"] and row["compares"] == line.compares
            lacks = f"not measured: needs {line.lacks}"
            assert not line.lacks or lacks in row["notes"], line.name
            assert not line.note or line.note in row["notes"], line.name


def test_a_name_is_one_word_and_a_formula_is_not_a_name():
    for framework in dialects.names():
        names = [line.name for line in dialects.lines(framework)]
        assert not {line.formula for line in dialects.lines(framework)} & set(names), framework
    sides = [line.name.removeprefix("clip_ratio/") for line in clip_means("trainer.py")]
    assert sides == ["low_mean", "high_mean", "region_mean"]
    assert {line.source for line in clip_means("trainer.py")} == {"trainer.py"}
