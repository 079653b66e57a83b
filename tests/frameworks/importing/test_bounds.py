"""Files that expand to more than 1 GiB + 20 × their size are refused with one sentence."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lab.bounds import lists, responses
from mismatch_cli.app.cli import run
from mismatch_cli.base import memory
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.frameworks.importing import opened as _opened
from mismatch_cli.probe.tasks.prompts import PromptSource, load_problems
from mismatch_cli.trace.reader import Trace
from tests.frameworks.importing import layouts


def sample(length: int) -> dict:
    ids, logp = torch.zeros(1, dtype=torch.int64).expand(length), torch.zeros(1).expand(length - 1)
    return {"tokens": ids, "response_length": length - 1, "rollout_log_probs": logp}


def write_packed(path) -> None:
    layouts.write_records(path, [{"tokens": torch.zeros(10**6, dtype=torch.int64)}])
    with zipfile.ZipFile(path) as saved:
        contents = {name: saved.read(name) for name in saved.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in contents.items():
            packed.writestr(name, content)


BOMBS = {
    "ids.parquet": lambda path: pq.write_table(responses(200, 10**5), path, compression="zstd"),
    "row.parquet": lambda path: pq.write_table(responses(1, 2 * 10**7), path, compression="zstd"),
    "rows.parquet": lambda path: pq.write_table(responses(10**6, 1), path, compression="zstd"),
    "expanded.pt": lambda path: layouts.write_records(path, [sample(10**7)]),
    "repeated.pt": lambda path: layouts.write_records(path, [sample(10**5)] * 200),
    "packed.pt": write_packed,
    "strangers.parquet": lambda path: pq.write_table(
        responses(1, 2 * 10**7).rename_columns(["mine", "yours", "others"]),
        path,
        compression="zstd",
    ),
    "batch.jsonl": lambda path: layouts.write_lines(
        path,
        [
            dict.fromkeys(("prompt_ids", "logp_rollout"), [[1]] * 10**4)
            | {"response_ids": [[1]] * 10**4, "prompt_id": "x" * 5 * 10**5}
        ],
    ),
    "line.jsonl": lambda path: path.write_text(
        '{"prompt_ids":[1],"response_ids":[' + "[]," * 10**6 + "1]}\n"
    ),
}


@pytest.fixture
def small(monkeypatch) -> None:
    """Make the bound sixteen times smaller, and so the test."""
    monkeypatch.setattr(memory, "_ALLOWED", 2**26)
    monkeypatch.setattr(_opened, "LONGEST_LINE", 2**20)


@pytest.mark.parametrize("name", BOMBS)
def test_a_dump_that_holds_more_than_its_size_explains_is_refused(tmp_path, capfd, small, name):
    BOMBS[name](tmp_path / name)
    assert run(["import", str(tmp_path / name), "-o", str(tmp_path / "out")]) == 1
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert any(
        words in said
        for words in ("expands far beyond its size", "compressed records", "line 1 is longer than")
    ), said
    assert not (tmp_path / "out").exists()


def test_memory_that_nobody_foresaw_is_refused_by_the_system(tmp_path):
    message = r"dump\.x expands far beyond its size.*1 GiB \+ 20 × its size"
    with pytest.raises(MismatchError, match=message), memory.bounded("dump.x", 10):
        np.empty(2**28)  # 2 GiB, never touched
    np.empty(2**28)  # no longer bounded
    with pytest.raises(MemoryError), memory.limited(2**24):
        bytearray(2**28)


def test_an_ordinary_file_stays_far_below_its_bound():
    table = responses(100, 100)
    random = np.random.default_rng(0)
    values = pa.array(random.normal(size=10_000).astype(np.float32))
    table = table.set_column(
        2, "logp_rollout", pa.ListArray.from_arrays(table["response_ids"].chunk(0).offsets, values)
    )
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    sink.seek(0)
    metadata = pq.read_metadata(sink)
    assert memory.decoded_bytes(metadata) == 200 * 100 + 100 * 4 + 2 * 4 * 10_000
    assert memory.decoded_bytes(metadata, ["logp_rollout"]) == 200 * 100 + 4 * 10_000
    assert memory.decoded_bytes(metadata) < memory._TIMES * len(sink.getvalue())


def test_a_trace_and_its_vocabulary_have_the_same_bound(tmp_path, small):
    fixed_trace = Path(shutil.copytree(bundled("traces") / "fp8-kv", tmp_path / "trace"))
    shard = fixed_trace / "shard-00000.parquet"
    table = pq.read_table(shard)
    names = table.column_names
    big = {"response_ids": lists(1, 10**7, np.int32), "logp_rollout": lists(1, 10**7, np.float32)}
    columns = [
        pa.chunked_array([big[n].cast(table.schema.field(n).type)]) if n in big else table[n][:1]
        for n in names
    ]
    pq.write_table(pa.table(columns, schema=table.schema), shard, compression="zstd")
    with pytest.raises(MismatchError, match=r"shard-00000\.parquet expands far beyond its size"):
        list(Trace.open(fixed_trace).batches([]))
    pq.write_table(
        pa.table(
            {
                "id": pa.array(np.zeros(10**6, np.int32)),
                "bytes": pa.array([b""] * 10**6, pa.binary()),
            }
        ),
        fixed_trace / "vocab.parquet",
        compression="zstd",
    )
    with pytest.raises(MismatchError, match=r"vocab\.parquet expands far beyond its size"):
        _ = Trace(fixed_trace).vocabulary


def test_prompt_files_have_the_same_bound(tmp_path, small):
    text = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(2000, np.int32)), pa.array(["x" * 10**6])
    )
    pq.write_table(pa.table({"problem": text}), tmp_path / "p.parquet", compression="zstd")
    with pytest.raises(MismatchError, match=r"p\.parquet expands far beyond its size"):
        load_problems(PromptSource(str(tmp_path / "p.parquet")))


@pytest.mark.parametrize("depth", [1000, 10**5])
def test_json_of_any_depth_is_read_or_left_out(tmp_path, capfd, depth):
    nested = "[" * depth + "]" * depth
    for layout, key in (("plain", "advantage"), ("nemo", "token_loss_mask")):
        names = (
            ("prompt_ids", "response_ids", "logp_rollout")
            if layout == "plain"
            else ("token_ids", "generation_logprobs")
        )
        fields = ", ".join(f'"{name}": [1]' for name in names)
        path = tmp_path / "train_data_step0.jsonl"
        path.write_text(f'{{{fields}, "{key}": {nested}}}\n')
        assert run(["import", str(path), "-o", str(tmp_path / "out"), "--force"]) in (0, 1)
        assert "Unexpected" not in capfd.readouterr().err
    path.write_text(f'{{"prompt": {nested}, "completion": "a", "tokens": {nested}}}\n')
    for flags in ([], ["--columns", "response_ids=tokens"]):
        assert run(["import", str(path), "-o", str(tmp_path / "none"), *flags]) in (1, 2)
        assert "Unexpected" not in capfd.readouterr().err


def test_half_a_character_in_a_dump_is_left_out_or_named(tmp_path, capfd):
    path = tmp_path / "dump.jsonl"
    rows = [
        {"prompt_ids": [1], "response_ids": [2], "logp_rollout": [-1.0], "prompt_id": name}
        for name in ("a", "\ud800")
    ]
    layouts.write_lines(path, rows)
    assert run(["import", str(path), "-o", str(tmp_path / "out"), "--json"]) == 0
    assert '"lines with values of the wrong type": 1' in capfd.readouterr().out
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a\udcff.jsonl").write_text("{}")
    assert run(["import", str(tmp_path / "folder"), "-o", str(tmp_path / "out2")]) == 1
    assert "not UTF-8. Rename the file" in capfd.readouterr().err


IN_ONE_PROCESS = """
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing.driver import Import, import_dump
progress = SimpleNamespace(say=print, counting=lambda *_, **__: nullcontext(lambda _: None))
for name in ("unknown", "plain"):
    folder = Path(name)
    folder.mkdir()
    try:
        import_dump(Import([Path(f"{name}.jsonl")]), folder, progress)
    except MismatchError as error:
        print(error)
"""


def test_what_arrow_reserves_is_not_the_size_of_a_file(tmp_path):
    """It reserves a gigabyte once in a process: here in the second import, as in a `watch`."""
    pair = {"response_ids": [5], "logp_trainer": [-1.0]}
    layouts.write_lines(tmp_path / "unknown.jsonl", [pair])
    layouts.write_lines(tmp_path / "plain.jsonl", [pair | {"logp_rollout": [-1.5]}])
    command = [sys.executable, "-c", IN_ONE_PROCESS]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "unknown.jsonl: unrecognized format" in shown
    assert "Importing 1 file" in shown and "expands far beyond" not in shown
