"""Which tokens, rewards, steps and endings a trace of prime-rl has: small cases by hand."""

from __future__ import annotations

import numpy as np
import pytest

from lab.makers.make_dump import export_record
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.rows import SHIFTED
from mismatch_cli.frameworks.importing.sources import DumpFile
from mismatch_cli.frameworks.prime_rl import _traces, importer
from tests.frameworks.importing.layouts import Row, imported, prime_rl, real_rows, write_lines
from tests.frameworks.importing.prime_rl_run import Run, episode_of, node, sealed, trained

NAN = float("nan")


def trace_of(*nodes: Row, **more) -> Row:
    return {"id": "t0", "task": {}, "nodes": list(nodes)} | more


def sampled(ids: list[int], logp: list[float], parent: int = 0, **more) -> Row:
    return node("assistant", ids, logp, parent=parent, **more)


def table_of(tmp_path, *traces: Row):
    path = write_lines(tmp_path / "traces.jsonl", list(traces))
    return imported(path, into=tmp_path / "trace")


def test_values_of_a_node_are_those_of_its_sampled_tokens_in_order(tmp_path):
    """Two branches that share a prompt; a node without a mask was not sampled, and in one node
    only some tokens were. Values of nodes that were not sampled are those of no token.
    """
    prompt = node("user", [1, 2]) | {"mask": None, "advantages": [9.0, 9.0]}
    partly = sampled([5, 6, 7], [-0.25, -0.5]) | {
        "mask": [True, False, True],
        "trainer_logprobs": [-0.375, -0.75],
        "advantages": [2.0, 3.0],
    }
    tool = node("tool", [8], parent=1)
    last = sampled([9, 10], [-1.0, -1.5], 2)
    other = sampled([11], [-2.0]) | {"entropies": [0.5]}
    table, about = table_of(tmp_path, trace_of(prompt, partly, tool, last, other))
    rows = table.to_pydict()
    assert rows["prompt_ids"] == [[1, 2]] * 2
    assert rows["response_ids"] == [[5, 6, 7, 8, 9, 10], [11]]
    assert rows["loss_mask"] == [[True, False, True, False, False, False], [True]]
    expected = [-0.25, NAN, -0.5, NAN, -1.0, -1.5]
    assert np.array_equal(rows["logp_rollout"][0], expected, equal_nan=True)
    expected = [-0.375, NAN, -0.75, NAN, NAN, NAN]
    assert np.array_equal(rows["logp_trainer"][0], expected, equal_nan=True)
    assert np.array_equal(rows["advantage"][0], [2.0, NAN, 3.0, *[NAN] * 3], equal_nan=True)
    assert rows["entropy_trainer"] == [None, [0.5]] and rows["step"] == [0, 0]
    assert rows["logp_rollout"][1] == [-2.0] and np.isnan(rows["advantage"][1]).all()
    assert about["left_out"] == {} and SHIFTED not in about["noted"]


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": [-0.5]},
        {"logprobs": [-0.5, -1.0, -1.5]},
        {"mask": [True]},
        {"mask": [False, True, True]},
        {"mask": [False, True]},
        {"token_ids": [5, 2**40]},
        {"logprobs": [-0.5, "-1"]},
    ],
)
def test_a_record_that_contradicts_itself_is_left_out_alone(tmp_path, more):
    """Where a value is missing, nobody knows which token it belongs to."""
    nodes = node("user", [1]), sampled([5, 6], [-0.5, -1.0])
    table, about = table_of(tmp_path, trace_of(nodes[0], nodes[1] | more), trace_of(*nodes))
    assert table.column("logp_rollout").to_pylist() == [[-0.5, -1.0]]
    assert about["left_out"] == {_traces.UNREADABLE: 1}


@pytest.mark.parametrize(
    ("more", "reward", "reason"),
    [
        ({}, None, "unknown"),
        ({"rewards": {}, "calls": []}, None, "unknown"),
        ({"rewards": {"a": {"score": 0.5}, "b": None}}, 0.5, "unknown"),
        (
            {"rewards": {"a": {"score": 0.5, "weight": 3.0}, "b": {"score": 4.0, "weight": -0.5}}},
            -0.5,
            "unknown",
        ),
        ({"calls": [{"finish_reason": "length"}, {"finish_reason": "stop"}]}, None, "stop"),
        (
            {"calls": [{"finish_reason": "stop"}, {"error": "x", "finish_reason": "length"}]},
            None,
            "stop",
        ),
        ({"calls": [{"error": "x", "finish_reason": "stop"}]}, None, "unknown"),
        ({"stop_condition": "max_turns", "calls": [{"finish_reason": "stop"}]}, None, "length"),
        ({"stop_condition": "solved", "calls": [{"finish_reason": "stop"}]}, None, "stop"),
    ],
)
def test_rewards_are_weighted_and_the_last_call_without_an_error_counts(
    tmp_path, more, reward, reason
):
    nodes = node("user", [1]), sampled([5], [-0.5])
    table, _ = table_of(tmp_path, trace_of(*nodes, **more))
    has_reward = "reward" in table.column_names
    assert (table.column("reward").to_pylist() if has_reward else [None]) == [reward]
    assert table.column("finish_reason").to_pylist() == [reason]


@pytest.mark.parametrize(
    ("stages", "step"),
    [
        ({"ship": {"step": 4}, "arrival": {"step": 3}, "dispatch": {"step": 2}}, 4),
        ({"ship": {"time": 1.0}, "arrival": {"step": 3}, "dispatch": {"step": 2}}, 3),
        ({"ship": None, "arrival": {"step": None}, "dispatch": {"step": 2}}, 2),
        ({"arrival": {"step": 0}}, 0),
        ({}, 7),
    ],
)
def test_the_step_is_that_of_the_latest_stage_which_has_one(tmp_path, stages, step):
    row = {"prompt_ids": [1], "response_ids": [5], "logp_rollout": [-0.5], "finish_reason": "stop"}
    episode = episode_of(row | {"reward": 1.0, "step": 7}, "t0")
    episode["traces"][0]["info"] = {"kind": "train"} | stages
    table, _ = table_of(tmp_path, episode)
    assert table.column("step").to_pylist() == [step]


def test_a_sequence_ends_where_the_values_of_the_trainer_end(tmp_path):
    """It was cut for training; a null of the trainer is outside the loss."""
    row = {
        "prompt_ids": [1, 2],
        "response_ids": [5, 6, 7, 8],
        "logp_rollout": [-0.5, -1.0, -1.5, -2.0],
        "logp_trainer": [-0.5, None, -1.75],
        "entropy_trainer": [0.25, 0.5, 0.75],
        "finish_reason": "stop",
        "reward": 1.0,
        "step": 3,
    }
    run = Run(tmp_path / "run")
    run.append("stream", [episode_of(row, "t0")])
    run.append("annotations/trainer", [trained(row, "t0")])
    table, about = imported(tmp_path / "run", into=tmp_path / "trace")
    rows = table.to_pydict()
    assert rows["response_ids"] == [[5, 6, 7]]
    assert rows["loss_mask"] == [[True, False, True]]
    assert rows["logp_rollout"] == [[-0.5, -1.0, -1.5]]
    assert rows["entropy_trainer"] == [[0.25, 0.5, 0.75]]
    assert np.array_equal(rows["logp_trainer"][0], [-0.5, NAN, -1.75], equal_nan=True)
    assert about["noted"] == {_traces.ROUNDED: 1}


@pytest.mark.parametrize(("value", "is_rounded"), [(-0.1235, True), (-0.12355, False)])
def test_every_value_of_both_sides_must_be_rounded(value, is_rounded):
    for rollout, trainer in (([-0.5, value], [-1.25, None]), ([-0.5, None], [-1.25, value])):
        of_tokens = {"logp_rollout": rollout, "logp_trainer": trainer, "advantage": [0.123456]}
        sequence = _traces._Sequence([5, 6], [True, True], of_tokens, None, 0, None)
        assert _traces._is_rounded(sequence) is is_rounded
    for of_tokens in ({"logp_rollout": [-0.5]}, {}):
        sequence = _traces._Sequence([5], [True], of_tokens, None, 0, None)
        assert _traces._is_rounded(sequence) is bool(of_tokens)


ROW = {
    "prompt_ids": [1],
    "response_ids": [5, 6],
    "logp_rollout": [-0.5, -1.0],
    "logp_trainer": [-0.75, -1.25],
    "entropy_trainer": [0.25, 0.5],
    "advantage": [2.0, 2.0],
    "finish_reason": "stop",
    "reward": 1.0,
    "step": 3,
}


@pytest.mark.parametrize("index", [True, False])
def test_a_run_from_before_there_were_chunks(tmp_path, index):
    """Each producer has one file, and its index names no chunk."""
    run = Run(tmp_path / "run", index=index)
    run.write([ROW, ROW | {"step": 4}])
    for folder in sorted(run.traces.rglob("00000.jsonl")):
        folder.rename(folder.parent.with_name(f"{folder.parent.name}.jsonl"))
        folder.parent.rmdir()
    for path in run.traces.rglob("*.index.jsonl"):
        path.write_text(path.read_text().replace('"chunk": 0', '"chunk": null'))
    table, about = imported(tmp_path / "run", into=tmp_path / "trace")
    assert table.column("logp_trainer").to_pylist() == [ROW["logp_trainer"]] * 2
    assert table.column("advantage").to_pylist() == [ROW["advantage"]] * 2
    assert table.column("step").to_pylist() == [3, 4] and about["left_out"] == {}


@pytest.mark.parametrize("index", [True, False])
def test_a_chunk_that_is_being_sealed_counts_once(tmp_path, index):
    """Its packed file may still be cut off."""
    run = Run(tmp_path / "run", index=index)
    run.write([ROW])
    stream = run.traces / "stream"
    for path in list(run.traces.rglob("00000.jsonl")):
        path.with_name("00000.jsonl.zst").write_bytes(sealed(path.read_bytes())[:20])
    trainer = run.traces / "annotations" / "trainer" / "00000.jsonl"
    table, _ = imported(trainer, into=tmp_path / "trace")
    assert table.column("logp_rollout").to_pylist() == [ROW["logp_rollout"]]
    assert [path.name for path in _traces._chunks(stream)] == ["00000.jsonl"]
    (stream / "00000.jsonl").unlink()
    (stream / "00001.jsonl").touch()
    names = ["00000.jsonl.zst", "00001.jsonl"]
    assert [path.name for path in _traces._chunks(stream)] == names


def test_a_line_that_is_still_being_written_is_read_once_it_is_whole(tmp_path):
    path = tmp_path / "traces" / "stream" / "00000.jsonl"
    write_lines(path, [episode_of(ROW, "t0")])
    line = path.read_bytes()
    other = line.replace(b'"t0"', b'"t1"')
    path.write_bytes(line + other[:-1])
    stream = _traces._Stream(path.parent)
    assert [record["id"] for record in stream.records("t0")] == ["et0"]
    assert stream.records("t1") == []
    path.write_bytes(line + other + line)
    assert len(stream.records("t1")) == 1 and len(stream.records("t0")) == 2


@pytest.mark.parametrize(
    ("keys", "is_of_traces"),
    [
        ({"trace_id", "info", "branches"}, True),
        ({"trace_id", "info", "chunk"}, True),
        ({"trace_id", "info"}, False),
        ({"trace_id", "branches"}, False),
        ({"info", "chunk"}, False),
        ({"traces", "task", "id"}, True),
        ({"nodes", "task"}, True),
        ({"trace_ids", "chunk", "offset"}, True),
        ({"traces", "nodes"}, False),
        ({"trace_ids", "chunk"}, False),
    ],
)
def test_the_keys_of_its_records(keys, is_of_traces):
    assert _traces.is_of_traces(frozenset(keys)) is is_of_traces


def test_a_block_is_full_once_it_has_enough_tokens_and_lines_count_from_1(tmp_path, monkeypatch):
    """Of sequences of 3, 1, 3 and 5 tokens: the first two are exactly a block of 4."""
    monkeypatch.setattr(_traces, "TOKENS_PER_BLOCK", 4)
    prompt = node("user", [1])
    lengths = (2, 0, 2, 4)
    traces = [trace_of(prompt, sampled([5] * n, [-0.5] * n)) for n in lengths]
    traces[1] = trace_of(sampled([5], [-0.5]) | {"parent": None})
    traces.insert(2, trace_of(prompt, {"parent": 0, "mask": [True]}))
    path = write_lines(tmp_path / "traces.jsonl", traces)
    tally, read = Tally(), []
    source = DumpFile(path, "traces.jsonl")
    tables = _traces.blocks(source, tally, read.append)
    assert [table.num_rows for table, _ in tables] == [2, 2]
    assert tally.first == {_traces.UNREADABLE: "traces.jsonl, line 3"}
    assert sum(read) == path.stat().st_size


def test_one_branch_with_its_values_shows_the_trainer(tmp_path):
    """Its files are read rather than the episodes; the other branch was not trained."""
    both = [{"index": 1}, {"index": 0, "trainer_logprobs": [-0.5]}]
    path = write_lines(tmp_path / "00000.jsonl", [{"trace_id": "t0", "branches": both}])
    assert _traces._has_trainer(path)
    write_lines(path, [{"trace_id": "t0", "branches": both[:1]}, {"branches": both}])
    assert not _traces._has_trainer(path)


def test_new_responses_of_a_growing_run_are_in_its_exports_or_its_trainers_annotations(tmp_path):
    """Episodes and the orchestrator's annotations are looked up."""
    run = Run(tmp_path)
    run.write([ROW])
    trainer = run.traces / "annotations" / "trainer" / "00000.jsonl"
    export = write_lines(tmp_path / "token_exports" / "step_0" / "rank_0.jsonl", [{}])
    paths = [export, *sorted(run.traces.rglob("00000.jsonl"))]
    sources = [DumpFile(path, path.name) for path in paths]
    assert [source.path for source in importer.carriers(sources)] == [export, trainer]
    episodes = [source for source in sources if source.path.parent.name == "stream"]
    assert importer.carriers(episodes) == []


def test_the_newest_line_of_an_export_decides_whether_it_is_read(tmp_path):
    lines = [export_record(row, 0, 0) for row in real_rows(2)]
    lines[1]["schema_version"] = 2
    with pytest.raises(MismatchError, match="schema_version 2"):
        imported(write_lines(tmp_path / "rank_0.jsonl", lines), into=tmp_path / "trace")


def test_the_first_of_the_traces_beside_exports_is_named(tmp_path):
    Run(tmp_path).write([ROW])
    prime_rl(tmp_path, real_rows(1))
    _, about = imported(tmp_path, into=tmp_path / "trace")
    first = "monitors/file/traces/annotations/orchestrator.index.jsonl"
    assert about["left_out_first"][importer.BESIDE_EXPORTS] == first


def test_steps_without_a_mark_are_unfinished_only_beside_marked_ones(tmp_path):
    paths = [tmp_path / f"step_{step}" / "rank_0.jsonl" for step in (0, 1, 2)]
    for path in paths:
        path.parent.mkdir()
    beside = tmp_path / "rank_0.jsonl"  # in no folder of a step
    assert importer.being_written([*paths, beside]) == set()
    (tmp_path / "step_1" / "STABLE").touch()
    assert importer.being_written([*paths, beside]) == {paths[0], paths[2]}
    assert importer.being_written([paths[1]]) == set()
