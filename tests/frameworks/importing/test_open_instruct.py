"""open-instruct's rollouts: no policy, and tool output that only its placeholder reveals."""

from __future__ import annotations

from mismatch_cli.frameworks.importing.rows import WRONG_LENGTH
from mismatch_cli.frameworks.open_instruct.importer import TOOLS
from tests.frameworks.importing.layouts import (
    assert_holds,
    imported,
    open_instruct_record,
    real_rows,
    same_bits,
    write_lines,
)


def test_every_column_arrives_to_the_bit(tmp_path):
    rows = real_rows(6) + [row | {"step": 1} for row in real_rows(2)]
    records = [open_instruct_record(row, i) for i, row in enumerate(rows)]
    write_lines(tmp_path / "run_rollouts_000000.jsonl", records[:5])
    write_lines(tmp_path / "run_rollouts_000001.jsonl", records[5:])
    write_lines(tmp_path / "run_metadata.jsonl", [{"run_name": "run", "model_name": "a/b"}])
    table, about = imported(tmp_path / "run", into=tmp_path / "trace")  # the prefix of the files
    assert_holds(table, rows, "prompt_ids", "response_ids", "logp_rollout")
    assert same_bits(
        table, "advantage", [[row["advantage"][0]] * len(row["advantage"]) for row in rows]
    )
    assert table.column("finish_reason").to_pylist() == [row["finish_reason"] for row in rows]
    assert table.column("sample_index").to_pylist() == list(range(8))
    ids = table.column("prompt_id").to_pylist()
    assert ids[0] == ids[6]  # the same prompt in another step, though prompt_idx starts at 0 again
    assert "logp_trainer" not in table.column_names
    assert (
        about["left_out"] == {"files of another layout": 1} and about["format"] == "open-instruct"
    )


def test_tool_output_is_masked_only_where_tools_were_called(tmp_path):
    records = [open_instruct_record(row, i) for i, row in enumerate(real_rows(3))]
    for record in records:
        record["logprobs"] = [0.0, 0.0, *record["logprobs"][2:]]
        record["logprobs"][2:] = [min(x, -1e-6) for x in record["logprobs"][2:]]
    records[1]["request_info"]["tool_calleds"] = True
    records[2]["request_info"] = None
    table, about = imported(
        write_lines(tmp_path / "x_rollouts_000000.jsonl", records), into=tmp_path / "trace"
    )
    masks = table.column("loss_mask").to_pylist()
    assert masks[1][:3] == [False, False, True] and all(masks[0]) and all(masks[2])
    assert about["noted"][TOOLS] == 2
    # The other two responses keep their zeros, which are counted
    assert 4 in about["noted"].values()


def test_missing_and_short_log_probs(tmp_path):
    records = [open_instruct_record(row, i) for i, row in enumerate(real_rows(4))]
    records[0]["logprobs"] = None
    records[1]["logprobs"].pop()
    records[2]["response_tokens"] = []
    table, about = imported(
        write_lines(tmp_path / "x_rollouts_000000.jsonl", records), into=tmp_path / "trace"
    )
    assert table.num_rows == 1
    assert about["left_out"] == {
        "responses without log-probabilities of the rollout engine": 1,
        WRONG_LENGTH.format(name="logp_rollout"): 1,
        "responses without a token": 1,
    }
