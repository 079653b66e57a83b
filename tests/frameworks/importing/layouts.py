"""Writes dumps as each framework documents them, from the bundled trace, and reads back what an
import wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
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


def real_rows(count: int, step: int = 0) -> list[Row]:
    """Responses of the bundled trace, as Python values."""
    table = next(iter(Trace.open(bundled("traces/fp8-kv")).tables()))
    return [row | {"step": step} for row in table.slice(0, count).to_pylist()]


class Silent:
    """Progress that shows nothing."""

    def say(self, message: str) -> None: ...

    def counting(
        self, phase: str, total: int, unit: str
    ) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(lambda count: None)


def imported(*paths: Path, into: Path, **more: Any) -> tuple[pa.Table, dict[str, Any]]:
    """The rows of the trace that an import writes, and what its manifest says."""
    into.mkdir(exist_ok=True)
    import_dump(replace(Import(paths), **more), into, Silent())
    trace = Trace.open(into)
    return pa.concat_tables(trace.tables(), promote_options="default"), trace.manifest["imported"]


def same_bits(table: pa.Table, name: str, expected: Iterable[Any]) -> bool:
    """Whether a list column holds these values, in float32 or integers, bit for bit."""
    kind = table.schema.field(name).type.value_type.to_pandas_dtype()
    found = [
        None if row is None else np.array(row, kind).tobytes()
        for row in table.column(name).to_pylist()
    ]
    return found == [None if row is None else np.array(row, kind).tobytes() for row in expected]


def write_lines(path: Path, records: Iterable[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def prime_rl(folder: Path, rows: list[Row], rank: int = 0) -> Path:
    return write_lines(
        folder / "token_exports" / f"step_{rows[0]['step']}" / f"rank_{rank}.jsonl",
        [export_record(row, rank, i) for i, row in enumerate(rows)],
    )


def nemo_record(row: Row, index: int, width: int, *, pad: int = 0) -> Row:
    """One line as `log_batched_dict_as_jsonl` writes it: every value in a list of one,
    right-padded.
    """
    prompt, response = row["prompt_ids"], row["response_ids"]
    size = len(prompt) + len(response)
    padding, before = [pad] * (width - size), [0.0] * len(prompt)
    fill = [0.0] * len(padding)
    return {
        "content": ["text"],
        "rewards": [row["reward"]],
        "input_lengths": [size],
        "token_ids": [prompt + response + padding],
        "token_loss_mask": [
            [0] * len(prompt) + [int(m) for m in row["loss_mask"]] + [0] * len(padding)
        ],
        "sample_loss_mask": [1.0],
        "advantages": [[row["advantage"][0]] * width],
        "generation_logprobs": [before + row["logp_rollout"] + fill],
        "prev_logprobs": [before + row["logp_recomputed"] + fill],
        "idx": index,
    }


def nemo_rl(
    path: Path, rows: list[Row], change: Callable[[Row], Row] = lambda record: record
) -> Path:
    width = max(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows) + 3
    return write_lines(path, [change(nemo_record(row, i, width)) for i, row in enumerate(rows)])


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
        "loss_mask": [int(m) for m in row["loss_mask"]],
        "weight_versions": ["3", "4"],
        "rollout_log_probs": row["logp_rollout"],
        "remove_sample": False,
        "status": "completed" if row["finish_reason"] == "stop" else "truncated",
        "metadata": {},
        "spec_info": {},
    }


def slime_columns(rows: list[Row]) -> Row:
    """The trainer's columns of a rank: plural names, tensors, one entry per sample."""
    tensors = {
        "rollout_log_probs": "logp_rollout",
        "log_probs": "logp_recomputed",
        "advantages": "advantage",
    }
    return {
        "tokens": [torch.tensor(row["prompt_ids"] + row["response_ids"]) for row in rows],
        "response_lengths": [len(row["response_ids"]) for row in rows],
        "total_lengths": [len(row["prompt_ids"] + row["response_ids"]) for row in rows],
        "rewards": [0.5 for _ in rows],
        "truncated": [int(row["finish_reason"] == "length") for row in rows],
        "loss_masks": [torch.tensor([int(m) for m in row["loss_mask"]]) for row in rows],
        "sample_indices": list(range(len(rows))),
        "num_microbatches": [1],
        "micro_batch_indices": [[[0, 1]]],
        **{name: [torch.tensor(row[column]) for row in rows] for name, column in tensors.items()},
    }


def slime_train(path: Path, rows: list[Row], rollout_id: int = 0) -> Path:
    """Format 2: a dict per sample, in the order of the rollout (`rollout_position`)."""
    columns = {name: values for name, values in slime_columns(rows).items() if "micro" not in name}
    names = {"sample_indices": "sample_index"}
    samples = [
        {names.get(name, name): values[i] for name, values in columns.items()}
        for i in range(len(rows))
    ]
    samples = [
        sample | {"rollout_position": i, "data_parallel_rank": 0}
        for i, sample in enumerate(samples)
    ]
    content = {
        "format_version": 2,
        "rollout_id": rollout_id,
        "rank": 0,
        "samples": samples,
        "dp_shards": [],
    }
    return save(path, content | {"raw_reward": [row["reward"] for row in rows]})


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
