"""Findings of the fuzzer: files that are broken in ways that their readers did not expect."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_cli.app.cli import run

DEEP = b'{"a":' * 100_000


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"")


@pytest.mark.parametrize(
    ("name", "content", "line", "code", "message"),
    [
        (
            "p.jsonl",
            DEEP,
            "probe --prompts p.jsonl",
            1,
            "p.jsonl cannot be read: line 1 is not JSON (it is nested over 100",
        ),
        (
            "p.json",
            DEEP,
            "probe --prompts p.json",
            1,
            "p.json cannot be read: it is nested over 100",
        ),
        (
            "p.jsonl",
            b"\xff\xfe{",
            "probe --prompts p.jsonl",
            1,
            "Fix the file, or name another.",
        ),
        (
            "x.toml",
            "steps = 2\n".encode("utf-16"),
            "train --preset x.toml",
            1,
            "x.toml cannot be read",
        ),
        (
            "x.toml",
            b"steps = nan\n",
            "train --preset x.toml",
            2,
            "steps = nan must be a whole number.",
        ),
        (
            "run/config.toml",
            b"\xa8\n",
            "train --resume --output run",
            2,
            "run/config.toml has different settings",
        ),
        (
            "l.toml",
            b"[limits.k3]\nmax = []\n",
            "gate --limits l.toml",
            2,
            "must be a number. Example: max = 0.015",
        ),
        ("t", b"", f"curate --threads {10**20}", 2, "is more than any machine has. Use at most"),
        (
            "t",
            b"",
            "clipstats -a dppo-binary-tv:max_tv=nan",
            2,
            "max_tv=nan is not a finite number. Example: ",
        ),
        ("m.py", b"", "clipstats -a m.py", 2, "m.py does not define trust_region"),
    ],
)
def test_a_file_that_cannot_be_read(
    tmp_path, monkeypatch, capfd, name, content, line, code, message
):
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(content)
    assert run(line.split()) == code
    errors = capfd.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert Path(name).read_bytes() == content


def test_dumps_that_hold_no_response(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    pq.write_table(
        pa.table({"logp_rollout": [[-1.0]], "prompt_ids": [[1]], "other": [1]}), "plain.parquet"
    )
    assert run(["import", "plain.parquet", "--format", "plain", "--quiet"]) == 1
    assert (
        "No rows imported from plain.parquet: 1 response with neither token ids nor log-probabilities "
        "of a second side" in capfd.readouterr().err
    )
    _zip(tmp_path / "rollout_0.pt")
    assert run(["import", "rollout_0.pt", "--quiet"]) == 1
    errors = capfd.readouterr().err
    assert (
        "rollout_0.pt is broken, or torch.save did not write it" in errors
        and "Copy it again" in errors
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.parquet", "rollout_0.pt"]
