"""`import` on the command line: its output and files, what other commands make of them, and how
it fails.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mismatch_cli.base.places import bundled
from mismatch_cli.base.registry import names
from mismatch_cli.frameworks import IMPORTERS
from mismatch_cli.frameworks.importing.driver import facts
from mismatch_cli.frameworks.plain.importer import meanings
from mismatch_cli.studies.study import FINISH_UNKNOWN
from mismatch_cli.trace.reader import Trace
from tests.docs.pages import DOCS
from tests.frameworks.importing.layouts import (
    open_instruct_record,
    plain_record,
    real_rows,
    write_lines,
)
from tests.paths import ROOT


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def dump(path: str = "dump.jsonl", count: int = 12) -> Path:
    return write_lines(Path(path), [plain_record(row) for row in real_rows(count)])


def test_without_a_path_the_bundled_dump_is_imported_and_read_by_the_others(typed):
    code, out, err = typed("import")
    printed = " ".join(out.split())
    assert (
        code == 0 and "17 responses" in printed and "prime-rl traces and token_exports" in printed
    )
    assert "Next: mismatch-cli diagnose import-dumps" in err
    assert Trace.open(Path("import-dumps")).vocabulary.decode([300]) not in ("", "⟨300⟩")
    code, out, _ = typed("report", "import-dumps", "--quiet", "--full")
    assert code == 0 and "Imported from" in out and "Total: the trainer's current weights" in out
    metrics = json.loads((Path("import-dumps") / "summary.json").read_text())["pairs"]["total"][
        "metrics"
    ]
    assert metrics["truncated_share"] == {
        "value": None,
        "low": None,
        "high": None,
        "note": FINISH_UNKNOWN,
    }
    assert (Path("import-dumps") / "report.html").read_text().count(
        "prime-rl traces and token_exports"
    ) >= 1
    assert typed("clipstats", "import-dumps", "--quiet", "--output", "clip")[0] == 0


def test_a_trace_lends_its_tokens(typed):
    for trace in (bundled("traces/fp8-kv"), Path("import-dump")):  # a trace folder and a run folder
        code, _, _ = typed(
            "import", str(dump()), "--tokenizer", str(trace), "--force", "--output", "lent"
        )
        assert code == 0 and Trace.open(Path("lent")).vocabulary.decode([300]) not in ("", "⟨300⟩")
        shutil.copytree("lent", "import-dump", dirs_exist_ok=True)


def test_the_bundled_dump_is_small_and_what_its_script_makes(tmp_path, monkeypatch):
    from lab.makers import make_dump

    folder = bundled("dumps") / "token_exports"
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert sum((folder / path).stat().st_size for path in files) < 300_000
    monkeypatch.setattr(make_dump, "FOLDER", tmp_path / "made")
    make_dump.main()
    assert (
        sorted(
            p.relative_to(tmp_path / "made") for p in (tmp_path / "made").rglob("*") if p.is_file()
        )
        == files
    )
    assert all(
        (tmp_path / "made" / path).read_bytes() == (folder / path).read_bytes() for path in files
    )


def test_what_was_left_out_is_reported_everywhere(typed):
    path = dump()
    path.write_text(
        path.read_text()
        + '{"prompt_ids": [1], "response_ids": [2], "logp_rollout": [0.0, -1.0]}\n{"cut'
    )
    code, out, _ = typed("import", str(path))
    assert code == 0 and "1 truncated last line (first: dump.jsonl, line 14)" in " ".join(
        out.split()
    )
    code, out, _ = typed("import", str(path), "--json", "--force", "--quiet")
    imported = json.loads(out)
    assert imported["left_out"] == {
        "responses whose logp_rollout does not have one value per token": 1,
        "truncated last lines": 1,
    }
    assert (imported["format"], imported["rows"], imported["output"]) == (
        "plain",
        12,
        "import-dump",
    )
    _, out, _ = typed("report", "import-dump", "--quiet")
    assert "Left out: 1 truncated last line" in " ".join(out.split())


def test_a_dump_without_a_policy_says_what_comes_next(typed):
    write_lines(
        Path("x_rollouts_000000.jsonl"),
        [open_instruct_record(row, i) for i, row in enumerate(real_rows(3))],
    )
    code, _, err = typed("import", "x_rollouts_000000.jsonl", "-o", "run", "--temperature", "0.7")
    assert code == 0 and "Next: mismatch-cli rescore run --trainer-model MODEL" in err
    assert Trace.open(Path("run")).manifest["config"] == {"sampling": {"temperature": 0.7}}
    code, _, err = typed("report", "run")
    assert code == 1 and "mismatch-cli rescore run --trainer-model MODEL" in err


def test_weights_and_sampling_of_the_user(typed):
    code, _, _ = typed(
        "import", "--weights", "equal", "--temperature", "0.6", "--top-p", "0.9", "-o", "run"
    )
    assert code == 0
    _, out, _ = typed("report", "run", "--quiet", "--full")
    assert (
        "Mismatch: the same weights" in out
        and "temperature 0.6 · top-p 0.9" in out
        and "at most" not in out
    )


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--format", "slimy", "dump.jsonl"], 2, "Did you mean slime"),
        (["--format", "jsonl", "dump.jsonl"], 2, "JSONL or Parquet of your own is plain."),
        (["--weights", "older", "dump.jsonl"], 2, "equal, newer"),
        (["--temperature", "0", "dump.jsonl"], 2, "--temperature 0.0 is out of range"),
        (["nothing.jsonl"], 1, "nothing.jsonl does not exist"),
        (["empty"], 1, "holds no files to import"),
        (["--format", "prime-rl", "dump.jsonl"], 1, "No rows imported from dump.jsonl"),
        (["dump.jsonl", "-o", "foreign"], 1, "is not a run folder"),
    ],
)
def test_errors_are_one_sentence(typed, flags, code, message):
    dump()
    Path("empty").mkdir()
    Path("foreign").mkdir()
    (Path("foreign") / "thesis.txt").touch()
    exit_code, out, err = typed("import", *flags)
    assert (
        exit_code == code and message in err.splitlines()[-1] and not out and "Traceback" not in err
    )
    assert sorted(path.name for path in Path().iterdir()) == ["dump.jsonl", "empty", "foreign"]


def test_a_trace_is_not_imported_again(typed):
    dump()
    assert typed("import", "dump.jsonl", "-o", "run")[0] == 0
    for path in ("run", "run/trace"):
        code, _, err = typed("import", path)
        assert code == 2 and err.endswith(
            f"{path} is a trace already. Read it with: mismatch-cli report {path}\n"
        )
    assert sorted(path.name for path in Path().iterdir()) == ["dump.jsonl", "run"]
    # Its shards are plain Parquet
    assert typed("import", "run", "--format", "plain", "-o", "again")[0] == 0


def test_an_older_run_stays_until_the_new_one_is_complete(typed):
    dump()
    assert typed("import", "dump.jsonl", "-o", "run")[0] == 0
    before = (Path("run") / "trace" / "manifest.json").read_bytes()
    for reader in ("report", "diagnose"):
        assert typed(reader, "run", "--quiet")[0] == 0
    code, _, err = typed("import", "dump.jsonl", "-o", "run")
    assert code == 1 and "--force" in err
    write_lines(Path("bad.jsonl"), [plain_record(real_rows(1)[0]) | {"response_ids": []}])
    assert typed("import", "bad.jsonl", "-o", "run", "--force")[0] == 1
    assert (Path("run") / "trace" / "manifest.json").read_bytes() == before
    assert (Path("run") / "report.html").exists() and not any(Path("run").glob("*.part"))
    assert typed("import", "dump.jsonl", "-o", "run", "--force")[0] == 0
    # It described the old trace, as did the diagnosis
    assert not (Path("run") / "report.html").exists()
    assert sorted(path.name for path in Path("run").iterdir()) == ["trace"]


def test_a_pickle_comes_with_the_lines_to_run(typed):
    Path("global_step_2_training_input.pkl").write_bytes(pickle.dumps({}))
    code, out, err = typed("import", "global_step_2_training_input.pkl", "--quiet")
    assert code == 1 and "import json, pickle" in err and not out
    assert "Run the lines above where SkyRL is installed" in err.splitlines()[-1]


def test_an_interrupt_leaves_nothing_half(tmp_path):
    with open("big.jsonl", "w") as file:
        line = json.dumps(plain_record(real_rows(1)[0])) + "\n"
        file.writelines(line for _ in range(60_000))
    root = ROOT
    process = subprocess.Popen(
        [sys.executable, "-m", "mismatch_cli", "import", "big.jsonl", "-o", "run"],
        env=os.environ | {"PYTHONPATH": str(root)},
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(3000):
        if any(Path("run").glob(".trace.*.part")) or process.poll() is not None:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert not Path("run").exists()


def test_formats_and_schema_are_printed(typed):
    code, out, _ = typed("import", "--formats")
    said = " ".join(out.split())
    for name in names(IMPORTERS):
        its = facts(name)
        assert f"{name}: {its.title}" in out
        advice = (its.files, its.enable, its.holds, its.shift, its.padding, its.averaging)
        assert all(words in said for words in advice)
    code, out, _ = typed("import", "--schema")
    assert code == 0 and all(name in out for name in meanings()) and "import json" in out
    assert set(json.loads(typed("import", "--schema", "--json")[1])) == set(meanings())


@pytest.mark.parametrize("width", [50, 80])
def test_no_line_is_wider_than_the_terminal(typed, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for arguments in (["--formats"], ["-o", "run"]):
        _, out, _ = typed("import", *arguments)
        assert max(len(line) for line in out.splitlines()) <= width


def test_the_document_says_how_to_get_each_dump():
    text = (DOCS / "import.md").read_text(encoding="utf-8")
    for name in names(IMPORTERS):
        assert f"| `{name}` | {facts(name).enable} | " in text


def test_the_precisions_of_both_sides_can_be_stated(typed):
    """In a file: the report judges the gap by them, and names them."""
    dump()
    Path("run.toml").write_text('rollout-dtype = "bf16"\ntrainer-dtype = "float32"\n')
    assert typed("import", "dump.jsonl", "--config", "run.toml")[0] == 0
    about = Trace.open(Path("import-dump")).manifest
    assert about["rollout"]["dtype"] == "bfloat16" and about["trainer"]["dtype"] == "float32"
    _, out, _ = typed("report", "import-dump", "--no-plots", "--quiet")
    assert "bf16 against float32" in out and "engine bfloat16 against trainer float32" in out
    Path("eight.toml").write_text('[import]\nrollout-dtype = "fp8"\ntrainer-dtype = "auto"\n')
    words = ("import", "dump.jsonl", "--force", "--config", "eight.toml")
    assert typed(*words)[0] == 0
    _, out, _ = typed("report", "import-dump", "--no-plots", "--quiet")
    assert "engine fp8 against trainer dtype not recorded" in out
    Path("wrong.toml").write_text('[import]\nrollout-dtype = "fp9"\n')
    code, _, err = typed("import", "dump.jsonl", "--force", "--config", "wrong.toml")
    assert code == 2 and "rollout_dtype: Unknown dtype 'fp9'" in err and "--rollout" not in err


def test_a_dump_without_a_policy_has_no_precision_of_one(typed):
    row = {name: real_rows(1)[0][name] for name in ("prompt_ids", "response_ids", "logp_rollout")}
    write_lines(Path("dump.jsonl"), [row])
    Path("run.toml").write_text('rollout-dtype = "bf16"\ntrainer-dtype = "bf16"\n')
    assert typed("import", "dump.jsonl", "--config", "run.toml")[0] == 0
    trace = Trace.open(Path("import-dump"))
    assert "trainer" not in trace.manifest and trace.manifest["rollout"]["dtype"] == "bfloat16"
    assert not trace.completeness.partial


def test_a_dump_without_a_tokenizer_says_how_reports_show_text(typed):
    write_lines(Path("dump.jsonl"), [plain_record(row) | {"prompt": "1+1"} for row in real_rows(2)])
    assert "--tokenizer MODEL" in typed("import", "dump.jsonl")[2]
    words = ("import", "dump.jsonl", "--force", "--tokenizer", str(bundled("traces/fp8-kv")))
    assert "--tokenizer MODEL" not in typed(*words)[2]
