"""Shapes that people have: the line that is proposed imports every token to the bit, or the refusal
says what is missing.
"""

from __future__ import annotations

import json
import re
import shlex

import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing.guess import columns_in, guess_columns
from mismatch_cli.frameworks.importing.padded import HIDDEN
from mismatch_cli.frameworks.importing.rows import (
    LATER_IDS,
    NO_IDS,
    NO_MASK,
    NO_PAIR,
    NO_PROMPT,
    ONLY_LOGP,
    TOP_K_WITHOUT_IDS,
)
from mismatch_cli.frameworks.importing.sequences import BY_ADVANTAGE, NO_LABELS, NOT_MOVED
from tests.frameworks.importing import shapes
from tests.frameworks.importing.layouts import (
    assert_holds,
    column,
    imported,
    real_rows,
    same_bits,
    write_lines,
)

ROWS = real_rows(4)
OF_ONE_PROMPT = [row for row in real_rows(40) if row["prompt_ids"] == ROWS[0]["prompt_ids"]][:4]
IDS, PAIR = ("prompt_ids", "response_ids", "logp_rollout"), ("logp_rollout", "logp_trainer")
SHAPES = {  # records, the responses they hold, the columns that arrive
    "parity": ([shapes.parity(row) for row in ROWS], ROWS, {*IDS, *PAIR}),
    "atropos": ([shapes.atropos(OF_ONE_PROMPT)], OF_ONE_PROMPT, {*IDS, "reward"}),
    "sglang": ([shapes.sglang(row) for row in ROWS], ROWS, IDS),
    "vllm": ([shapes.vllm_chat(OF_ONE_PROMPT)], OF_ONE_PROMPT, {*IDS, "finish_reason"}),
    "harbor": ([shapes.harbor(ROWS)], ROWS, IDS),
    "verifiers": ([shapes.verifiers(ROWS)], ROWS, IDS),
    "tinker": ([shapes.tinker(row) for row in ROWS], ROWS, IDS),
    "tinker with a mask": ([shapes.tinker(row, mask=True) for row in ROWS], ROWS, IDS),
    "agent loop": ([shapes.agent_loop(row) for row in ROWS], ROWS, IDS),
    "shifted": ([shapes.shifted(row) for row in ROWS], ROWS, {*IDS, *PAIR}),
    "pair": ([shapes.pair(row) for row in ROWS], ROWS, PAIR),
    "document": ([shapes.document(row) for row in ROWS], ROWS, PAIR),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_proposed_line_imports_every_token(shape, tmp_path):
    records, rows, names = SHAPES[shape]
    columns = guess_columns(columns_in(records), {})
    assert columns and "?" not in columns.values()
    path = write_lines(tmp_path / "d.jsonl", records)
    table, about = imported(path, into=tmp_path / "trace", columns=columns)
    scalars = {"reward", "finish_reason"} & {*names}
    assert_holds(table, rows, *{*names} - scalars)
    for name in scalars:
        assert table.column(name).to_pylist() == column(rows, name)
    assert about["rows"] == len(rows)
    has_ids = "response_ids" in names
    assert ("response_ids" in table.column_names) == has_ids == (ONLY_LOGP not in about["noted"])
    assert all(all(mask) for mask in table.column("loss_mask").to_pylist())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_line_on_the_screen_can_be_pasted(shape, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "my dump.jsonl", SHAPES[shape][0])
    assert run(["import", "my dump.jsonl", "-q"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("wanted") and "in my dump.jsonl" in said
    line = re.search(r"lengths, try: mismatch-cli (.*)\n", said)
    assert line is not None
    assert run([*shlex.split(line[1]), "-q"]) == 0
    assert f"{len(SHAPES[shape][1])} responses" in capsys.readouterr().out


def test_paths_enter_lists_and_join_what_is_deeper_than_a_batch(tmp_path):
    columns = {
        "prompt_ids": "agent_result.rollout_details.prompt_token_ids",
        "response_ids": "agent_result.rollout_details.completion_token_ids",
        "logp_rollout": "agent_result.rollout_details.logprobs",
    }
    record = shapes.harbor(ROWS[:2])
    record["agent_result"]["rollout_details"] += shapes.harbor(ROWS[2:])["agent_result"][
        "rollout_details"
    ]
    path = write_lines(tmp_path / "d.jsonl", [record])
    table, _ = imported(path, into=tmp_path / "trace", columns=columns)
    assert_holds(table, ROWS, *IDS)


def test_lists_that_fit_by_length_and_sign_are_proposed_whatever_they_are_called():
    rows = [
        {"a": {"ids": [5, 6], "out": [-0.5, 0.0]}, "labels": [-100, -100], "gain": [0.5, -0.5]},
        {"a": {"ids": [7], "out": [-0.25]}, "labels": [-100], "gain": [-0.5]},
    ]
    assert guess_columns(columns_in(rows), {}) == {"response_ids": "a.ids", "logp_rollout": "a.out"}
    rows[0]["a"]["out"].append(-0.125)  # as long as nothing else
    assert guess_columns(columns_in(rows), {}) == {}


def test_a_step_without_tokens_is_left_out(tmp_path):
    record = shapes.verifiers(ROWS)
    record["trajectory"][0]["tokens"] = None
    columns = guess_columns(columns_in([shapes.verifiers(ROWS)]), {})
    path = write_lines(tmp_path / "d.jsonl", [record])
    table, about = imported(path, into=tmp_path / "trace", columns=columns)
    assert_holds(table, ROWS[1:], "response_ids")
    assert about["left_out"]["responses without token ids"] == 1


@pytest.mark.parametrize("indent", [None, 2])
def test_a_document_is_read_as_its_rows(indent, tmp_path):
    columns = {"logp_rollout": "sampler_logprobs", "logp_trainer": "trainer_logprobs"}
    (path := tmp_path / "a.json").write_text(
        json.dumps([shapes.pair(row) for row in ROWS], indent=indent)
    )
    table, about = imported(path, into=tmp_path / "array", columns=columns)
    assert_holds(table, ROWS, "logp_trainer")
    assert about["noted"] == {ONLY_LOGP: 4, NO_PROMPT: 4}
    assert len(set(table.column("prompt_id").to_pylist())) == 4
    (path := tmp_path / "b.json").write_text(json.dumps(shapes.pair(ROWS[0]), indent=indent))
    table, _ = imported(path, into=tmp_path / "object", columns=columns)
    assert_holds(table, ROWS[:1], "logp_rollout")


def test_labels_and_targets_are_checked_row_by_row(tmp_path):
    """Nothing is imported that only looks aligned."""
    names = {"token_ids": "tokens", "loss_mask": "masks", "logp_rollout": "inference_logprobs"}
    group = shapes.atropos(OF_ONE_PROMPT)
    group["masks"][1][-1] += 1  # neither −100 nor the token's own id
    path = write_lines(tmp_path / "d.jsonl", [group])
    table, about = imported(path, into=tmp_path / "labels", columns=names)
    assert table.num_rows == 3 and about["left_out"][NO_LABELS.format(name="loss_mask")] == 1
    names = {"token_ids": "input_ids", "logp_rollout": "inference_logprobs"}
    moved = [shapes.shifted(row) for row in ROWS]
    moved[2]["target_ids"] = moved[2]["input_ids"]
    path = write_lines(tmp_path / "e.jsonl", moved)
    table, about = imported(path, into=tmp_path / "moved", columns=names)
    assert table.num_rows == 3 and about["left_out"][NOT_MOVED] == 1
    for record in moved:
        record["input_ids"].append(record["target_ids"][-1])  # the whole sequence
    table, about = imported(write_lines(path, moved), into=tmp_path / "whole", columns=names)
    expected = [row["response_ids"] for number, row in enumerate(ROWS) if number != 2]
    assert same_bits(table, "response_ids", expected)


def test_a_sequence_without_ids_or_without_labels_is_left_out_alone(tmp_path):
    """The last one has flags instead."""
    names = {"token_ids": "tokens", "loss_mask": "masks", "logp_rollout": "inference_logprobs"}
    group = shapes.atropos(OF_ONE_PROMPT)
    records = [{its: group[its][number] for its in names.values()} for number in range(4)]
    records[1]["masks"] = records[2]["tokens"] = None
    records[3]["masks"] = [int(label != -100) for label in records[3]["masks"]]
    path = write_lines(tmp_path / "d.jsonl", records)
    table, about = imported(path, into=tmp_path / "trace", columns=names)
    assert_holds(table, [OF_ONE_PROMPT[0], OF_ONE_PROMPT[3]], *IDS)
    assert about["left_out"] == {NO_MASK: 1, NO_IDS: 1}


def test_without_a_mask_only_advantages_say_where_the_response_is(tmp_path):
    records = [shapes.tinker(row) for row in ROWS]
    columns = guess_columns(columns_in(records), {})
    records[1]["loss_fn_inputs"]["advantages"]["data"] = [0.0] * len(
        records[1]["loss_fn_inputs"]["advantages"]["data"]
    )
    path = write_lines(tmp_path / "d.jsonl", records)
    table, about = imported(path, into=tmp_path / "trace", columns=columns)
    assert table.num_rows == 3 and about["noted"][BY_ADVANTAGE] == 4
    del columns["advantage"]
    with pytest.raises(MismatchError, match="nothing says where the response begins"):
        imported(path, into=tmp_path / "none", columns=columns)


@pytest.mark.parametrize("place", range(4))
def test_labels_are_recognised_although_a_record_has_none(tmp_path, place):
    records = []
    for row in ROWS:
        whole = row["prompt_ids"] + row["response_ids"]
        outside = len(row["prompt_ids"])
        labels = [-100] * outside + row["response_ids"]
        logp = [0.0] * outside + row["logp_rollout"]
        records.append({"token_ids": whole, "loss_mask": labels, "logp_rollout": logp})
    records[place]["loss_mask"] = None
    table, about = imported(write_lines(tmp_path / "d.jsonl", records), into=tmp_path / "trace")
    assert table.num_rows == 3 and about["left_out"] == {NO_MASK: 1}


def test_a_mask_of_the_loss_is_not_taken_for_one_of_padding(tmp_path):
    record = shapes.verifiers(ROWS)
    columns = guess_columns(columns_in([record]), {}) | {
        "prompt_mask": "trajectory.tokens.prompt_mask"
    }
    path = write_lines(tmp_path / "d.jsonl", [record])
    with pytest.raises(MismatchError, match=HIDDEN.format(name="prompt_mask")):
        imported(path, into=tmp_path / "trace", columns=columns)


def test_a_trace_has_ids_for_every_response_or_for_none(tmp_path, monkeypatch):
    both = [{name: row[name] for name in {*IDS, *PAIR}} for row in ROWS]
    pairs = [{name: row[name] for name in PAIR} for row in ROWS]
    first = write_lines(tmp_path / "a" / "0.jsonl", both).parent
    write_lines(first / "x1.jsonl", [*pairs, {"logp_rollout": [-1.0]}])
    table, about = imported(first, into=tmp_path / "ids")
    assert table.num_rows == 4 and about["left_out"] == {"responses without token ids": 5}
    second = write_lines(tmp_path / "b" / "0.jsonl", [*pairs, {"logp_rollout": [-1.0]}]).parent
    write_lines(second / "x1.jsonl", both)
    table, about = imported(second, into=tmp_path / "pairs")
    assert table.num_rows == 4
    assert about["left_out"] == {NO_PAIR: 1, LATER_IDS.format(name="prompt_ids"): 4}


def test_top_k_columns_without_ids_are_dropped(tmp_path):
    names = (*PAIR, "topk_ids", "topk_logp_rollout")
    path = write_lines(tmp_path / "d.jsonl", [{n: row[n] for n in names} for row in ROWS])
    table, about = imported(path, into=tmp_path / "trace")
    assert "topk_ids" not in table.column_names and about["noted"][TOP_K_WITHOUT_IDS] == 4


LACKING = {
    "a group without log-probabilities": (
        {"tokens": [[5, 6], [5, 7]], "masks": [[-100, 6], [-100, 7]], "scores": [1.0, -1.0]},
        r"has lists of whole numbers \(tokens\), but no log-probabilities",
    ),
    "ids of a test": (
        {"tokens": [1, 2, 3], "merged_tokens": [1, 9], "name": "x"},
        r"has lists of whole numbers \(tokens, merged_tokens\), but no log-probabilities",
    ),
    "a batch of requests": (
        {"custom_id": "a", "url": "/v1", "body": {"messages": [{"role": "user", "content": "x"}]}},
        "has neither token ids nor log-probabilities",
    ),
    "one side alone": (
        {"response": "so", "output_token_logprobs": [-0.5, -0.25]},
        r"has log-probabilities \(output_token_logprobs\), but neither token ids nor those of a",
    ),
    "NeMo-RL's rows by another writer": (
        {"token_ids": [1, 2], "token_loss_mask": [0, 1], "generation_logprobs": [0.0, -0.5]},
        "has no input_lengths, which NeMo-RL's grpo.py writes",
    ),
    "metrics": (
        {"step": 3, "time": 1.0, "rollout_corr/kl": 0.002, "actor/lr": 1e-6},
        r"holds a run's metrics, and no tokens.*verdict rollout_corr/kl=0\.002",
    ),
}


@pytest.mark.parametrize("what", LACKING)
def test_a_refusal_says_what_is_missing(what, tmp_path):
    record, message = LACKING[what]
    path = write_lines(tmp_path / "d.jsonl", [record])
    with pytest.raises(MismatchError, match=message) as refused:
        imported(path, into=tmp_path / "trace")
    assert "--columns" not in str(refused.value)


def test_a_console_log_belongs_to_verdict(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("INFO\nstep:1 - actor/pg_loss:0.01 - rollout_corr/kl:0.002 - lr:1e-6\n")
    with pytest.raises(MismatchError, match=r"metrics.*verdict rollout_corr/kl=0\.002"):
        imported(path, into=tmp_path / "trace")


def test_a_version_in_a_console_log_is_no_number(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("step:1 - torch:2.5.1 - dots:... - rollout_corr/kl:2.5e-3 - lr:.5 - kl:3\n")
    with pytest.raises(MismatchError, match=r"verdict rollout_corr/kl=0\.0025$"):
        imported(path, into=tmp_path / "trace")
