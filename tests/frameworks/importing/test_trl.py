"""TRL's names: batches as `_generate_and_score_completions` pads them, and single responses, in
JSONL and Parquet.
"""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing.padded import HIDDEN, OTHER_SIZE, PADDED, WRONG_PROMPT
from mismatch_cli.frameworks.importing.rows import NO_ROLLOUT, WRONG_LENGTH
from tests.frameworks.importing.layouts import (
    Row,
    assert_holds,
    column,
    imported,
    ones,
    padded,
    real_rows,
    same_bits,
    write_lines,
    write_parquet,
    write_records,
)
from tests.frameworks.recording.test_trl import batches as real_batches
from tests.frameworks.recording.test_trl import recorded


def batch(rows: list[Row]) -> Row:
    """What the trainer's method returns for these responses, as lists; the second token is tool
    output.
    """
    prompts, responses = column(rows, "prompt_ids"), column(rows, "response_ids")
    tool_masks = [[1, 0, *[1] * (len(ids) - 2)] for ids in responses]
    return {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded(ones(prompts), left=True),
        "completion_ids": padded(responses),
        "completion_mask": padded(ones(responses)),
        "tool_mask": padded(tool_masks, 1),
        "sampling_per_token_logps": padded(column(rows, "logp_rollout"), 0.0),
        "old_per_token_logps": padded(column(rows, "logp_recomputed"), -7.0),
        "advantages": [row["advantage"][0] for row in rows],
        "num_items_in_batch": sum(map(len, responses)),
    }


def single(row: Row) -> Row:
    """The same for one response, without padding."""
    alone = {name: value[0] for name, value in batch([row]).items() if isinstance(value, list)}
    return {
        name: value[2:] if name.startswith("prompt") else value[:-2]
        for name, value in alone.items()
        if isinstance(value, list)
    } | {"advantages": alone["advantages"]}


@pytest.mark.parametrize("way", ["jsonl", "parquet"])
def test_batches_and_single_responses_are_the_same_responses(tmp_path, way):
    rows = real_rows(8)
    batches = [batch(rows[:5]) | {"step": 3}, batch(rows[5:]) | {"step": 4}]
    table, about = imported(
        write_records(tmp_path / f"b.{way}", batches), into=tmp_path / "batches"
    )
    names = ("prompt_ids", "response_ids", "logp_rollout", "advantage")
    assert_holds(table, rows, *names, logp_trainer="logp_recomputed")
    assert all(mask[:3] == [True, False, True] for mask in table.column("loss_mask").to_pylist())
    assert about["format"] == "trl" and table.column("step").to_pylist() == [3] * 5 + [4] * 3
    assert about["left_out"] == {"unknown columns (num_items_in_batch)": 1} and not about["noted"]
    singles = [single(row) | {"step": 3 + (i > 4)} for i, row in enumerate(rows)]
    assert imported(write_records(tmp_path / f"s.{way}", singles), into=tmp_path / "singles")[
        0
    ].equals(table)
    rows_of_batch = [
        {name: value[i] if isinstance(value, list) else value for name, value in batches[0].items()}
        for i in range(5)
    ]
    assert imported(write_records(tmp_path / f"p.{way}", rows_of_batch), into=tmp_path / "padded")[
        0
    ].equals(table.slice(0, 5))


@pytest.mark.parametrize("way", ["jsonl", "parquet"])
def test_batches_of_a_real_run_are_what_its_recorder_wrote(tmp_path, way):
    batches = real_batches()
    records = [
        {name: value.tolist() for name, value in batch.items()} | {"step": step}
        for step, batch in enumerate(batches)
    ]
    table, about = imported(write_records(tmp_path / f"d.{way}", records), into=tmp_path / "trace")
    expected = pa.concat_tables(
        recorded(tmp_path / "recorded", batches)[0].tables(), promote_options="default"
    )
    assert table.num_rows == expected.num_rows == 32
    for name in (
        "prompt_ids",
        "response_ids",
        "logp_rollout",
        "logp_trainer",
        "advantage",
        "loss_mask",
    ):
        assert table.column(name).to_pylist() == expected.column(name).to_pylist(), name
    for name in ("step", "prompt_id"):
        assert table.column(name).equals(expected.column(name)), name
    assert about["left_out"] == {
        "unknown columns (importance_sampling_ratio, num_items_in_batch)": 2
    }


def test_what_else_people_write(tmp_path):
    """Rewards, names of prompts, advantages per token or in a list of one, the current log π,
    other types.
    """
    rows = real_rows(4)
    dump = batch(rows) | {
        "rewards": [1, 0, 1, 0],
        "prompt_id": ["a", "a", "b", "b"],
        "global_step": 7,
    }
    dump["per_token_logps"] = [[-1.0] * len(ids) for ids in dump["completion_ids"]]
    dump["advantages"] = [[value] for value in dump["advantages"]]
    dump["completion_mask"] = [[float(value) for value in mask] for mask in dump["completion_mask"]]
    dump["prompt"] = [[{"role": "user", "content": "What is 1 + 1?"}]] * 4
    table, about = imported(write_lines(tmp_path / "d.jsonl", [dump]), into=tmp_path / "trace")
    assert_holds(table, rows, "advantage", "logp_recomputed")
    assert table.column("logp_trainer").to_pylist()[0] == [-1.0] * len(rows[0]["response_ids"])
    assert (
        table.column("reward").to_pylist() == [1, 0, 1, 0]
        and table.column("version_trainer").to_pylist() == [1] * 4
    )
    a, b, c, d = table.column("prompt_id").to_pylist()
    assert a == b != c == d and table.column("step").to_pylist() == [7] * 4
    assert about["left_out"] == {"unknown columns (num_items_in_batch, prompt)": 2}
    wide = {
        name: pa.array([value], pa.large_list(pa.list_(pa.int64(), len(value[0]))))
        for name, value in batch(rows).items()
        if "mask" in name or "ids" in name
    }
    wide["sampling_per_token_logps"] = pa.array(
        [dump["sampling_per_token_logps"]], pa.list_(pa.list_(pa.float64()))
    )
    table, _ = imported(
        write_parquet(tmp_path / "d.parquet", pa.table(wide)), into=tmp_path / "wide"
    )
    assert_holds(table, rows, "logp_rollout")


def test_hostile_batches(tmp_path):
    rows = real_rows(6)
    batches = [batch(rows[:3]), batch(rows[3:])]
    nothing = batches[0]["completion_mask"]
    nothing[0] = [0] * len(nothing[0])  # mask_truncated_completions
    batches[0]["sampling_per_token_logps"][1][0] = None  # vLLM had NaN
    batches[0]["prompt_mask"][2].pop()
    batches[1]["tool_mask"][0].pop()
    batches[1]["completion_mask"][1][0] = None
    batches[1]["completion_ids"][2][0] = 2**31 - 1
    broken = [batch(rows[:2]), batch(rows[:2]), batch(rows[:2]), batch(rows[:2])]
    broken[0]["advantages"].append(1.0)
    broken[1]["completion_ids"] = None
    broken[2]["completion_ids"] = [["a"]] * 2
    broken[3]["completion_mask"][0][0] = 2
    path = write_lines(tmp_path / "d.jsonl", [*batches, *broken])
    table, about = imported(path, into=tmp_path / "trace", vocabulary=10**6)
    assert_holds(table, rows[1:2], "response_ids")
    first = table.column("logp_rollout").to_pylist()[0]
    assert first[0] != first[0] and first[1:] == pytest.approx(rows[1]["logp_rollout"][1:])
    assert about["left_out"] == {
        HIDDEN.format(name="response_mask"): 1,
        WRONG_PROMPT: 1,
        WRONG_LENGTH.format(name="loss_mask"): 1,
        "responses whose response_mask holds a null": 1,
        "responses whose response_ids holds numbers that are not token ids": 1,
        OTHER_SIZE.format(name="advantages"): 1,
        "lines with values of the wrong type": 3,
        "unknown columns (num_items_in_batch)": 1,
    }


def test_prompts_without_a_mask_stay_complete_with_a_note(tmp_path):
    rows = real_rows(2)
    dump = batch(rows)
    del dump["prompt_mask"]
    table, about = imported(write_lines(tmp_path / "d.jsonl", [dump]), into=tmp_path / "trace")
    assert [len(ids) for ids in table.column("prompt_ids").to_pylist()] == [
        len(dump["prompt_ids"][0])
    ] * 2
    assert about["noted"] == {PADDED: 2}


def test_unmeasurable_dumps_are_refused_with_one_sentence(tmp_path):
    dump = batch(real_rows(2))
    del dump["sampling_per_token_logps"]
    with pytest.raises(
        MismatchError, match=r"no sampling_per_token_logps: TRL.*only where vLLM.*cli guide trl"
    ):
        imported(write_lines(tmp_path / "d.jsonl", [dump]), into=tmp_path / "trace")
    # A response without a token has none, whatever its list
    empty, without = map(single, real_rows(2))
    empty |= {"completion_ids": [], "sampling_per_token_logps": []}
    without["sampling_per_token_logps"] = None
    with pytest.raises(MismatchError, match="no sampling_per_token_logps"):
        imported(write_lines(tmp_path / "n.jsonl", [empty, without]), into=tmp_path / "trace")
    # Added by hand: not a name of TRL's
    dump["vllm_logps"] = batch(real_rows(2))["sampling_per_token_logps"]
    with pytest.raises(
        MismatchError,
        match=r"lengths, try: .*response_ids=completion_ids,logp_rollout=vllm_logps,.*",
    ):
        imported(write_lines(tmp_path / "d.jsonl", [dump]), into=tmp_path / "trace")
    table = pa.table({"prompt_ids": [["a"]], "completion_ids": [[1]], "logprobs": [[-1.0]]})
    with pytest.raises(
        MismatchError, match=r"column prompt_ids is list<.*string> and cannot be read as list"
    ):
        imported(write_parquet(tmp_path / "d.parquet", table), into=tmp_path / "trace")
    record = single(real_rows(1)[0]) | {"sampling_per_token_logps": None}
    lines = [single(real_rows(1)[0]), record]
    assert (
        imported(write_lines(tmp_path / "e.jsonl", lines), into=tmp_path / "trace")[1]["left_out"][
            NO_ROLLOUT
        ]
        == 1
    )
    (tmp_path / "f.jsonl").write_text(
        json.dumps({"prompt_ids": [], "completion_ids": [], "logprobs": []})
    )
    with pytest.raises(MismatchError, match="1 response without a token"):
        imported(tmp_path / "f.jsonl", into=tmp_path / "trace")


@pytest.mark.parametrize("way", ["jsonl", "parquet"])
def test_every_response_has_the_columns_that_it_shows(tmp_path, way):
    """Names that first occur after many lines, or hold nothing; log μ that the first lines lack."""
    rows = real_rows(8) * 10
    records = [
        single(row) | {"step": i, "per_token_logps": None, "logprobs": None}
        for i, row in enumerate(rows)
    ]
    for record in records[:70]:
        record["sampling_per_token_logps"] = None
    for record, row in zip(records[70:], rows[70:], strict=True):
        record["per_token_logps"] = row["logp_trainer"]
    records[79]["logprobs"] = records[79].pop("sampling_per_token_logps")
    table, about = imported(write_records(tmp_path / f"a.{way}", records), into=tmp_path / "a")
    assert about["left_out"] == {NO_ROLLOUT: 70}
    assert_holds(table, rows[70:], "logp_rollout", "logp_trainer", "logp_recomputed")
    for record, row in zip(records, rows, strict=True):
        record["sampling_per_token_logps"] = row["logp_rollout"]
    table, about = imported(write_records(tmp_path / f"b.{way}", records), into=tmp_path / "b")
    assert not about["left_out"]
    current = [row["logp_recomputed" if i < 70 else "logp_trainer"] for i, row in enumerate(rows)]
    assert same_bits(table, "logp_trainer", current)
    assert same_bits(table, "logp_recomputed", [None] * 70 + column(rows[70:], "logp_recomputed"))
    assert table.column("version_trainer").to_pylist() == [0] * 70 + [1] * 10
    path = write_records(
        tmp_path / f"c.{way}", [record | {"per_token_logps": None} for record in records]
    )
    table, _ = imported(path, into=tmp_path / "c")
    assert_holds(table, rows, logp_trainer="logp_recomputed")
    path = write_records(
        tmp_path / f"d.{way}",
        [record | dict.fromkeys(("sampling_per_token_logps", "logprobs")) for record in records],
    )
    with pytest.raises(MismatchError, match="no sampling_per_token_logps"):
        imported(path, into=tmp_path / "d")
