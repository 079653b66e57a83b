"""The command that an error advises works in exactly that situation."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from contextlib import chdir
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.places import bundled
from mismatch_cli.trace.manifest import read_manifest, write_manifest
from tests.frameworks.importing.layouts import open_instruct_record, real_rows, write_lines

MODEL = str(bundled("model"))
NO_MORE = ["--noise-responses", "0", "--top-logprobs", "2"]
SMALL = [
    *["--engine", "hf", "--num-prompts", "2", "--samples-per-prompt", "2", "--max-tokens", "4"],
    *NO_MORE,
]
READERS = (["report"], ["clipstats", "-a", "pg-is"], ["diagnose"], ["gate"])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    with chdir(folder):
        assert run(["probe", MODEL, *SMALL, "-o", "run", "-q"]) == 0
    return folder / "run"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def advised(error: str) -> list[str]:
    """The command at the end of an error, with its placeholders filled in."""
    command = shlex.split(re.findall(r"mismatch-cli ([a-z]+ .*?)(?:\. [A-Z].*)?$", error)[-1])
    return [MODEL if word in ("MODEL", "SAMPLER", "LATER") else word for word in command]


def test_an_import_without_a_trainer_is_to_be_rescored(typed):
    rows = real_rows(4)
    write_lines(
        Path("x_rollouts_000000.jsonl"),
        [open_instruct_record(row, i) for i, row in enumerate(rows)],
    )
    assert (
        typed("import", "x_rollouts_000000.jsonl", "-o", "my run", "--temperature", "1", "-q")[0]
        == 0
    )
    for reader in (*READERS, ["compare", str(bundled("traces") / "float32")]):
        code, _, error = typed(*reader, "my run")
        assert code == 1 and advised(error) == ["rescore", "my run", "--trainer-model", MODEL], (
            reader,
            error,
        )
    assert typed(*advised(error), "-o", "scored", "-q")[0] == 0
    assert typed("clipstats", "scored", "-q")[0] == 0


@pytest.mark.slow
def test_a_probe_that_was_not_scored_resumes(typed, recorded):
    shutil.copytree(recorded, "run")
    shard = Path("run/trace/shard-00000.parquet")
    table = pq.read_table(shard)
    pq.write_table(
        table.drop_columns([name for name in table.column_names if "trainer" in name]), shard
    )
    for reader in (*READERS, ["compare", str(recorded)]):
        code, _, error = typed(*reader, "run")
        assert code == 1 and advised(error) == ["probe", "--resume", "--output", "run"], (
            reader,
            error,
        )
    assert typed(*advised(error), "-q")[0] == 0
    assert pq.read_table(shard).column_names.count("logp_trainer") == 1


def test_a_damaged_shard_is_replaced_in_the_way_that_its_trace_allows(typed, recorded):
    shutil.copytree(recorded, "run")
    shard = Path("run/trace/shard-00000.parquet")
    before = shard.read_bytes()
    shard.write_bytes(before[:-10])
    code, _, error = typed("report", "run")
    assert code == 1 and "Delete it. Resume with: mismatch-cli probe --resume --output run" in error
    shard.unlink()
    assert typed(*advised(error), "-q")[0] == 0 and shard.read_bytes() == before
    write_manifest(
        shard.parent, read_manifest(shard.parent) | {"command": "import", "imported": _imported()}
    )
    shard.write_bytes(before[:-10])
    assert "Import the dump again." in typed("report", "run")[2]


def _imported() -> dict[str, object]:
    return {"title": "x", "file_count": 1, "left_out": {}, "left_out_first": {}, "noted": {}}


def test_rescoring_takes_the_model_that_the_trace_names(typed, recorded):
    assert (
        typed("rescore", str(recorded), "--trainer-dtype", "float32", "-o", "again", "-q")[0] == 0
    )
    manifest = read_manifest(Path("again/trace"))
    assert (manifest["trainer"]["model"], manifest["trainer"]["dtype"]) == (MODEL, "float32")
    assert manifest["config"]["trainer"]["model"] == MODEL
    assert typed("rescore", "again", "--attn", "eager", "-o", "third", "-q")[0] == 0
    assert typed("rescore", "again", "--weights", "newer")[0] == 2  # there are no newer ones
    shutil.copytree(recorded, "step")
    write_manifest(Path("step/trace"), read_manifest(Path("step/trace")) | {"command": "train"})
    code, _, error = typed("rescore", "step")  # it names the model that training started from
    assert code == 2 and "does not name the model to score with. Add --trainer-model" in error


@pytest.mark.slow
def test_report_renews_its_own_folder(typed):
    for _ in range(2):
        assert typed("report", "-q")[0] == 0  # of the bundled trace, into report/
    Path("report/summary.json").write_text('{"format": "mismatch-cli compare"}')
    code, _, error = typed("report", "-q")
    assert code == 1 and "Replace its report with --force" in error
    assert typed("report", "-q", "--force")[0] == 0


def test_resume_is_advised_where_it_works(typed, recorded):
    shutil.copytree(recorded, "run")
    code, _, error = typed("probe", MODEL, *SMALL, "-o", "run")
    assert code == 1 and "Continue it with --resume" in error
    code, _, error = typed("rescore", "-o", "run")
    assert code == 1 and "--resume" not in error and "Replace it with --force" in error
    Path("own").mkdir()
    Path("own/thesis.txt").touch()
    code, _, error = typed("train", "-o", "own")
    assert code == 1 and "--resume" not in error and "contains no training run" in error
    Path("trained").mkdir()
    Path("trained/config.toml").write_text("steps = 3\n")
    Path("trained/metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    code, _, error = typed("train", "-o", "trained")
    assert code == 1 and "Its settings differ" in error and "--resume" not in error
    for name in ("clipstats", "diagnose", "gate"):
        code, _, error = typed(name, "trained")
        assert code == 1 and advised(error) == ["report", "trained"], error
    assert typed(*advised(error), "-q")[0] == 0


def test_masks_that_a_trace_cannot_support_say_what_to_type(typed, recorded):
    code, _, error = typed("clipstats", str(recorded), "-a", "minirl")
    assert code == 1 and advised(error) == [
        "rescore",
        str(recorded),
        "--trainer-model",
        MODEL,
        "--weights",
        "newer",
    ]
    assert typed(*advised(error), "-o", "later", "-q")[0] == 0
    assert typed("clipstats", "later", "-a", "minirl", "-q")[0] == 0
    shard = Path("later/trace/shard-00000.parquet")
    pq.write_table(pq.read_table(shard).drop_columns(["logp_recomputed"]), shard)
    manifest = json.loads(Path("later/trace/manifest.json").read_text())
    manifest.pop("recomputed")
    write_manifest(Path("later/trace"), manifest)
    code, _, error = typed("clipstats", "later", "-a", "minirl")
    assert code == 1 and advised(error) == [
        "rescore",
        "later",
        "--keep-trainer",
        "--trainer-model",
        MODEL,
    ]
    assert typed(*advised(error), "-o", "filled", "-q")[0] == 0
    assert typed("clipstats", "filled", "-a", "minirl", "-q")[0] == 0


@pytest.mark.slow
def test_the_lines_that_test_a_suspect_work(typed):
    """As `diagnose` prints them for a run in bfloat16: a similar probe, a rescore, and their
    comparison.
    """
    both = ["--rollout-dtype", "bfloat16", "--trainer-dtype", "bfloat16"]
    assert typed("probe", MODEL, *SMALL, *both, "-o", "my run", "-q")[0] == 0
    assert typed("diagnose", "my run", "-q")[0] == 0
    suspects = json.loads(Path("my run/diagnosis/summary.json").read_text())["suspects"]
    lines_by_setting = {
        suspect["setting"]: [shlex.split(line)[1:] for line in suspect["test"]]
        for suspect in suspects
    }
    assert lines_by_setting["rollout.dtype"][0][:3] == ["probe", "--like", "my run"]
    assert lines_by_setting["trainer.head_dtype"][0][:2] == ["rescore", "my run"]
    for setting in ("rollout.dtype", "trainer.head_dtype"):
        for line in lines_by_setting[setting]:
            assert typed(*line, "-q", "--force")[0] == 0, line
    flags = read_manifest(Path("float32/trace"))["flags"]
    assert (flags["num_prompts"], flags["max_tokens"], flags["rollout_dtype"]) == (2, 4, "float32")


def test_like_takes_over_what_is_not_typed(typed):
    code, _, error = typed("probe", "--like", "fp8-kv", "--kv-cache-dtype", "auto", "--resume")
    assert code == 2 and "--like" in error
    code, _, error = typed("rescore", "float32", "--noise-responses", "0", "-o", "scored", "-q")
    assert code == 0, error
    code, _, error = typed("probe", "--like", "scored")
    assert code == 1 and "was not recorded by `probe`" in error
