"""A file that holds no dump is called what it is, with what to type next."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing import opened as _opened
from mismatch_cli.frameworks.importing import other_files as _other_files
from mismatch_cli.frameworks.importing.other_files import document
from tests.frameworks.importing.layouts import imported, plain_record, real_rows, write_lines

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 12345\n"
ROWS = [plain_record(row) for row in real_rows(3)]
SMALL = {"prompt_ids": [1], "response_ids": [2], "logp_rollout": [-1.0]}


def refused(path: Path, content: str | bytes) -> str:
    """What the error says of a file with this content, after its path."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(MismatchError) as caught:
        imported(path, into=path.parent / "trace")
    assert str(caught.value).startswith(str(path))
    return str(caught.value).removeprefix(str(path))


def test_pointers_and_empty_files_of_every_kind(tmp_path):
    for kind in ("jsonl", "json", "parquet", "pt", "pkl", "dp"):
        path = tmp_path / f"a.{kind}"
        assert "is a Git LFS pointer" in (said := refused(path, POINTER)) and "lfs pull" in said
        for empty in ("", " \n\n") if kind not in ("pkl", "dp") else ():
            assert refused(path, empty).startswith(" is empty. Copy it again"), kind


def test_packed_and_binary_files_of_lines(tmp_path):
    path = tmp_path / "a dump.jsonl.gz"
    said = refused(path, gzip.compress(b'{"a": 1}\n'))
    assert said.endswith(f"Unpack it first: gunzip -k {shlex.quote(str(path))}")
    for content, what in (
        (b"PK\x03\x04rest", "a zip archive"),
        (b"PAR1rest", "a Parquet file"),
        (json.dumps(SMALL).encode("utf-16"), "UTF-16"),
        (b"\x28\xb5\x2f\xfdrest", "unzstd"),
    ):
        assert what in refused(tmp_path / "b.jsonl", content)


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_an_array_or_a_document_is_read_as_its_rows(indent, tmp_path):
    row = ROWS[0] | {"note": "]\n{ $(touch evil) '\" \\ é"}
    documents = {"array": [row, *ROWS[1:]], "document": row}
    for kind, content in documents.items():
        path = tmp_path / f"my {kind}.json"
        path.write_text(json.dumps(content, indent=indent))
        table, _ = imported(path, into=tmp_path / f"{kind}-trace")
        assert table.num_rows == (3 if kind == "array" else 1)


@pytest.mark.parametrize("kind", ["array", "object"])
def test_one_that_is_too_large_comes_with_the_line_that_makes_lines(kind, tmp_path, monkeypatch):
    """The line can be pasted, whatever the file is called and whatever it holds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_opened, "LONGEST_LINE", 2**10)
    content = ROWS if kind == "array" else ROWS[0]
    path = Path(f"my $(touch evil) '{kind}.json")
    said = refused(path, json.dumps(content, indent=1))
    assert f"is one JSON {kind} of over" in said
    line = re.search(r"Make it lines: (.*) && mismatch-cli import (.*)$", said)
    assert line is not None
    typed = line[1].replace("python3", shlex.quote(sys.executable), 1)
    subprocess.run(typed, shell=True, check=True)
    monkeypatch.undo()
    table, _ = imported(tmp_path / shlex.split(line[2])[0], into=tmp_path / "trace")
    assert table.num_rows == (3 if kind == "array" else 1)
    assert not (tmp_path / "evil").exists()


def test_rows_of_an_array_are_not_taken_for_lines(tmp_path):
    """One of these rows is a line of its own; it alone was imported."""
    path = tmp_path / "a.jsonl"
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in ROWS) + "\n]\n")
    table, _ = imported(path, into=tmp_path / "trace")
    assert table.num_rows == 3


def test_a_document_beyond_what_is_looked_at(tmp_path, monkeypatch):
    for content in (ROWS, {"rows": ROWS}):
        for end in range(197, 204):  # inside of a number, a name, or between them
            monkeypatch.setattr(_other_files, "_SAMPLE", end)
            (path := tmp_path / "a.jsonl").write_text(json.dumps(content, indent=1))
            assert document(path) == ("array" if isinstance(content, list) else "object")
    (path := tmp_path / "b.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert document(path) == ""  # one long line


def test_a_broken_document_is_refused(tmp_path):
    said = refused(tmp_path / "a.json", json.dumps(ROWS, indent=1)[:-200])
    assert said.startswith(" is not a whole JSON array: ") and said.endswith("or leave it out.")


def test_a_broken_line_has_its_number(tmp_path):
    good = json.dumps(SMALL)
    first = refused(tmp_path / "a.jsonl", '\n{"prompt_ids": [1, 2], "response_ids": [1}\nx\n')
    assert re.search(r"no line is a JSON object; line 2: column \d+, expecting ','", first)
    assert "line 1: a JSON list, not an object" in refused(tmp_path / "b.jsonl", "[1]\n[2]\n")
    for broken, why in (
        ('{"a": 1', "column 8, expecting ',' delimiter"),
        ("12", "a JSON number, not an object"),
        ("null", "a JSON null, not an object"),
        ("{" * 200, "column 2, "),
    ):
        (path := tmp_path / "c.jsonl").write_text(f"{broken}\n{good}\n{broken}\n")
        _, about = imported(path, into=tmp_path / "c")
        assert about["left_out"] == {"lines without a JSON object": 2}
        (where,) = about["left_out_first"].values()
        assert where.startswith("c.jsonl, line 1: ") and why in where, where
    (path := tmp_path / "d.jsonl").write_text(f"{good}\n{good[:20]}")
    _, about = imported(path, into=tmp_path / "d")
    assert about["left_out"] == {"truncated last lines": 1}


def test_other_files_of_a_folder_are_counted(tmp_path):
    folder = tmp_path / "dump"
    write_lines(folder / "rank_0.jsonl", ROWS)
    for name, content in (("rank_1.jsonl", POINTER), ("rank_2.jsonl", ""), ("e.pt", POINTER)):
        (folder / name).write_text(content)
    table, about = imported(folder, into=tmp_path / "trace")
    assert table.num_rows == 3
    assert about["left_out"] == {"Git LFS pointers": 2, "empty files": 1}
    (folder / "rank_0.jsonl").write_text(POINTER)
    with pytest.raises(MismatchError, match="Git LFS pointer"):
        imported(folder, into=tmp_path / "nothing")


def test_settings_that_end_too_early_have_a_line(tmp_path, capsys):
    (path := tmp_path / "a.toml").write_text("a = 1\nb = [1,\n")
    assert run(["import", "--config", str(path)]) == 1
    assert "at line 2, the end of the document" in capsys.readouterr().err


@pytest.mark.parametrize("indent", [None, 2])
def test_a_document_may_begin_with_a_byte_order_mark(tmp_path, indent):
    """As some editors write it."""
    for kind, content in {"array": ROWS, "object": ROWS[0]}.items():
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps(content, indent=indent), encoding="utf-8-sig")
        assert document(path) == (kind if kind == "array" or indent else "")
        table, _ = imported(path, into=tmp_path / f"trace of {kind}")
        assert table.num_rows == (3 if kind == "array" else 1)
