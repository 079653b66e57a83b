"""miles' dumps: train data per rank, rollout data, the dashboard's Parquet columns, and the inputs
of each policy loss.

Written by `miles/utils/train_dump_utils.py`, `miles/ray/rollout/debug_data.py` and
`miles/backends/training_utils/debug_dump.py` with `--dump-details DIR`. A folder holds the same
samples several times: train data comes first, then rollout data, then the Parquet columns.
Tensor-parallel ranks write the same samples; each counts once. The loss's own dump has no token
ids: its current log π joins the sample of the same rank with the same log μ, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.importing import lists as _lists
from mismatch_cli.frameworks.importing import samples as shared
from mismatch_cli.frameworks.importing import torch_file
from mismatch_cli.frameworks.importing.omissions import Tally
from mismatch_cli.frameworks.importing.sources import DumpFile, FileHead, parquet_tables
from mismatch_cli.trace import foreign_values

TITLE = "miles --dump-details"
FILES = (
    "train_data/N_R.pt, rollout_data/N.pt, dashboard_columns/rollout_N.parquet, "
    "policy_loss_debug/rank_R_call_C.pt"
)
ENABLE = "--dump-details DIR"
PI = "recomputed"
HOLDS = (
    "log_probs, recomputed before the update; with policy_loss_debug also the current ones; "
    "rollout data has none"
)
SHIFT = "none: R values for the last R of tokens"
PADDING = "none"
AVERAGING = "mean of the means over each response; masked tokens have log-probability 0"

SPLIT = (
    "files of a rank that holds only a part of each response (context parallelism): import "
    "rollout_data instead"
)
NO_SAMPLE = "samples of policy_loss_debug whose log μ matches no sample of the same rank"
_PARQUET = (
    "sample_index",
    "response_length",
    "total_length",
    "tokens",
    "loss_mask",
    "rollout_log_probs",
)
Found = dict[bytes, list[dict[str, Any]]]  # rarely more than one: equal answers of few tokens


def recognises(peek: FileHead) -> bool:
    if peek.source.kind == "parquet":
        return peek.has("tokens", "response_length", "rollout_log_probs")
    samples = peek.has("samples", "samples.tokens", "metadata")
    return peek.source.kind == "pt" and (
        samples or peek.has("rollout_data.tokens") or peek.has("samples.train_log_probs", "call")
    )


def choose(sources: Sequence[DumpFile], tally: Tally) -> list[DumpFile]:
    """Of a folder, choose the files that say most about each sample, and those of the loss."""
    trained = [source for source in sources if "eval_" not in source.path.name]
    tally.leave_out(shared.EVALUATION, len(sources) - len(trained))
    losses = [source for source in trained if _is_loss(source)]
    for folder in ("train_data", "rollout_data", "dashboard_columns"):
        if best := [source for source in trained if source.path.parent.name == folder]:
            tally.leave_out(shared.SAME_SAMPLES, len(trained) - len(losses) - len(best))
            return [*best, *losses]
    return trained


def _is_loss(source: DumpFile) -> bool:
    return re.fullmatch(r"rank_\d+_call_\d+\.pt", source.path.name) is not None


def blocks(
    sources: Sequence[DumpFile], tally: Tally, advance: Callable[[int], None]
) -> Iterator[tuple[pa.Table, str]]:
    losses = [source for source in sources if _is_loss(source)]
    seen = _Losses(losses, tally) if losses else None
    for source in _with_policy_first([source for source in sources if not _is_loss(source)]):
        tables = _parquet_tables if source.kind == "parquet" else _torch_tables
        with torch_file.laid_out(source.path, TITLE):
            for table in tables(source, tally, seen):
                yield table, source.name
        advance(source.size)
    if seen is not None:
        seen.finish()
        advance(sum(source.size for source in losses))


def _with_policy_first(sources: list[DumpFile]) -> list[DumpFile]:
    """Put the ranks with log π first in each rollout: earlier pipeline stages write the same
    samples without it.
    """
    ranked = [source for source in sources if re.fullmatch(r"\d+_\d+\.pt", source.path.name)]
    if len(ranked) < len(sources):
        return sources
    keys = [torch_file.keys_of(torch_file.load(source.path)) for source in sources]
    order = sorted(
        range(len(sources)),
        key=lambda i: (
            int(sources[i].path.name.split("_")[0]),
            "rollout_data.log_probs" not in keys[i],
            i,
        ),
    )
    return [sources[i] for i in order]


def _torch_tables(source: DumpFile, tally: Tally, seen: _Losses | None) -> Iterator[pa.Table]:
    content = torch_file.load(source.path)
    columns = content.get("rollout_data") if isinstance(content, dict) else None
    if columns is not None and int(content.get("cp_size") or 1) > 1:
        tally.leave_out(SPLIT, 1, source.name)
        return
    step = foreign_values.whole_number(content.get("rollout_id") or 0, np.int32)
    if columns is None:
        samples = shared.samples_of(content, source)
    else:
        rollout = source.path.parent.parent / "rollout_data" / f"{step}.pt"
        samples = samples_of_columns(columns, _rollout_of(rollout) if rollout.is_file() else {})
    if seen is not None:
        samples = [seen.join(sample, int(content.get("rank") or 0)) for sample in samples]
    yield from shared.tables(samples, step, tally, source.name)


@lru_cache(maxsize=1)  # every rank of a rollout asks
def _rollout_of(path: Path) -> dict[int, dict[str, Any]]:
    """The samples of the rollout file next to the train data, in order; none where it cannot be
    read.
    """
    try:
        samples = torch_file.load(path)["samples"]
        return {foreign_values.whole_number(sample["index"]): sample for sample in samples}
    except (MismatchError, KeyError, TypeError, ValueError):
        return {}


def samples_of_columns(
    columns: dict[str, Any], rollout: dict[int, dict[str, Any]]
) -> list[dict[str, Any]]:
    """A dict per sample from columns, without those that do not hold one value per sample
    (schedules).

    `raw_reward` covers the whole rollout in its order, which only the rollout's file tells (miles
    removes `partition` before it saves). Without that column, the rewards in that file are the raw
    ones.
    """
    count = len(columns["tokens"])
    raw = columns.get("raw_reward")
    whole = {
        name: values
        for name, values in columns.items()
        if name != "raw_reward" and _is_per_sample(name, values, count)
    }
    partition = columns.get("partition")
    names = {"sample_indices": "sample_index", "partition": "rollout_position"}
    samples = [
        {names.get(name, name): values[i] for name, values in whole.items()} for i in range(count)
    ]
    if partition is None and rollout and len(rollout) == len(raw or rollout):
        position = {index: at for at, index in enumerate(rollout)}
        for sample in samples:
            index = sample.get("sample_index")
            sample["rollout_position"] = (
                None if index is None else position.get(foreign_values.whole_number(index))
            )
        raw = raw or [sample.get("reward") for sample in rollout.values()]
    return shared.with_raw_rewards(samples, raw)


def _is_per_sample(name: str, values: Any, count: int) -> bool:
    if values is not None and hasattr(values, "__len__") and len(values) == count:
        return True
    if values is not None and name in shared.KINDS.keys() | set(shared.NUMBERS):
        raise ValueError(f"{name} has no value for some samples")
    return False


def _parquet_tables(source: DumpFile, tally: Tally, _seen: Any) -> Iterator[pa.Table]:
    found = re.findall(r"\d+", source.path.name)
    for table in parquet_tables(source, _PARQUET, "tokens", lambda _bytes: None):
        rows = table.to_pydict() | {
            name: _arrays(table, name) for name in ("tokens", "loss_mask", "rollout_log_probs")
        }
        samples = [
            dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)
        ]
        yield from shared.tables(samples, int(found[-1]) if found else 0, tally, source.name)


def _arrays(table: pa.Table, name: str) -> list[np.ndarray | None]:
    if name not in table.column_names or pa.types.is_null(table.column(name).type):
        return [None] * table.num_rows
    column = foreign_values.single(table.column(name))
    parts = np.split(_lists.flat(column), _lists.offsets_of(_lists.lengths_of(column))[1:-1])
    return [
        None if null else part for part, null in zip(parts, _lists.is_null(column), strict=True)
    ]


class _Losses:
    """The inputs of each call of the policy loss, by rank and by the bits of log μ."""

    def __init__(self, sources: list[DumpFile], tally: Tally) -> None:
        self._tally = tally
        self._found: dict[int, Found] = {}
        for source in sources:
            with torch_file.laid_out(source.path, TITLE):
                content = torch_file.load(source.path)
                for sample in shared.samples_of(content, source):
                    if sample.get("rollout_log_probs") is not None:
                        by_mu = self._found.setdefault(int(content["rank"]), {})
                        by_mu.setdefault(bits_of(sample["rollout_log_probs"]), []).append(sample)

    def join(self, sample: dict[str, Any], rank: int) -> dict[str, Any]:
        """The sample with the current log π, and the loss's old log π as recomputed unless it is
        μ itself.
        """
        mu = sample.get("rollout_log_probs")
        equal = [] if mu is None else self._found.get(rank, {}).get(bits_of(mu), [])
        loss = equal.pop(0) if equal else {}
        old = loss.get("old_log_probs")
        if old is not None and bits_of(old) == bits_of(mu):
            old = None  # --use-rollout-logprobs: "old" is the engine's
        old = sample.get("log_probs", old)
        from_loss = {
            "train_log_probs": loss.get("train_log_probs"),
            "log_probs": None,
            "old_log_probs": old,
        }
        return sample | from_loss | {"newer_trainer": True}

    def finish(self) -> None:
        self._tally.leave_out(
            NO_SAMPLE, sum(len(equal) for found in self._found.values() for equal in found.values())
        )


def bits_of(values: Any) -> bytes:
    return foreign_values.flat_array(values, pa.float32()).tobytes()
