"""slime's and miles' files: samples, columns per rank, Parquet, and the loss's own dump;
duplicates count once.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing.rows import WRONG_LENGTH
from mismatch_cli.frameworks.importing.samples import (
    EVALUATION,
    NO_IDS,
    NO_LENGTH,
    NO_NUMBER,
    NORMALISED,
    NOT_THERE,
    OTHER_TYPES,
    SAME_SAMPLES,
    WRONG_TOTAL,
    with_raw_rewards,
)
from mismatch_cli.frameworks.miles.importer import NO_SAMPLE, SPLIT, bits_of, samples_of_columns
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.trace.reader import Trace
from tests.frameworks.importing.layouts import (
    Row,
    assert_holds,
    imported,
    real_rows,
    same_bits,
    save,
    slime_columns,
    slime_sample,
    slime_samples,
    slime_train,
    write_parquet,
    write_records,
)

REPEATED = "repeated responses (same step, prompt and sample index)"


def save_rank(path: Path, columns: Row, **more) -> Path:
    """The columns of one rank, in `ROLLOUT_RANK.pt`."""
    rollout_id, rank = map(int, path.stem.split("_"))
    about = {"rollout_id": rollout_id, "rank": rank, "cp_rank": 0, "cp_size": 1}
    return save(path, about | {"qkv_format": "thd", "rollout_data": columns} | more)


def losses(rows: list[Row], old: str = "logp_recomputed") -> list[Row]:
    """What the loss dumps of each response."""
    names = {
        "train_log_probs": "logp_trainer",
        "old_log_probs": old,
        "rollout_log_probs": "logp_rollout",
        "advantages": "advantage",
    }
    return [{its: torch.tensor(row[name]) for its, name in names.items()} for row in rows]


def save_losses(path: Path, samples: list[Row]) -> Path:
    _, rank, _, call = path.stem.split("_")
    return save(path, {"samples": samples, "rank": int(rank), "call": int(call), "finite": {}})


def test_slime_train_data_to_the_bit(tmp_path):
    rows = real_rows(8)
    slime_train(tmp_path / "train_data" / "0.pt", rows[:5])
    slime_train(tmp_path / "train_data" / "12.pt", rows[5:], rollout_id=12)
    write_records(tmp_path / "rollout_data" / "0.pt", slime_samples(rows[:5]))
    write_records(tmp_path / "rollout_data" / "eval_0.pt", slime_samples(rows[:2]))
    table, about = imported(tmp_path, into=tmp_path / "trace")
    names = ("logp_rollout", "advantage", "prompt_ids", "response_ids", "loss_mask")
    assert_holds(table, rows, *names, logp_trainer="logp_recomputed")
    # Raw, not the 0.5 of training
    assert table.column("reward").to_pylist() == [row["reward"] for row in rows]
    assert table.column("step").to_pylist() == [0] * 5 + [12] * 3
    assert table.column("finish_reason").to_pylist() == [row["finish_reason"] for row in rows]
    assert (about["format"], about["left_out"]) == ("slime", {EVALUATION: 1, SAME_SAMPLES: 1})
    assert list(analyse_mismatch([Trace.open(tmp_path / "trace")], 1).pairs) == ["mismatch"]


def test_slime_rollout_data_has_no_policy_and_says_which_weights_sampled(tmp_path):
    rows = real_rows(4)
    samples = slime_samples(rows)
    samples[0] |= {"loss_mask": None, "reward": {"correct": 1}}
    samples[1]["remove_sample"] = True
    samples[2]["status"] = "aborted"
    path = write_records(tmp_path / "7.pt", samples, rollout_id=7)
    table, about = imported(path, into=tmp_path / "trace")
    assert "logp_trainer" not in table.column_names and about["rows_with_trainer"] == 0
    assert_holds(table, rows, "logp_rollout")
    masks = table.column("loss_mask").to_pylist()
    assert all(masks[0]) and not any(masks[1]) and masks[2] == rows[2]["loss_mask"]
    assert table.column("version_rollout").to_pylist() == [3] * 4
    assert table.column("reward").to_pylist()[0] is None and about["noted"][NO_NUMBER] == 1
    assert table.column("finish_reason").to_pylist()[2] == "aborted"


def test_broken_samples_are_left_out_by_reason(tmp_path):
    samples = slime_samples(real_rows(7))
    samples[1]["tokens"] = []
    samples[2]["response_length"] = None
    samples[3]["response_length"] = 10_000
    samples[4]["rollout_log_probs"] = samples[4]["rollout_log_probs"][1:]
    samples[5]["rollout_log_probs"] = None
    samples[6]["response_length"] = 0
    path = write_records(tmp_path / "0.pt", samples)
    table, about = imported(path, into=tmp_path / "trace")
    assert table.num_rows == 1
    assert about["left_out"] == {
        NO_IDS: 1,
        NO_LENGTH: 1,
        WRONG_TOTAL: 1,
        WRONG_LENGTH.format(name="logp_rollout"): 1,
        "responses without log-probabilities of the rollout engine": 1,
        "responses without a token": 1,
    }


def test_ranks_of_one_rollout_count_once_and_the_stage_with_a_policy_wins(tmp_path):
    rows = real_rows(6)
    folder = tmp_path / "details" / "train_data"
    columns = slime_columns(rows[:3])
    first_stage = {name: values for name, values in columns.items() if name != "log_probs"}
    save_rank(folder / "3_0.pt", first_stage)
    save_rank(folder / "3_1.pt", columns)
    save_rank(folder / "3_2.pt", columns)  # another tensor-parallel rank
    save_rank(folder / "4_0.pt", slime_columns(rows[3:]))
    rollout = tmp_path / "details" / "rollout_data" / "3.pt"
    write_records(rollout, slime_samples(rows[:3]), rollout_id=3, metadata={})
    table, about = imported(tmp_path / "details", into=tmp_path / "trace")
    assert_holds(table, rows, logp_trainer="logp_recomputed")
    assert (about["format"], about["left_out"]) == ("miles", {SAME_SAMPLES: 1, REPEATED: 6})
    # Each response once; the file of rollout 3 has its raw rewards
    assert about["noted"] == {NORMALISED: 3}
    assert table.column("reward").to_pylist() == [row["reward"] for row in rows[:3]] + [0.5] * 3
    assert table.column("step").to_pylist() == [3] * 3 + [4] * 3


def test_raw_rewards_of_the_whole_rollout_go_to_their_samples(tmp_path):
    """miles saves them in the order of the rollout, next to the columns of a rank in a different
    order.
    """
    rows = [row | {"reward": float(i)} for i, row in enumerate(real_rows(32) * 2)]
    samples = [slime_sample(row, 500 + i) for i, row in enumerate(rows)]
    for sample in samples:
        sample["reward"] = {"of a reward model": 1}
    rollout = tmp_path / "dump" / "rollout_data" / "3.pt"
    write_records(rollout, samples, rollout_id=3, metadata={})
    order = np.random.default_rng(0).permutation(64)
    raw = [row["reward"] for row in rows]
    # Two tensor-parallel ranks each
    for rank, indices in enumerate((order[:32], order[32:], order[:32], order[32:])):
        columns = slime_columns([rows[i] for i in indices]) | {
            "raw_reward": raw,
            "sample_indices": list(500 + indices),
        }
        save_rank(tmp_path / "dump" / "train_data" / f"3_{rank}.pt", columns)
    table, about = imported(tmp_path / "dump", into=tmp_path / "trace")
    assert table.column("reward").to_pylist() == [raw[i] for i in order]
    assert NORMALISED not in about["noted"] and about["rows"] == 64
    rollout.unlink()  # now the raw rewards cannot be assigned
    table, about = imported(tmp_path / "dump", into=tmp_path / "again")
    assert about["noted"][NORMALISED] == 64 and set(table.column("reward").to_pylist()) == {0.5}


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_rollouts_that_were_not_trained_are_not_said_to_be_the_same_samples(tmp_path, framework):
    """As in a run that is still going: the newest rollouts have no train data."""
    rows = real_rows(2)
    miles = {} if framework == "slime" else {"metadata": {}}
    if framework == "slime":
        slime_train(tmp_path / "train_data" / "10.pt", rows, rollout_id=10)
    else:
        for rank in range(2):
            save_rank(tmp_path / "train_data" / f"10_{rank}.pt", slime_columns(rows))
    for number in (1, 10, 11):
        path = tmp_path / "rollout_data" / f"{number}.pt"
        write_records(path, slime_samples(rows), rollout_id=number, **miles)
    table, about = imported(tmp_path, into=tmp_path / "trace")
    assert table.column("step").to_pylist() == [10, 10]
    reason = NOT_THERE.format("train_data")
    assert about["format"] == framework
    assert (about["left_out"][SAME_SAMPLES], about["left_out"][reason]) == (1, 2)
    assert about["left_out_first"][reason] == "rollout_data/1.pt"


def test_a_rank_that_holds_parts_of_responses_is_left_out(tmp_path):
    save_rank(tmp_path / "train_data" / "0_0.pt", slime_columns(real_rows(2)))
    save_rank(tmp_path / "train_data" / "0_1.pt", slime_columns(real_rows(4)), cp_size=2)
    table, about = imported(tmp_path, into=tmp_path / "trace")
    assert table.num_rows == 2 and about["left_out"] == {SPLIT: 1}


@pytest.mark.parametrize("old", ["logp_recomputed", "logp_rollout"])
def test_the_loss_gives_the_current_policy(tmp_path, old):
    """With --use-rollout-logprobs its "old" policy is μ, which is not recomputed."""
    # One response twice: its log μ does not tell them apart
    rows = [*real_rows(5), real_rows(1)[0]]
    columns = slime_columns(rows)
    if old == "logp_rollout":
        del columns["log_probs"]
    save_rank(tmp_path / "train_data" / "0_2.pt", columns)
    samples = losses([*real_rows(6), real_rows(1)[0]][::-1], old)
    for call in range(2):
        save_losses(tmp_path / "policy_loss_debug" / f"rank_2_call_{call}.pt", samples[call::2])
    table, about = imported(tmp_path, into=tmp_path / "trace")
    assert_holds(table, rows, "logp_trainer")
    assert about["left_out"] == {NO_SAMPLE: 1}
    if old == "logp_recomputed":
        assert_holds(table, rows, "logp_recomputed")
        assert list(analyse_mismatch([Trace.open(tmp_path / "trace")], 1).pairs) == [
            "mismatch",
            "staleness",
            "total",
        ]
    else:
        assert "logp_recomputed" not in table.column_names
        assert list(analyse_mismatch([Trace.open(tmp_path / "trace")], 1).pairs) == ["total"]


def test_an_empty_log_pi_of_a_rollout_does_not_hide_that_of_the_loss(tmp_path):
    rows = real_rows(2)
    samples = [sample | {"log_probs": None} for sample in slime_samples(rows)]
    write_records(tmp_path / "rollout_data" / "0.pt", samples, metadata={})
    save_losses(tmp_path / "policy_loss_debug" / "rank_0_call_0.pt", losses(rows))
    table, about = imported(tmp_path, into=tmp_path / "trace")
    assert_holds(table, rows, "logp_trainer", "logp_recomputed")
    assert about["left_out"] == {}


def test_a_sample_outside_the_loss_has_no_current_policy(tmp_path):
    rows = real_rows(3)
    save_rank(tmp_path / "train_data" / "0_0.pt", slime_columns(rows))
    save_losses(tmp_path / "policy_loss_debug" / "rank_0_call_0.pt", losses(rows[1:2]))
    table, _ = imported(tmp_path, into=tmp_path / "trace")
    assert same_bits(table, "logp_trainer", [None, rows[1]["logp_trainer"], None])
    assert_holds(table, rows, "logp_recomputed")


def test_parquet_columns(tmp_path):
    rows = real_rows(5)
    samples = slime_samples(rows)
    samples[1]["loss_mask"] = None
    samples[2]["rollout_log_probs"] = None
    kinds = {"tokens": pa.int32(), "loss_mask": pa.int8(), "rollout_log_probs": pa.float32()}
    columns = {
        name: pa.array([s[name] for s in samples], pa.list_(kind)) for name, kind in kinds.items()
    }
    columns |= {
        "sample_index": pa.array([s["index"] for s in samples], pa.int32()),
        "response_length": pa.array([s["response_length"] for s in samples], pa.int32()),
        "total_length": pa.array([len(s["tokens"]) for s in samples], pa.int32()),
    }
    write_parquet(tmp_path / "dashboard_columns" / "rollout_12.parquet", pa.table(columns))
    table, about = imported(tmp_path, into=tmp_path / "trace")
    others = [row for i, row in enumerate(rows) if i != 2]
    assert_holds(table, others, "logp_rollout", "response_ids")
    assert table.column("step").to_pylist() == [12] * 4
    assert about["left_out"] == {"responses without log-probabilities of the rollout engine": 1}


def test_numpy_arrays_and_scalars_are_data(tmp_path):
    samples = slime_samples(real_rows(3))
    for sample in samples:
        sample["rollout_log_probs"] = np.array(sample["rollout_log_probs"], np.float32)
        sample["reward"] = np.float64(sample["reward"])
        sample["rollout_routed_experts"] = np.zeros((3, 2), np.int32)
    path = write_records(tmp_path / "0.pt", samples, metadata={})
    table, _ = imported(path, into=tmp_path / "trace")
    assert_holds(table, real_rows(3), "logp_rollout")


def test_a_column_that_lacks_samples_is_refused(tmp_path):
    columns = slime_columns(real_rows(3))
    columns["log_probs"].pop()
    path = save_rank(tmp_path / "0_0.pt", columns)
    with pytest.raises(MismatchError, match="log_probs has no value for some samples"):
        imported(path, into=tmp_path / "trace")


def test_half_precision_and_gradients_are_read(tmp_path):
    rows = real_rows(2)
    samples = slime_samples(rows)
    for sample in samples:
        sample["rollout_log_probs"] = torch.tensor(
            sample["rollout_log_probs"], dtype=torch.bfloat16, requires_grad=True
        )
    samples.append(slime_sample(rows[0], 2) | {"tokens": [2**40] * len(samples[0]["tokens"])})
    path = write_records(tmp_path / "0.pt", samples)
    table, about = imported(path, into=tmp_path / "trace")
    assert same_bits(
        table, "logp_rollout", [s["rollout_log_probs"].float().tolist() for s in samples[:2]]
    )
    assert about["left_out"] == {OTHER_TYPES: 1}


def test_tensors_saved_from_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    slime_train(tmp_path / "0.pt", real_rows(2))
    monkeypatch.undo()
    table, _ = imported(tmp_path / "0.pt", into=tmp_path / "trace")
    assert_holds(table, real_rows(2), "logp_rollout")


def test_samples_are_told_apart_by_every_bit_of_their_log_mu():
    """Two values that float16 rounds to the same number; a list and a tensor are the same."""
    one, other = [-0.5, -2.0], [-0.5, -2.0001]
    assert np.array_equal(np.float16(one), np.float16(other))
    assert bits_of(one) == bits_of(torch.tensor(one)) != bits_of(other)
    assert bits_of(other) == bits_of(torch.tensor(other))


@pytest.mark.parametrize(
    ("raw", "more", "expected"),
    [
        ([1.0, 2.0], {}, [2.0, 1.0]),
        (None, {}, [8.0, 7.0]),
        ([1.0, 2.0, 3.0], {}, [None, None]),
        (torch.tensor([1.0, 2.0]), {}, [2.0, 1.0]),
        ([1.0, 2.0, 3.0], {"partition": [0, 2]}, [1.0, 3.0]),
    ],
)
def test_the_file_of_a_rollout_gives_places_if_it_has_every_sample(raw, more, expected):
    """A partition names the places itself."""
    rollout = {5: {"reward": 7.0}, 6: {"reward": 8.0}}
    columns = {"tokens": [[1], [2]], "sample_indices": [6, 5], "raw_reward": raw, **more}
    samples = samples_of_columns(columns, rollout)
    assert [sample.get("raw_reward") for sample in samples] == expected


@pytest.mark.parametrize("position", [None, -1, 2])
def test_raw_rewards_that_do_not_fit_a_sample_are_given_to_none(position):
    samples = [{"tokens": [1], "rollout_position": at} for at in (0, position)]
    assert with_raw_rewards(samples, [0.5, 1.0]) == samples
    samples[1]["rollout_position"] = 1
    assert [sample["raw_reward"] for sample in with_raw_rewards(samples, [0.5, 1.0])] == [0.5, 1.0]
