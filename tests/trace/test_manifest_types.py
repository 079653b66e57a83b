"""Whatever is in a manifest, readers get the types that they expect, or one sentence that names
the key.
"""

from __future__ import annotations

import json
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled, bundled_names
from mismatch_cli.trace import manifest_types
from mismatch_cli.trace.manifest import read_manifest
from mismatch_cli.trace.reader import Trace
from tests.trace.conftest import row_columns

HOSTILE = (
    None,
    True,
    -3,
    0.5,
    2**64,
    10**400,
    float("nan"),
    "x",
    "7",
    [],
    [[1]],
    {},
    {"a": {"b": 1}},
)


@pytest.fixture(scope="module")
def manifests():
    names = bundled_names()
    return {
        name: json.loads((bundled("traces") / name / "manifest.json").read_text()) for name in names
    }


def test_every_typed_key_refuses_other_values(tmp_path):
    """Each in a manifest that has nothing else; a section that would lack something is not
    added.
    """
    head = {"format": "mismatch-cli trace", "format_version": 1}
    refused = 0
    for key in manifest_types.REQUIRED | manifest_types.OPTIONAL:
        above, _, last = key.rpartition(".")
        in_list = last == "*" and manifest_types.may_hold(above, [])
        named = key.replace("*", "0")
        for value in HOSTILE:
            content = [value] if in_list else {named.rpartition(".")[2]: value}
            for name in reversed(above.split(".") if above else []):
                content = {name: content}
            (tmp_path / "manifest.json").write_text(json.dumps(head | content))
            if manifest_types.may_hold(key, value):
                continue
            with pytest.raises(MismatchError) as raised:
                read_manifest(tmp_path)
            said = str(raised.value)
            assert f"damaged ({named} is " in said and "\n" not in said and len(said) < 400, said
            refused += 1
    assert refused > 900


def test_what_was_recorded_fits(manifests, tmp_path):
    for content in manifests.values():
        manifest_types.check_contents(tmp_path, content)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout.engine", [1]), ("rollout.version", {}), ("rollout.device", 3),
        ("rollout.tensor_parallel_size", "2"),
        ("trainer.model", [["a"]]), ("trainer.device", {}), ("trainer.transformers", 5),
        ("config.engine_args", [1]),
        ("imported",
         {"title": [], "file_count": 1, "left_out": {}, "left_out_first": {}, "noted": {}}),
    ],
)  # fmt: skip
def test_a_report_names_the_key(write_trace, manifests, capsys, key, value):
    content = json.loads(json.dumps(manifests["fp8-kv"])) | {"shards": 1}
    place, (*above, last) = content, key.split(".")
    for name in above:
        place = place[name]
    place[last] = value
    assert run(["report", str(write_trace(row_columns(), manifest=content)), "--quiet"]) == 1
    assert f"manifest.json is damaged ({key}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "promise", [{"shards": 10**6}, {"shard_rows": {f"shard-{i}": 1 for i in range(10**5 + 1)}}]
)
def test_more_shards_than_have_names_are_refused_in_seconds(write_trace, promise):
    folder, began = write_trace(row_columns(), manifest=promise), time.monotonic()
    with pytest.raises(MismatchError, match=rf"damaged \({next(iter(promise))} is .*\). Record"):
        Trace.open(folder)
    assert time.monotonic() - began < 5


def test_as_many_as_have_names_are_compared_in_seconds(write_trace):
    trace, began = (
        Trace.open(write_trace(row_columns(), manifest={"shards": 10**5})),
        time.monotonic(),
    )
    assert len(trace.completeness.missing) == 10**5 - 1
    assert time.monotonic() - began < 5


def test_a_footer_with_a_name_that_is_not_utf_8(write_trace):
    folder = write_trace(row_columns())
    path = folder / "shard-00000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("strange", pa.nulls(len(table), pa.int8())), path)
    path.write_bytes(path.read_bytes().replace(b"strange", b"stran\xff\xfe"))
    with pytest.raises(MismatchError, match=r"shard-00000.parquet is damaged"):
        Trace.open(folder)
