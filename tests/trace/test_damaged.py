"""Damage that Parquet and JSON readers do not notice gets one sentence, whatever the files hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.trace.files import replacing_folder
from mismatch_cli.trace.manifest import training_runs
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.vocabulary import Vocabulary
from tests.trace.conftest import row_columns


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"threads": {}}, "threads is {}"),
        ({"config": {"sampling": {"temperature": "hot"}}}, "config.sampling.temperature is 'hot'"),
        ({"rollout": []}, r"rollout is \[\]"),
        ({"imported": {"left_out": 3}}, "imported.left_out is 3"),
        ({"prompts": {"skipped": None}}, "prompts.skipped is None"),
    ],
)
def test_a_manifest_with_unexpected_types(write_trace, content, said):
    folder = write_trace(row_columns(), manifest=content)
    with pytest.raises(MismatchError, match=rf"manifest.json is damaged \({said}\). Record"):
        Trace.open(folder)


@pytest.mark.parametrize(
    "missing", ["trainer.head_dtype", "rollout.kv_cache_dtype", "prompts.template"]
)
def test_a_manifest_without_what_reports_show(write_trace, missing):
    """A section may be absent, but not incomplete."""
    content = json.loads((bundled("traces/fp8-kv") / "manifest.json").read_text())
    section, name = missing.split(".")
    del content[section][name]
    with pytest.raises(MismatchError, match=rf"damaged \({missing} is missing\). Record"):
        Trace.open(write_trace(row_columns(), manifest=content))
    del content[section]
    assert Trace.open(write_trace(row_columns(), manifest=content)).num_responses == 3


def test_a_manifest_that_is_nested_too_deeply(write_trace):
    folder = write_trace(row_columns())
    (folder / "manifest.json").write_text('{"a":' * 100_000)
    with pytest.raises(MismatchError, match="is damaged"):
        Trace.open(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        pa.table({"id": [1]}),
        pa.table({"id": [1], "bytes": pa.array([None], pa.binary())}),
        pa.table({"id": ["x"], "bytes": [b"x"]}),
    ],
)
def test_a_file_that_is_not_a_vocabulary(tmp_path, content):
    path = tmp_path / "vocab.parquet"
    path.write_bytes(content) if isinstance(content, bytes) else pq.write_table(content, path)
    with pytest.raises(MismatchError, match=r"vocab.parquet is damaged \(.*Delete it"):
        Vocabulary.read(tmp_path)


@pytest.mark.parametrize(
    "name", ["step", "prompt_id", "version_rollout", "version_trainer", "prompt_ids"]
)
def test_a_key_that_is_null(write_trace, name):
    columns = row_columns()
    columns[name] = [None, *columns[name][1:]]
    with pytest.raises(
        MismatchError, match=f"column {name} is empty in some rows. Record or import"
    ):
        list(Trace.open(write_trace(columns)).batches())


def test_a_prompt_with_a_hole(write_trace):
    folder = write_trace(row_columns(prompt_ids=[[1, None], [1, 2], [3]]))
    with pytest.raises(MismatchError, match="column prompt_ids holds a null among its values"):
        list(Trace.open(folder).batches())


def test_a_shard_that_holds_a_column_twice(write_trace):
    folder = write_trace(row_columns())
    path = folder / "shard-00000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("logp_rollout", table.column("logp_rollout")), path)
    with pytest.raises(MismatchError, match=r"holds a column twice. Restore it"):
        list(Trace.open(folder).batches())


def test_a_training_run_names_one_of_its_traces(write_trace, tmp_path):
    folder = write_trace(row_columns())
    (tmp_path / "run" / "traces").mkdir(parents=True)
    folder.rename(tmp_path / "run" / "traces" / "step-2")
    with pytest.raises(
        MismatchError, match=r"run is a training run. Name .* as .*run/traces/step-2"
    ):
        Trace.open(tmp_path / "run")


def test_a_folder_of_watch_is_not_a_training_run(write_trace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    watched = tmp_path / "watch-run"
    watched.mkdir()
    (watched / "metrics.jsonl").write_text("{}")
    assert training_runs(Path()) == [Path("watch-run")]
    (watched / "watch.json").write_text("{}")
    assert training_runs(Path()) == [] and training_runs(Path("watch-run")) == [Path("watch-run")]
    with pytest.raises(MismatchError, match=r"\. holds no trace: .* its trace/ folder\.$"):
        Trace.open(Path())
    with pytest.raises(
        MismatchError, match=r"watch-run is a folder of `watch`.*: mismatch-cli report watch-run$"
    ):
        Trace.open(Path("watch-run"))
    (tmp_path / "run").mkdir()
    write_trace(row_columns()).rename(tmp_path / "run" / "trace")
    with pytest.raises(MismatchError, match=r"\. holds no trace: .* folder, such as run$"):
        Trace.open(Path())


def test_a_missing_run_suggests_the_nearest_folder_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "import-foo").mkdir()
    (tmp_path / "import-fob").write_text("a file")
    for typed, meant in (
        ("import-fo", "import-foo"),
        (tmp_path / "import-fo", "import-foo"),
        ("fp8kv", "fp8-kv"),
    ):
        with pytest.raises(
            MismatchError,
            match=rf"{typed} does not exist\. Did you mean {meant}\? Name a run folder",
        ):
            Trace.open(Path(typed))
    with pytest.raises(
        MismatchError,
        match=r"^runs/foo does not exist\. Name a run folder that `mismatch-cli` wrote",
    ):
        Trace.open(Path("runs/foo"))


def _fail_to_fill(folder):
    with replacing_folder(folder) as temporary:
        (temporary / "weights").write_text("half")
        raise RuntimeError("unexpected pos 64")


def test_a_folder_is_replaced_atomically(tmp_path):
    folder = tmp_path / "model"
    with replacing_folder(folder) as temporary:
        (temporary / "weights").write_text("old")
    with pytest.raises(
        MismatchError, match=r"Could not write .*model \(unexpected pos 64\).*--resume"
    ):
        _fail_to_fill(folder)
    assert (folder / "weights").read_text() == "old"
    with replacing_folder(folder) as temporary:
        (temporary / "config").write_text("new")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "config"]


@pytest.mark.parametrize("column", ["prompt_ids", "response_ids", "topk_ids"])
def test_invalid_token_ids_are_damage(write_trace, column):
    """A hand-written trace: its types are right, but its ids are invalid."""
    rows = row_columns()[column]
    ids = [np.array(row) for row in rows]
    ids[1].flat[0] = -3
    folder = write_trace(row_columns(**{column: ids}))
    with pytest.raises(MismatchError, match=f"column {column} holds -3, which is not a token id"):
        list(Trace.open(folder).batches())
