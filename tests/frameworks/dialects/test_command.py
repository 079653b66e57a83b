"""`report --as`: the table, the JSON, and refusals."""

from __future__ import annotations

import json
import re

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.frameworks import dialects
from tests.frameworks.dialects.conftest import rows


@pytest.fixture
def report(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, width: int = 100) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", str(width))
        capfd.readouterr()
        code = run(["report", *arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.mark.parametrize("framework", [*dialects.names(), "all"])
def test_it_prints_and_writes_nothing(framework, report, tmp_path):
    for width in (50, 120):
        code, out, err = report("--as", framework, width=width)
        assert code == 0
        assert "reporting on the bundled trace" in err
        assert all(len(line) <= width for line in out.splitlines())
        assert "0.0045" in out or framework not in ("verl", "all")
    assert not list(tmp_path.iterdir())


def test_every_metric_is_in_the_table(report):
    _, out, _ = report("--as", "verl", width=120)
    assert all(line.name in out and line.formula in out for line in dialects.lines("verl"))


def test_the_json_equals_the_measurement(report):
    code, out, _ = report("--as", "all", "--json")
    assert code == 0
    readings = json.loads(out)
    assert (readings["format"], readings["version"]) == ("mismatch-cli dialects", 1)
    assert sorted(readings["frameworks"]) == dialects.names()
    row = next(
        row for row in readings["frameworks"]["verl"]["metrics"] if row["name"] == "rollout_corr/kl"
    )
    assert row["compares"] == "recomputed / rollout"
    assert row["value"] == pytest.approx(0.004539093, rel=1e-5)


def test_a_missing_measurement_is_a_dash_with_its_reason(report, write):
    trace = write(rows([[-1.0, -2.0]], logp_trainer=[[-1.1, -2.5]], version_trainer=[3]))
    code, out, _ = report(str(trace.folder), "--as", "openrlhf")
    assert code == 0
    assert re.search(r"^vllm_kl +—", out, re.MULTILINE)
    assert "not measured: needs logp_recomputed and logp_rollout" in " ".join(out.split())


def test_tokens_out_of_support_are_reported(report, write):
    trace = write(rows([[-1.0, -2.0]], logp_trainer=[[-1.1, -float("inf")]]))
    _, out, _ = report(str(trace.folder), "--as", "trl")
    assert "1 token has log π = −∞" in out


def test_an_unknown_framework_names_the_nearest(report):
    code, out, err = report("--as", "nemo")
    assert (code, out) == (2, "")
    assert "Unknown framework 'nemo'. Did you mean nemo-rl?" in err


@pytest.mark.parametrize("flag", [("--export", "csv"), ("--output", "x")])
def test_it_only_prints(flag, report):
    code, out, err = report("--as", "verl", *flag)
    assert (code, out) == (2, "")
    assert f"--as verl only prints: leave out {flag[0]}." in err
