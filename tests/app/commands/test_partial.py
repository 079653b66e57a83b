"""Every report on a partial trace says so, and a partial trace does not pass a gate unless that
is allowed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.trace.manifest import read_manifest

FP8, FLOAT32 = (bundled("traces") / name for name in ("fp8-kv", "float32"))
SAYS = "PARTIAL: lost is incomplete"
WHY = "5 of 6 shards exist (missing: shard-00002.parquet)"


@pytest.fixture
def lost(tmp_path, monkeypatch) -> Path:
    """The bundled trace without a shard in the middle."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FP8, "lost")
    Path("lost/shard-00002.parquet").unlink()
    return Path("lost")


@pytest.fixture
def command(typed):
    def answer(*words: object) -> tuple[int, str]:
        code, out, _ = typed(*words, "-q")
        return code, " ".join(out.split())

    return answer


@pytest.mark.slow
def test_every_report_says_that_a_trace_is_partial(lost, command):
    for name, *arguments in (
        ("report", "lost", "-o", "out-report"),
        ("clipstats", "lost", "-o", "out-clipstats", "-a", "pg-is", "-a", "dppo-binary-tv"),
        ("diagnose", "lost", "-o", "out-diagnose"),
        ("compare", "lost", str(FLOAT32), "-o", "out-compare"),
    ):
        code, out = command(name, *arguments)
        assert code == 0 and SAYS in out and WHY in out, name
        assert SAYS in Path(f"out-{name}/report.html").read_text(encoding="utf-8"), name
        summary = json.loads(Path(f"out-{name}/summary.json").read_text(encoding="utf-8"))
        about = summary["traces"][0]["about"] if name == "compare" else summary["about"]
        (partial,) = about["partial"]
        assert (
            partial["missing_shards"] == ["shard-00002.parquet"] and partial["recorded_shards"] == 6
        ), name
        assert partial["reasons"] == [WHY], name
    code, out = command("report", "lost", "--as", "verl")
    assert code == 0 and SAYS in out


def test_a_whole_trace_says_nothing(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out = command("report", str(FLOAT32), "-o", "out", "--json")
    assert code == 0 and json.loads(out)["about"]["partial"] == []


@pytest.mark.slow
def test_a_gate_does_not_let_a_partial_trace_pass(lost, command):
    limits = Path("limits.toml")
    limits.write_text("[limits.k3]\nmax = 100\n")
    files = ("--junit", "gate.xml", "--markdown", "gate.md", "--force")
    assert command("gate", str(FP8), "--limits", "limits.toml")[0] == 0
    code, out = command("gate", "lost", "--limits", "limits.toml", *files)
    assert (
        code == 3 and SAYS in out and f"✘ FAILED lost: {WHY}." in out and "--allow-partial" in out
    )
    root = ElementTree.parse("gate.xml").getroot()
    assert (root.get("tests"), root.get("failures")) == ("2", "1")
    assert [one.get("type") for one in root.iter("failure")] == ["PartialTrace"]
    assert "❌" in (text := Path("gate.md").read_text(encoding="utf-8")) and "PARTIAL" in text
    code, out = command("gate", "lost", "--limits", "limits.toml", "--json")
    result = json.loads(out)
    assert code == 3 and not result["passed"] and result["partial"][0]["reasons"] == [WHY]
    code, out = command("gate", "lost", "--limits", "limits.toml", "--allow-partial", *files)
    assert code == 0 and SAYS in out and "✔ PASSED The limit holds." in out
    assert ElementTree.parse("gate.xml").getroot().get("failures") == "0"
    limits.write_text("[limits.k3]\nmax_times_baseline = 100\n")
    baseline = ("gate", str(FP8), "--limits", "limits.toml", "--baseline", "lost")
    code, out = command(*baseline)
    assert code == 3 and SAYS in out
    assert command(*baseline, "--allow-partial")[0] == 0


@pytest.mark.slow
def test_resume_repairs_a_run_that_lost_a_shard_or_rows(tmp_path, command, monkeypatch):
    import pyarrow.parquet as pq

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mismatch_cli.probe.config.RESPONSES_PER_SHARD", 2)
    small = (
        "--engine hf --num-prompts 3 --samples-per-prompt 2 --max-tokens 4 --noise-responses 0 "
        "--top-logprobs 2"
    )
    assert command("probe", *small.split(), "-o", "run")[0] == 0
    shards = sorted(Path("run/trace").glob("shard-*"))
    before = [path.read_bytes() for path in shards]
    assert read_manifest(Path("run/trace"))["shard_rows"] == {path.name: 2 for path in shards}
    pq.write_table(pq.read_table(shards[0]).slice(0, 1), shards[0])
    shards[1].unlink()
    code, out = command("report", "run")
    assert (
        code == 0
        and "2 of 3 shards exist" in out
        and "shard-00000.parquet holds fewer responses" in out
    )
    assert "Resume with: mismatch-cli probe --resume --output run" in out
    code, out = command("rescore", "run", "--trainer-model", str(bundled("model")), "-o", "again")
    assert code == 0 and "2 of 3 shards exist" in out  # what comes from a partial trace is partial
    assert command("probe", "--resume", "-o", "run")[0] == 0
    assert [path.read_bytes() for path in shards] == before
    assert "PARTIAL" not in command("report", "run")[1]
