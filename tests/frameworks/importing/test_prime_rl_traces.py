"""prime-rl's traces: episodes joined with what its orchestrator and its trainer say of them."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing import opened
from mismatch_cli.frameworks.prime_rl import _traces
from mismatch_cli.frameworks.prime_rl.importer import BESIDE_EXPORTS
from tests.frameworks.importing.layouts import (
    assert_holds,
    column,
    imported,
    prime_rl,
    real_rows,
    write_lines,
)
from tests.frameworks.importing.prime_rl_run import Run, episode_of, sealed, trace_of, trained

EXACT = real_rows(3) + [row | {"step": 1} for row in real_rows(6)[3:]]
ROUNDED = ("logp_rollout", "logp_trainer", "entropy_trainer", "advantage")
ROWS = [row | {name: np.round(row[name], 4).tolist() for name in ROUNDED} for row in EXACT]


def assert_is_of_rows(table):
    assert_holds(table, ROWS, "prompt_ids", "response_ids", *ROUNDED)
    for name in ("step", "reward", "finish_reason"):
        assert table.column(name).to_pylist() == column(ROWS, name)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("seals", [0, 1, 2])
def test_every_column_arrives_as_it_was_written(tmp_path, index, seals):
    run = Run(tmp_path, index=index)
    for first in (0, 3):
        run.write(ROWS[first : first + 3], first)
        if first // 3 < seals:
            run.seal()
    for number, place in enumerate((tmp_path, run.traces / "annotations" / "trainer")):
        table, about = imported(place, into=tmp_path / f"trace-{number}")
        assert_is_of_rows(table)
        assert about["format"] == "prime-rl" and about["noted"] == {_traces.ROUNDED: 6}
        assert not [reason for reason in about["left_out"] if "episode" in reason]


def test_a_sealed_file_has_the_offsets_of_the_plain_one(tmp_path):
    lines = [json.dumps({"n": n, "text": "x" * (n % 97)}).encode() + b"\n" for n in range(200)]
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(sealed(b"".join(lines)))
    starts = np.cumsum([0, *map(len, lines)]).tolist()
    assert opened.size_of(path) == starts[-1]
    assert list(opened.lines(path)) == lines
    for number in (0, 57, 199):
        assert opened.line_at(path, starts[number]) == lines[number]
        assert list(opened.lines(path, starts[number])) == lines[number:]


def test_a_sealed_file_without_a_table_of_frames_is_read_too(tmp_path):
    content = b'{"a": 1}\n' * 300
    whole = sealed(content)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(whole[: whole.rindex(b"\x5e\x2a\x4d\x18")])
    assert opened.size_of(path) == len(content)
    assert b"".join(opened.lines(path)) == content
    assert opened.line_at(path, 9 * 299) == b'{"a": 1}\n'


@pytest.mark.parametrize(("field", "more"), [(0, 1), (4, 2**31)])
def test_a_table_that_contradicts_its_file_is_refused(tmp_path, field, more):
    """By a frame's packed size, and by an unpacked size beyond the memory for the file."""
    broken = bytearray(sealed(b'{"a": 1}\n' * 300))
    entry = broken.rindex(b"\x5e\x2a\x4d\x18") + 8 + field
    struct.pack_into("<I", broken, entry, struct.unpack_from("<I", broken, entry)[0] + more)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(broken)
    with pytest.raises(MismatchError, match="expands far beyond its size"):
        opened.size_of(path)


def test_full_precision_has_no_note_of_rounding(tmp_path):
    Run(tmp_path).write(EXACT)
    table, about = imported(tmp_path, into=tmp_path / "trace")
    assert_holds(table, EXACT, "logp_trainer")
    assert _traces.ROUNDED not in about["noted"]


def test_episodes_with_everything_on_their_nodes_are_read_alone(tmp_path):
    """As verifiers writes a trace, in an episode or by itself; evaluations are left out."""
    records = []
    for number, row in enumerate(ROWS):
        record = episode_of(row, f"t{number}")
        record["traces"][0]["nodes"][1] |= {
            "trainer_logprobs": row["logp_trainer"],
            "entropies": row["entropy_trainer"],
            "advantages": row["advantage"],
        }
        record["traces"][0]["info"]["arrival"]["step"] = row["step"]
        records.append(record)
    evaluated = episode_of(ROWS[0], "x")
    evaluated["traces"][0]["info"]["kind"] = "eval"
    for name, lines in (("episodes", records), ("traces", [r["traces"][0] for r in records])):
        path = write_lines(tmp_path / f"{name}.jsonl", [*lines, evaluated])
        table, about = imported(path, into=tmp_path / f"{name}-trace")
        assert_is_of_rows(table)
        assert about["left_out"] == {_traces.EVALUATED: 1, _traces.NO_SAMPLED: 6}


def test_tokens_outside_the_loss_stay_in_the_response(tmp_path):
    """Two turns, with a tool's output between them."""
    row = ROWS[0]
    cut = len(row["response_ids"]) // 2
    trace = trace_of(row, "t0")
    whole = trace["nodes"][1]
    parts = [{**whole, "parent": 0}, {**trace["nodes"][2], "parent": 1}, {**whole, "parent": 2}]
    spans = {0: slice(0, cut), 2: slice(cut, None)}
    for number, span in spans.items():
        parts[number] |= {n: whole[n][span] for n in ("token_ids", "mask", "logprobs")}
    trace["nodes"] = [trace["nodes"][0], *parts]
    update = trained(row, "t0")
    for name, values in update["branches"][0].items():
        if name != "index":
            place = len(row["prompt_ids"]) + cut
            values[place:place] = [None, None]
    run = Run(tmp_path)
    run.append("stream", [episode_of(row, "t0") | {"traces": [trace]}])
    run.append("annotations/trainer", [update])
    table, _ = imported(tmp_path, into=tmp_path / "trace")
    ids = row["response_ids"]
    assert table.column("response_ids").to_pylist() == [[*ids[:cut], 5, 6, *ids[cut:]]]
    mask = [True] * len(ids)
    mask[cut:cut] = [False, False]
    assert table.column("loss_mask").to_pylist() == [mask]


def test_what_is_missing_is_said(tmp_path):
    folder = tmp_path / "run"
    run = Run(folder)
    run.write(ROWS)
    run.append("annotations/trainer", [trained(ROWS[0], "lost"), {"trace_id": "t0", "info": {}}])
    _, about = imported(folder, into=tmp_path / "trace")
    assert about["left_out"][_traces.NO_EPISODE] == 1
    assert about["left_out"][_traces.UNREADABLE] == 1
    prime_rl(folder, real_rows(2))
    table, about = imported(folder, into=tmp_path / "both")
    assert_holds(table, real_rows(2), "logp_trainer")
    assert about["left_out"][BESIDE_EXPORTS] > 0
    for path in (run.traces / "stream").iterdir():
        path.unlink()
    with pytest.raises(MismatchError, match="not the episodes that they describe"):
        imported(run.traces / "annotations", into=tmp_path / "none")
    run.append("annotations/newer", [trained(ROWS[0], "t0") | {"version": 2}])
    run.write(ROWS[:1])
    with pytest.raises(MismatchError, match="has version 2"):
        imported(run.traces / "annotations" / "newer", into=tmp_path / "newer")


def test_a_hidden_file_beside_the_producers_is_none(tmp_path):
    run = Run(tmp_path / "run")
    run.write(ROWS)
    (run.traces / "annotations" / ".DS_Store").write_bytes(b"")
    table, _ = imported(tmp_path / "run", into=tmp_path / "trace")
    assert_is_of_rows(table)


@pytest.mark.parametrize("lost", ["stream", "annotations/orchestrator"])
def test_a_chunk_that_was_not_copied_is_that_of_no_record(tmp_path, lost):
    """Without its episodes no sequence is whole; without the orchestrator a step is the
    arrival's.
    """
    run = Run(tmp_path / "run")
    run.write(ROWS[:3])
    run.seal()
    run.write(ROWS[3:], 3)
    (run.traces / lost / "00000.jsonl.zst").unlink()
    table, about = imported(tmp_path / "run", into=tmp_path / "trace")
    if lost == "stream":
        assert about["left_out"][_traces.NO_EPISODE] == 3
        assert_holds(table, ROWS[3:], "logp_trainer", "advantage")
    else:
        assert table.column("step").to_pylist() == [1] * 6
        assert_holds(table, ROWS, "logp_trainer", "logp_rollout")


def test_annotations_without_a_branch_say_nothing_of_their_producer(tmp_path):
    """Those of the trainer may begin with one; the orchestrator's may have only its step."""
    run = Run(tmp_path / "run")
    run.append("annotations/trainer", [trained(ROWS[0], "t9") | {"branches": []}])
    run.write(ROWS)
    step = {"trace_id": "t0", "info": {"ship": {"step": 7}}, "branches": None}
    run.append("annotations/orchestrator", [step])
    table, _ = imported(tmp_path / "run", into=tmp_path / "trace")
    assert_holds(table, ROWS, "logp_trainer", "advantage")
    assert table.column("step").to_pylist() == [7, *[row["step"] for row in ROWS[1:]]]
