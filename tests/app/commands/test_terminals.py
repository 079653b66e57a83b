"""Terminals without Greek, and names that are not UTF-8: real processes, real bytes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from mismatch_cli.app import cli
from mismatch_cli.base.places import bundled
from mismatch_cli.base.text import with_signs_of
from tests.paths import ROOT

TRACE = str(bundled("traces") / "fp8-kv")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_every_terminal_gets_the_report(monkeypatch, tmp_path, encoding):
    streams = {
        name: io.TextIOWrapper(io.BytesIO(), encoding=encoding) for name in ("stdout", "stderr")
    }
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    cli.spell_out_what_streams_lack()
    report, diagnosis = (["--output", str(tmp_path / name)] for name in ("report", "diagnosis"))
    lines = (
        ["report", TRACE, "-q", *report],
        ["diagnose", TRACE, "--json", *diagnosis],
        ["import", "μ\U0001d518"],
    )
    codes = [cli.run(line) for line in lines]
    for stream in streams.values():
        stream.flush()
    out, err = (stream.buffer.getvalue().decode(encoding) for stream in streams.values())
    assert codes == [0, 0, 1]
    assert "Unexpected" not in err and "|pi - mu|" in out
    assert json.loads(out[out.index("\n{") :])
    assert ("\\ud835\\udd18" in err) != ("\U0001d518" in err)


def test_our_own_signs_have_a_spelling_in_ascii():
    line = "mean |π − μ|  0.0028 ± 0.0003  ≤ 0.01  ✔  █▇▁ “x” … χ² × 3"
    assert with_signs_of("utf-8", line) == line
    plain = with_signs_of("ascii", line)
    assert plain == 'mean |pi - mu|  0.0028 +- 0.0003  <= 0.01  ok  871 "x" ~ chi^2 x 3'
    assert with_signs_of("latin-1", "3 × ± π") == "3 × ± pi"
    assert with_signs_of(None, "π") == "π", "text in memory takes every character"


def test_a_process_in_the_c_locale_says_it_all(tmp_path):
    environment = os.environ | {
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONIOENCODING": "",
    }
    program = [sys.executable, "-m", "mismatch_cli"]
    for line in (["diagnose", TRACE, "--output", tmp_path / "diagnosis"], ["import", b"od\xff"]):
        done = subprocess.run([*program, *line], env=environment, capture_output=True, cwd=ROOT)
        said = done.stdout + done.stderr
        assert b"Unexpected" not in said and b"Traceback" not in said and said.isascii()
        assert done.returncode == (2 if line[0] == "import" else 0)
    assert b"\\udcff is not UTF-8. Rename the file" in said
