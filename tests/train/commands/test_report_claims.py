"""`report RUNS -a A -a B`: names, refusals and what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run
from tests import pictures
from tests.train.training_runs import make_run, saved

PAIR = ("-a", "dppo-binary-tv", "-a", "pg-is")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("dppo-binary-tv", "pg-is", "grpo-clip-higher"):
        for seed in range(2):
            saved(tmp_path / "runs", make_run(name, seed, steps=12))
    return tmp_path / "runs"


def test_one_comparison_is_answered(runs, capfd, monkeypatch):
    pictures.leave_blank(monkeypatch)
    assert run(["report", str(runs), *PAIR, "--quiet"]) == 0
    out = capfd.readouterr().out
    assert out.count("\n") <= 40 and "area (mean reward)" in out
    assert "NOT SHOWN" in out or "SHOWN" in out or "CONTRADICTED" in out
    assert "grpo-clip-higher" not in out
    (claim,) = json.loads((runs / "summary.json").read_text())["claims"]
    assert (claim["algorithm"], claim["rival"], claim["steps"]) == ("dppo-binary-tv", "pg-is", 12)
    assert [row["measure"] for row in claim["measures"]] == [
        "area",
        "final_reward",
        "steps_to_reward",
        "seconds_to_reward",
        "bad_over_tokens",
        "bad_over_negative",
    ]
    assert "Does dppo-binary-tv learn faster than pg-is?" in (runs / "report.html").read_text()


def test_an_alias_is_the_algorithm_of_the_runs(runs, capfd):
    from mismatch_cli.rules.algorithms.table import ALIASES

    alias = next(name for name, meant in ALIASES.items() if meant == "grpo-clip-higher")
    assert run(["report", str(runs), "-a", alias, "-a", "pg-is", "--json"]) == 0
    (claim,) = json.loads(capfd.readouterr().out)["claims"]
    assert claim["algorithm"] == "grpo-clip-higher"


def test_a_usual_word_in_a_preset_is_the_algorithm_that_it_means(runs, capfd):
    for folder in runs.glob("dppo-*"):
        text = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(text.replace('"dppo-binary-tv"', '"dppo"'))
    assert run(["report", str(runs), "-a", "dppo", "-a", "pg-is", "--json"]) == 0
    (claim,) = json.loads(capfd.readouterr().out)["claims"]
    assert claim["algorithm"] == "dppo"


def test_names_are_checked_against_the_runs(runs, capfd):
    hold = "The runs hold: dppo-binary-tv, grpo-clip-higher, pg-is."
    for name, words in {
        "dpo-binary-tv": f"No run used dpo-binary-tv. Did you mean dppo-binary-tv? {hold}",
        "gspo": f"No run used gspo. {hold}",
        "gspoo": "Unknown algorithm 'gspoo'. Did you mean gspo",
        "mine.py": f"No run used mine.py. {hold}",
    }.items():
        assert run(["report", str(runs), "-a", name, "-a", "pg-is", "--json"]) == 2, name
        err = capfd.readouterr().err
        assert words in err and hold in err, (name, err)


def test_two_names_of_one_algorithm_are_no_comparison(runs, capfd):
    names = ("clip-higher", "grpo-clip-higher")
    assert run(["report", str(runs), "-a", names[0], "-a", names[1], "--json"]) == 2
    err = capfd.readouterr().err
    assert "clip-higher and grpo-clip-higher are both grpo-clip-higher in these runs" in err


def test_a_mask_in_another_folder_is_named_by_its_whole_path(tmp_path, capfd):
    """The runs have a short one, with the folder where that tells two masks apart."""
    for masks in (("/a/wide.py", "/a/narrow.py"), ("/a/wide/mask.py", "/a/narrow/mask.py")):
        folder = tmp_path / Path(masks[0]).stem
        for seed, mask in enumerate(masks):
            path = saved(folder, make_run("pg-is", seed, steps=3))
            text = (path / "config.toml").read_text()
            (path / "config.toml").write_text(text.replace('"pg-is"', f'"{mask}"'))
        assert run(["report", str(folder), "-a", masks[0], "-a", masks[1], "--json"]) == 0
        (claim,) = json.loads(capfd.readouterr().out)["claims"]
        short = ["…/" + "/".join(mask.split("/")[2:]) for mask in masks]
        assert [claim["algorithm"], claim["rival"]] == short


def test_what_a_report_of_runs_does_not_have_is_refused(runs, capfd):
    for arguments, words in (
        ([str(runs), "-a", "pg-is"], "--algorithm is typed twice"),
        ([str(runs), "-a", "pg-is", "-a", "pg-is"], "two different algorithms"),
        (["fp8-kv", *PAIR], "mismatch-cli clipstats fp8-kv -a dppo-binary-tv -a pg-is"),
        (["fp8-kv", *PAIR, "--as", "verl"], "leave out --algorithm"),
        (["fp8-kv", "--worst", "3", "--as", "verl"], "leave out --worst"),
        ([str(runs), "--worst", "3"], "--worst is for traces"),
        ([str(runs), "--export", "csv"], "--export is for traces"),
    ):
        assert run(["report", *arguments, "--json"]) == 2, arguments
        assert words in capfd.readouterr().err


def test_a_variable_about_what_to_train_asks_no_question(runs, capfd, monkeypatch):
    monkeypatch.setenv("MISMATCH_ALGORITHM", "pg-is")
    assert run(["report", str(runs), "--json"]) == 0
    assert len(json.loads(capfd.readouterr().out)["claims"]) == 2
    monkeypatch.setenv("MISMATCH_REPORT_ALGORITHM", "pg-is grpo-clip-higher")
    assert run(["report", str(runs), "--json"]) == 0
    assert len(json.loads(capfd.readouterr().out)["claims"]) == 1


def test_runs_of_different_tasks_are_not_compared(runs, capfd):
    for folder in runs.glob("pg-is-*"):
        text = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(text.replace("problems.jsonl", "others.jsonl"))
    assert run(["report", str(runs), *PAIR, "--json"]) == 1
    assert "dppo-binary-tv and pg-is learned different tasks" in capfd.readouterr().err
