"""Writes dumps as each framework documents them, from the bundled trace, and reads back what an
import wrote.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from lab.makers.make_dump import export_record
from mismatch_cli.base.places import bundled
from mismatch_cli.frameworks.importing.driver import Import, import_dump
from mismatch_cli.trace.reader import Trace

Row = dict[str, Any]
SILENT: Any = SimpleNamespace(
    say=lambda _: None, counting=lambda *_, **__: nullcontext(lambda _: None)
)


def real_rows(count: int, step: int = 0) -> list[Row]:
    """Responses of the bundled trace, as Python values."""
    table = next(iter(Trace.open(bundled("traces/fp8-kv")).tables()))
    return [row | {"step": step} for row in table.slice(0, count).to_pylist()]


def whole(folder: Path) -> pa.Table:
    """The rows of a trace."""
    return pa.concat_tables(Trace.open(folder).tables(), promote_options="default")


def imported(*paths: Path, into: Path, **more: Any) -> tuple[pa.Table, dict[str, Any]]:
    """The rows of the trace that an import writes, and what its manifest says."""
    into.mkdir(exist_ok=True)
    import_dump(Import(paths, **more), into, SILENT)
    return whole(into), Trace.open(into).manifest["imported"]


def same_bits(table: pa.Table, name: str, expected: Iterable[Any]) -> bool:
    """Whether a list column holds these values, in float32 or integers, bit for bit."""
    kind = table.schema.field(name).type.value_type.to_pandas_dtype()

    # NaN equals itself in bytes
    def bits(lists: Iterable[Any]) -> list[bytes | None]:
        return [None if values is None else np.array(values, kind).tobytes() for values in lists]

    return bits(table.column(name).to_pylist()) == bits(expected)


def assert_holds(table: pa.Table, rows: list[Row], *names: str, **theirs: str) -> None:
    """Assert that list columns are those of `rows`, bit for bit; `theirs` are called differently
    in the rows.
    """
    for name, its in (dict(zip(names, names, strict=True)) | theirs).items():
        assert same_bits(table, name, column(rows, its)), name


def column(rows: list[Row], name: str) -> list[Any]:
    return [row[name] for row in rows]


def ones(lists: Iterable[list[Any]]) -> list[list[int]]:
    return [[1] * len(values) for values in lists]


def padded(lists: list[list[Any]], fill: float = 0, *, left: bool = False) -> list[list[Any]]:
    """Lists of one length, two more than the longest has."""
    width = max(map(len, lists)) + 2
    rows = []
    for values in lists:
        pad = [fill] * (width - len(values))
        rows.append(pad + values if left else values + pad)
    return rows


def write_lines(path: Path, records: Iterable[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
    return path


def write_records(path: Path, records: list[Row], **more: Any) -> Path:
    """By the suffix: lines, a Parquet file, or a rollout of slime with `more` beside its
    samples.
    """
    if path.suffix == ".pt":
        return save(path, {"rollout_id": 0, "samples": records} | more)
    if path.suffix == ".parquet":
        return write_parquet(path, pa.Table.from_struct_array(pa.array(records)))
    return write_lines(path, records)


def prime_rl(folder: Path, rows: list[Row], rank: int = 0) -> Path:
    return write_lines(
        folder / "token_exports" / f"step_{rows[0]['step']}" / f"rank_{rank}.jsonl",
        [export_record(row, rank, i) for i, row in enumerate(rows)],
    )


def nemo_record(row: Row, index: int, width: int = 400) -> Row:
    """One line as `log_batched_dict_as_jsonl` writes it: every value in a list of one,
    right-padded.
    """
    prompt, response = row["prompt_ids"], row["response_ids"]
    size = len(prompt) + len(response)

    def padded(values: list[Any], filler: float) -> list[Any]:
        before, after = [filler] * (size - len(values)), [filler] * (width - size)
        return [before + values + after]

    return {
        "content": ["text"],
        "rewards": [row["reward"]],
        "input_lengths": [size],
        "token_ids": padded(prompt + response, 0),
        "token_loss_mask": padded(list(map(int, row["loss_mask"])), 0),
        "sample_loss_mask": [1.0],
        "advantages": [[row["advantage"][0]] * width],
        "generation_logprobs": padded(row["logp_rollout"], 0.0),
        "prev_logprobs": padded(row["logp_recomputed"], 0.0),
        "idx": index,
    }


def nemo_records(rows: list[Row]) -> list[Row]:
    width = max(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows) + 3
    return list(map(nemo_record, rows, itertools.count(), itertools.repeat(width)))


def nemo_rl(path: Path, rows: list[Row]) -> Path:
    return write_lines(path, nemo_records(rows))


def slime_sample(row: Row, index: int) -> Row:
    """A dict as from `Sample.to_dict()`."""
    return {
        "group_index": index // 4,
        "index": index,
        "rollout_id": None,
        "prompt": "text",
        "tokens": row["prompt_ids"] + row["response_ids"],
        "response": "text",
        "response_length": len(row["response_ids"]),
        "label": None,
        "reward": row["reward"],
        "loss_mask": list(map(int, row["loss_mask"])),
        "weight_versions": ["3", "4"],
        "rollout_log_probs": row["logp_rollout"],
        "remove_sample": False,
        "status": "completed" if row["finish_reason"] == "stop" else "truncated",
        "metadata": {},
        "spec_info": {},
    }


def slime_samples(rows: list[Row]) -> list[Row]:
    return list(map(slime_sample, rows, itertools.count()))


def slime_columns(rows: list[Row]) -> Row:
    """The trainer's columns of a rank: plural names, tensors, one entry per sample."""

    def tensors(name: str) -> list[torch.Tensor]:
        return list(map(torch.tensor, column(rows, name)))

    tokens = [torch.tensor(row["prompt_ids"] + row["response_ids"]) for row in rows]
    return {
        "tokens": tokens,
        "response_lengths": list(map(len, column(rows, "response_ids"))),
        "total_lengths": list(map(len, tokens)),
        "rewards": [0.5] * len(rows),
        "truncated": [int(reason == "length") for reason in column(rows, "finish_reason")],
        "loss_masks": list(map(torch.Tensor.long, tensors("loss_mask"))),
        "sample_indices": list(range(len(rows))),
        "num_microbatches": [1],
        "micro_batch_indices": [[[0, 1]]],
        "rollout_log_probs": tensors("logp_rollout"),
        "log_probs": tensors("logp_recomputed"),
        "advantages": tensors("advantage"),
    }


def slime_train(path: Path, rows: list[Row], rollout_id: int = 0) -> Path:
    """Format 2: a dict per sample, in the order of the rollout (`rollout_position`)."""
    columns = {name: values for name, values in slime_columns(rows).items() if "micro" not in name}
    columns["sample_index"] = columns.pop("sample_indices")
    columns |= {"rollout_position": range(len(rows)), "data_parallel_rank": [0] * len(rows)}
    samples = []
    for values in zip(*columns.values(), strict=True):
        samples.append(dict(zip(columns, values, strict=True)))
    about = {"format_version": 2, "rollout_id": rollout_id, "rank": 0, "dp_shards": []}
    return save(path, about | {"samples": samples, "raw_reward": column(rows, "reward")})


def open_instruct_record(row: Row, index: int) -> Row:
    return {
        "step": row["step"],
        "sample_idx": index,
        "prompt_idx": index // 4,
        "prompt_tokens": row["prompt_ids"],
        "response_tokens": row["response_ids"],
        "reward": row["reward"],
        "advantage": row["advantage"][0],
        "finish_reason": row["finish_reason"],
        "dataset": "math",
        "ground_truth": [1, 2],
        "request_info": {
            "num_calls": 0,
            "tool_calleds": False,
            "tool_outputs": "",
            "rollout_state": {"done": True},
        },
        "logprobs": row["logp_rollout"],
    }


def plain_record(row: Row) -> Row:
    return {
        name: row[name] for name in ("prompt_ids", "response_ids", "logp_rollout", "logp_trainer")
    }


def save(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def write_parquet(path: Path, table: pa.Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path
