"""prime-rl's token exports: every column to the bit, and what is left out of broken files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lab.makers.make_dump import export_record
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing import sources as _sources
from mismatch_cli.frameworks.importing.rows import BEYOND, NO_MASK, SHIFTED, UNEQUAL
from mismatch_cli.frameworks.prime_rl.importer import UNWEIGHED
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.trace.reader import Trace
from tests.frameworks.importing.layouts import (
    assert_holds,
    imported,
    prime_rl,
    real_rows,
    write_lines,
)

COLUMNS = (
    "prompt_ids",
    "response_ids",
    "loss_mask",
    "logp_rollout",
    "logp_trainer",
    "entropy_trainer",
    "advantage",
)


def records(count: int) -> list[dict]:
    return [export_record(row, 0, i) for i, row in enumerate(real_rows(count))]


def test_every_column_arrives_to_the_bit(tmp_path):
    rows = real_rows(9)
    prime_rl(tmp_path / "run", rows[:4])
    prime_rl(tmp_path / "run", rows[4:6], rank=1)
    prime_rl(tmp_path / "run", [row | {"step": 10} for row in rows[6:8]])
    prime_rl(tmp_path / "run", [row | {"step": 9} for row in rows[8:]])
    table, about = imported(tmp_path / "run", into=tmp_path / "trace")
    rows = [*rows[:6], rows[8], *rows[6:8]]  # step 9 before step 10
    assert_holds(table, rows, *COLUMNS)
    assert table.column("step").to_pylist() == [0] * 6 + [9, 10, 10]
    assert len(set(table.column("sample_index").to_pylist())) == 9
    same_prompt = [row["prompt_ids"] == rows[0]["prompt_ids"] for row in rows]
    ids = table.column("prompt_id").to_pylist()
    assert (
        [one == ids[0] for one in ids] == same_prompt and any(same_prompt) and not all(same_prompt)
    )
    assert (about["format"], about["rows"], about["steps"], about["left_out"]) == (
        "prime-rl",
        9,
        3,
        {},
    )
    assert about["tokens"] == sum(len(row["response_ids"]) for row in rows)


@pytest.mark.parametrize(("newer", "pair"), [(None, "total"), (True, "total"), (False, "mismatch")])
def test_its_policy_has_newer_weights_unless_the_user_says_otherwise(tmp_path, newer, pair):
    prime_rl(tmp_path, real_rows(12))
    imported(tmp_path / "token_exports", into=tmp_path / "trace", newer_trainer=newer)
    assert list(analyse_mismatch([Trace.open(tmp_path / "trace")], 1).pairs) == [pair]


def test_values_that_are_not_finite_are_not_measured(tmp_path):
    lines = records(2)
    start = lines[0]["loss_mask"].index(True)
    lines[0]["trainer_logprobs"][start + 1] = None
    table, about = imported(write_lines(tmp_path / "rank_0.jsonl", lines), into=tmp_path / "trace")
    assert np.isnan(table.column("logp_trainer").to_pylist()[0][1])
    assert list(about["noted"].values()) == [1] and "null" in next(iter(about["noted"]))


def test_tokens_of_other_losses_are_masked(tmp_path):
    lines = records(3)
    size = len(lines[1]["loss_mask"])
    lines[1] |= {
        "rl_weights": [1.0] * (size - 2) + [0.0, 0.0],
        "ref_kl_weights": [0.0] * (size - 1) + [1.0],
    }
    table, about = imported(write_lines(tmp_path / "rank_0.jsonl", lines), into=tmp_path / "trace")
    masks = table.column("loss_mask").to_pylist()
    assert masks[1][-2:] == [False, True] and all(masks[0]) and all(masks[2])
    assert about["noted"] == {"tokens without RL weight (cross-entropy only) are masked": 1}


def test_a_row_without_weights_of_losses_has_the_default_ones(tmp_path):
    """A token of no RL weight counts if its reference KL does, and never by its neighbors."""
    lines = records(6)
    for line in lines:
        size = len(line["loss_mask"])
        line |= {"rl_weights": [None] * (size - 3) + [0.0, 0.5, 0.0]}
        line |= {"ref_kl_weights": [0.0] * (size - 1) + [2.0]}
    lines[0]["rl_weights"] = None
    lines[1]["ref_kl_weights"] = None
    lines[2]["rl_weights"].pop()
    lines[3]["ref_kl_weights"] = [None] * len(lines[3]["loss_mask"])
    lines[5]["loss_mask"][-2] = None
    table, about = imported(write_lines(tmp_path / "rank_0.jsonl", lines), into=tmp_path / "trace")
    assert about["left_out"] == {NO_MASK: 1}
    masks = table.column("loss_mask").to_pylist()
    all_three, one, two = [True] * 3, [False, True, True], [False, True, False]
    assert [mask[-3:] for mask in masks] == [all_three, two, all_three, two, one]
    assert all(all(mask[:-3]) for mask in masks)
    assert about["noted"] == {UNWEIGHED: 5}


def test_broken_sequences_are_left_out_by_reason(tmp_path):
    lines = records(6)
    lines[1]["trainer_logprobs"].pop()
    lines[2]["loss_mask"] = [False] * len(lines[2]["loss_mask"])
    lines[3]["token_ids"] = None
    for name in ("inference_logprobs", "advantages"):
        lines[4][name] = None
    table, about = imported(write_lines(tmp_path / "rank_0.jsonl", lines), into=tmp_path / "trace")
    assert about["left_out"] == {
        UNEQUAL.format(name="logp_trainer"): 1,
        NO_MASK: 1,
        "responses without token ids": 1,
        "responses without log-probabilities of the rollout engine": 1,
    }
    assert table.num_rows == 2 and BEYOND not in about["left_out"]


def test_log_probs_shifted_by_one_are_kept_and_named(tmp_path):
    lines = records(4)
    for line in lines:
        line["inference_logprobs"] = [*line["inference_logprobs"][1:], 0.0]
    _, about = imported(write_lines(tmp_path / "rank_0.jsonl", lines), into=tmp_path / "trace")
    assert about["noted"][SHIFTED] == 4


def test_zero_filled_log_probs_are_kept_and_counted(tmp_path):
    lines = records(2)
    lines[0]["inference_logprobs"] = [0.0] * len(lines[0]["inference_logprobs"])
    _, about = imported(write_lines(tmp_path / "rank_0.jsonl", lines), into=tmp_path / "trace")
    zeros = next(
        count for what, count in about["noted"].items() if "exactly 0" in what and "rollout" in what
    )
    trained = zip(lines[0]["trainer_logprobs"], lines[0]["loss_mask"], strict=True)
    assert zeros == sum(value < -1 for value, mask in trained if mask)


@pytest.mark.parametrize("block", [None, 3000])
def test_the_complete_lines_of_a_truncated_file_are_imported(tmp_path, monkeypatch, block):
    if block:
        monkeypatch.setattr(_sources, "BLOCK_BYTES", block)
        monkeypatch.setattr(_sources, "_BATCH_BYTES", block // 2)
    lines = [json.dumps(record) for record in records(7)]
    path = tmp_path / "rank_0.jsonl"
    path.write_text("\n".join([*lines[:2], "{broken", "", "[1, 2]", *lines[2:6], lines[6][:-500]]))
    table, about = imported(path, into=tmp_path / "trace")
    assert about["left_out"] == {_sources.NO_JSON: 2, _sources.CUT_OFF: 1}
    assert about["left_out_first"][_sources.NO_JSON].startswith("rank_0.jsonl, line 3: column 2, ")
    assert about["left_out_first"][_sources.CUT_OFF] == "rank_0.jsonl, line 10"
    assert_holds(table, real_rows(6), "logp_trainer")


def test_values_of_the_wrong_type_are_left_out_with_their_line(tmp_path):
    lines = records(3)
    lines[1]["token_ids"] = "none"
    table, about = imported(write_lines(tmp_path / "rank_0.jsonl", lines), into=tmp_path / "trace")
    assert table.num_rows == 2 and about["left_out"] == {_sources.OTHER_TYPES: 1}
    assert about["left_out_first"][_sources.OTHER_TYPES].startswith("rank_0.jsonl, line 2: ")


def test_a_newer_schema_is_refused(tmp_path):
    path = write_lines(
        tmp_path / "rank_0.jsonl", [record | {"schema_version": 2} for record in records(1)]
    )
    with pytest.raises(MismatchError, match="schema_version 2"):
        imported(path, into=tmp_path / "trace")


def test_a_certain_last_token_is_not_taken_for_a_shift(tmp_path):
    """log μ = 0 at the end of a response, and 0 in the prompt, as exports write it."""
    lines = records(2)
    for line in lines:
        first = line["loss_mask"].index(True)
        line["inference_logprobs"] = [0.0] * first + line["inference_logprobs"][first:-1] + [0.0]
    _, about = imported(write_lines(tmp_path / "rank_0.jsonl", lines), into=tmp_path / "trace")
    assert SHIFTED not in about["noted"]
