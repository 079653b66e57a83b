"""The manifest compared with the disk: lost shards make a trace partial, foreign ones are
refused.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.trace.manifest import read_manifest, remedy, write_manifest
from mismatch_cli.trace.reader import Trace


@pytest.fixture
def trace(tmp_path) -> Path:
    """Six shards, whose rows the manifest lists."""
    folder = tmp_path / "run" / "trace"
    shutil.copytree(bundled("traces") / "fp8-kv", folder)
    rows = {path.name: pq.read_metadata(path).num_rows for path in folder.glob("shard-*")}
    write_manifest(folder, read_manifest(folder) | {"shard_rows": rows, "command": "probe"})
    return folder


def change(folder: Path, **content: object) -> None:
    write_manifest(folder, read_manifest(folder) | content)


def test_a_complete_trace_is_complete(trace):
    completeness = Trace.open(trace).completeness
    assert not completeness.partial and completeness.reasons == ()
    assert (
        completeness.responses == completeness.recorded_responses == Trace.open(trace).num_responses
    )


@pytest.mark.parametrize("lost", [[0], [2], [5], [1, 2, 3, 4, 5]])
@pytest.mark.parametrize("counted", [True, False])
def test_lost_shards_are_named(trace, lost, counted):
    if not counted:  # a trace of an earlier version, which only counts the shards
        change(trace, shard_rows={f"shard-{i:05d}.parquet": None for i in range(6)})
    names = [f"shard-{index:05d}.parquet" for index in lost]
    for name in names:
        (trace / name).unlink()
    completeness = Trace.open(trace).completeness
    assert completeness.partial and completeness.missing == tuple(names)
    assert f"{6 - len(lost)} of 6 shards exist (missing: {names[0]}" in completeness.reasons[0]
    assert (completeness.recorded_responses is not None) == counted


def test_a_shard_that_lost_rows_is_named(trace):
    shard = trace / "shard-00003.parquet"
    pq.write_table(pq.read_table(shard).slice(0, 2), shard)
    assert Trace.open(trace).completeness.reasons == (
        "shard-00003.parquet holds fewer responses than were recorded",
    )


def test_shards_of_another_trace_are_refused(trace):
    shutil.copy(trace / "shard-00001.parquet", trace / "shard-00006.parquet")
    with pytest.raises(
        MismatchError, match=r"shard-00006.parquet is not one of the 6 shards that the manifest"
    ):
        Trace.open(trace)
    (trace / "shard-00004.parquet").unlink()  # the promised number, but not the same shards
    with pytest.raises(MismatchError, match=r"shard-00006.parquet is not one of the 6 shards"):
        Trace.open(trace)
    (trace / "shard-00006.parquet").unlink()
    rows = read_manifest(trace)["shard_rows"]
    change(trace, shard_rows=rows | {"shard-00000.parquet": 3})
    with pytest.raises(
        MismatchError, match=r"shard-00000.parquet holds \d+ responses, but 3 were recorded"
    ):
        Trace.open(trace)


def test_only_an_earlier_rescore_gave_shards_other_names(trace):
    """Of its shards the number counts, as its manifest does not list them."""
    (trace / "shard-00005.parquet").rename(trace / "shard-00009.parquet")
    change(trace, rescored={}, shards=6)
    with pytest.raises(MismatchError, match=r"shard-00009.parquet is not one of the 6 shards"):
        Trace.open(trace)
    content = read_manifest(trace)
    del content["shard_rows"]
    write_manifest(trace, content)
    assert Trace.open(trace).completeness.shards == 6
    shutil.copy(trace / "shard-00009.parquet", trace / "shard-00007.parquet")
    with pytest.raises(MismatchError, match=r"is not one of the 6 shards"):
        Trace.open(trace)


def test_scoring_that_was_limited_makes_a_trace_partial(trace):
    path = trace / "shard-00005.parquet"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["logp_recomputed"]), path)
    completeness = Trace.open(trace).completeness
    assert (
        completeness.unscored == table.num_rows
        and "are unscored or only partly scored" in completeness.reasons[0]
    )
    content = json.loads((trace / "manifest.json").read_text())
    # Only the scored ones show that it should be scored
    for name in ("trainer", "recomputed", "command"):
        content.pop(name, None)
    write_manifest(trace, content)
    pq.write_table(table.drop_columns(["logp_trainer", "logp_recomputed"]), path)
    assert Trace.open(trace).completeness.unscored == table.num_rows


def test_a_recording_that_was_cut_short_says_so_itself(trace):
    change(trace, cut_short="step 3 ended at 2 of 4 updates")
    assert Trace.open(trace).completeness.reasons == ("step 3 ended at 2 of 4 updates",)


@pytest.mark.parametrize(
    "rows", [{"shard-00000.parquet": -1}, {"shard-00000.parquet": 1.5}, [], "x", {"a": True}]
)
def test_invalid_counts_are_damage(trace, rows):
    change(trace, shard_rows=rows)
    with pytest.raises(MismatchError, match=r"manifest.json is damaged \(shard_rows"):
        Trace.open(trace)


@pytest.mark.parametrize("shards", [-1, 10**18])
def test_an_impossible_number_of_shards_is_damage(trace, shards):
    change(trace, shards=shards)
    with pytest.raises(MismatchError, match=r"manifest.json is damaged \(shards is"):
        Trace.open(trace)


def test_a_trace_that_does_not_count_its_shards_is_read(trace):
    content = read_manifest(trace)
    write_manifest(
        trace, {name: value for name, value in content.items() if not name.startswith("shard")}
    )
    (trace / "shard-00001.parquet").unlink()
    completeness = Trace.open(trace).completeness
    assert (
        not completeness.partial
        and completeness.recorded_shards is None
        and completeness.shards == 5
    )


def test_the_remedy_is_a_command_that_fits(trace):
    for path in trace.glob("shard-*"):
        path.unlink()
    with pytest.raises(
        MismatchError, match=r"no finished shard yet. Resume with: mismatch-cli probe --resume"
    ):
        Trace.open(trace)
    folder = Path("a b/held-out")
    assert remedy(folder, {"command": "curate"}).endswith(
        "mismatch-cli curate --resume --output 'a b'"
    )
    assert "its own command and --resume" in remedy(folder, {"command": "train"})
    assert remedy(folder, {"command": "import", "imported": {}}) == "Import the dump again."
    unscored = remedy(Path("run/trace"), {"command": "import", "imported": {}}, unscored=True)
    assert unscored.endswith("mismatch-cli rescore run --trainer-model MODEL")


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1, "1 unreadable shard is left out (0.parquet)"),
        (2, "2 unreadable shards are left out (0.parquet, 1.parquet)"),
    ],
)
def test_unreadable_shards_are_counted_in_words(trace, count, words):
    broken = {f"{n}.parquet": "it ends early" for n in range(count)}
    completeness = replace(Trace.open(trace).completeness, broken=broken)
    assert completeness.partial
    assert completeness.reasons == (words,)
