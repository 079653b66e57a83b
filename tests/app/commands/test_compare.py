"""`compare` as users type it: bundled traces, their own traces, its folder, and mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.trace.run_folder import report_folder
from tests.paths import ROOT

FLOAT32 = str(bundled("traces") / "float32")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working folder with a run that holds the bundled float32 trace."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FLOAT32, tmp_path / "run" / "trace")
    return tmp_path


@pytest.fixture
def compare(typed):
    return partial(typed, "compare")


def test_without_an_argument_the_bundled_traces_are_compared(here, compare):
    code, out, err = compare()
    assert code == 0
    assert "two bundled ones" in err and "Wrote compare/report.html" in err
    assert "Comparing: 288/288 responses," in err, "two passes count each response once"
    text = " ".join(out.split())
    assert (
        "by prompt: both have responses to the same 24 prompts" in text
        and "rollout.kv_cache_dtype" in text
    )
    written = json.loads((here / "compare" / "summary.json").read_text())
    assert [Path(side["folder"]).name for side in written["traces"]] == ["fp8-kv", "float32"]
    page = (here / "compare" / "report.html").read_text(encoding="utf-8")
    # A control has no factors
    assert set(re.findall('<figure id="figure-(.*?)">', page)) == {
        "gap-distribution",
        "volatility",
        "position-profile",
    }


def test_json_is_what_is_written_and_the_folder_is_overwritten(here, compare):
    (here / "out").mkdir()
    (here / "out" / "summary.json").write_text('{"format": "mismatch-cli comparison"}')
    code, out, err = compare("run", FLOAT32, "--json", "--quiet", "-o", "out")
    assert code == 0 and err == ""
    result = json.loads(out)
    assert result == json.loads((here / "out" / "summary.json").read_text())
    assert result["comparisons"][0]["pairing"] == "tokens" and result["pair"] == "mismatch"
    (here / "out" / "summary.json").write_text("{}")
    code, _, err = compare("run", FLOAT32, "--quiet", "-o", "out")
    assert (
        code == 1
        and "out holds other files. Write the report beside them with --force"
        in " ".join(err.split())
    )


def test_the_pair_asked_for_is_compared_and_kept_in_the_command(here, compare):
    twice = [str(bundled("traces/fp8-kv"))] * 2
    code, out, _ = compare(*twice, "--pair", "staleness", "--full", "--quiet")
    assert code == 0 and "staleness: the trainer's current weights" in " ".join(out.split())
    page = (here / "compare" / "report.html").read_text()
    assert "mismatch-cli compare fp8-kv fp8-kv --pair staleness" in page


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["run"],
            2,
            "compare needs two traces, and one is named. Name a second: mismatch-cli compare run "
            "OTHER",
        ),
        (["run"] * 7, 2, "7 traces are too many: name at most 6."),
        (["run", "gone"], 1, "gone does not exist"),
        (["run", "run", "--pair", "mismatsch"], 2, "Did you mean mismatch"),
        (
            ["run", "run", "--pair", "staleness"],
            2,
            "run/trace has no staleness pair. It has: floor, mismatch, total.",
        ),
        (["run", "run", "-o", "/proc/nope"], 1, "/proc/nope cannot be written"),
        (["run", "run", "-o", "run"], 1, "run holds other files"),
        (["run", "run", "-o", "run/trace/manifest.json"], 1, "is a file"),
    ],
)
def test_mistakes(here, compare, arguments, code, message):
    got, _, err = compare(*arguments, "--quiet")
    assert got == code
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert (here / "run" / "trace" / "manifest.json").is_file()


def test_only_force_replaces_what_is_not_ours(tmp_path):
    folder = tmp_path / "report"
    with report_folder(folder, "mismatch-cli mine", force=False):
        (folder / "summary.json").write_text('{"format": "mismatch-cli mine"}')
    with report_folder(folder, "mismatch-cli mine", force=False):
        pass
    with (
        pytest.raises(MismatchError, match="already exists"),
        report_folder(folder, "mismatch-cli yours", force=False),
    ):
        pass
    with report_folder(folder, "mismatch-cli yours", force=True):
        pass
    assert (folder / "summary.json").is_file()


@pytest.mark.slow
def test_a_reader_that_stops_early_is_not_an_error(here):
    command = f"{sys.executable} -m mismatch_cli compare run {FLOAT32} --quiet -o out | head -n 3"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 3 and not done.stderr
