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
_SINGULAR = {"sample_indices": "sample_index", "partition": "rollout_position"}


def recognises(peek: FileHead) -> bool:
    if peek.source.kind == "parquet":
        return peek.has("tokens", "response_length", "rollout_log_probs")
    if peek.source.kind != "pt":
        return False
    is_rollout = peek.has("samples", "samples.tokens", "metadata")
    is_loss = peek.has("samples.train_log_probs", "call")
    return is_rollout or is_loss or peek.has("rollout_data.tokens")


def choose(sources: Sequence[DumpFile], tally: Tally) -> list[DumpFile]:
    """Of a folder, choose the files that say most about each sample, and those of the loss."""
    trained = [source for source in sources if "eval_" not in source.path.name]
    tally.leave_out(shared.EVALUATION, len(sources) - len(trained))
    losses, others = _losses_and_others(trained)
    for folder in ("train_data", "rollout_data", "dashboard_columns"):
        best = [source for source in trained if source.path.parent.name == folder]
        if best:
            shared.leave_out_beside(best, others, tally)
            return [*best, *losses]
    return trained


def _losses_and_others(sources: Sequence[DumpFile]) -> tuple[list[DumpFile], list[DumpFile]]:
    """The files of policy_loss_debug, and the other ones."""
    losses: list[DumpFile] = []
    others: list[DumpFile] = []
    for source in sources:
        if re.fullmatch(r"rank_\d+_call_\d+\.pt", source.path.name):
            losses.append(source)
        else:
            others.append(source)
    return losses, others


def blocks(
    sources: Sequence[DumpFile], tally: Tally, advance: Callable[[int], None]
) -> Iterator[tuple[pa.Table, str]]:
    losses, others = _losses_and_others(sources)
    # The loss's files come first, since their log π joins the samples of the others.
    log_pi = _Losses(losses, tally) if losses else None
    for source in _with_policy_first(others):
        with torch_file.laid_out(source.path, TITLE):
            if source.kind == "parquet":
                tables = _parquet_tables(source, tally)
            else:
                tables = _torch_tables(source, tally, log_pi)
            for table in tables:
                yield table, source.name
        advance(source.size)
    if log_pi is not None:
        log_pi.finish()
        advance(sum(source.size for source in losses))


def _with_policy_first(sources: list[DumpFile]) -> list[DumpFile]:
    """Put the ranks with log π first in each rollout: earlier pipeline stages write the same
    samples without it.
    """
    if not all(re.fullmatch(r"\d+_\d+\.pt", source.path.name) for source in sources):
        return sources

    def order(source: DumpFile) -> tuple[int, bool]:
        rollout = int(source.path.name.split("_")[0])
        keys = torch_file.keys_of(torch_file.load(source.path))
        return rollout, "rollout_data.log_probs" not in keys

    return sorted(sources, key=order)


def _torch_tables(source: DumpFile, tally: Tally, log_pi: _Losses | None) -> Iterator[pa.Table]:
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
    if log_pi is not None:
        rank = int(content.get("rank") or 0)
        samples = [log_pi.join(sample, rank) for sample in samples]
    yield from shared.tables(samples, step, tally, source.name)


@lru_cache(maxsize=1)  # every rank of a rollout asks
def _rollout_of(path: Path) -> dict[int, dict[str, Any]]:
    """The samples of the rollout file next to the train data, in order, by their index; none where
    it cannot be read.
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
    samples: list[dict[str, Any]] = [{} for _ in range(len(columns["tokens"]))]
    for name, values in columns.items():
        if name != "raw_reward" and _is_per_sample(name, values, len(samples)):
            for number, sample in enumerate(samples):
                sample[_SINGULAR.get(name, name)] = values[number]
    raw = columns.get("raw_reward")
    if columns.get("partition") is None and rollout:
        raw = _raw_rewards(samples, rollout, raw)
    return shared.with_raw_rewards(samples, raw)


def _raw_rewards(
    samples: list[dict[str, Any]], rollout: dict[int, dict[str, Any]], raw: Any
) -> Any:
    """The raw rewards of a rollout, whose file also gives the samples their positions in it."""
    # Counted, since a dump's rewards may be a tensor, which has no truth
    rewards = 0 if raw is None else len(raw)
    if rewards in (0, len(rollout)):
        _take_positions(samples, rollout)
    if rewards:
        return raw
    return [sample.get("reward") for sample in rollout.values()]


def _take_positions(samples: list[dict[str, Any]], rollout: dict[int, dict[str, Any]]) -> None:
    """Give each sample its position in the rollout's file, None where that has no such sample."""
    position = {index: number for number, index in enumerate(rollout)}
    for sample in samples:
        index = sample.get("sample_index")
        sample["rollout_position"] = None
        if index is not None:
            sample["rollout_position"] = position.get(foreign_values.whole_number(index))


def _is_per_sample(name: str, values: Any, count: int) -> bool:
    """Whether a column has a value for each sample; a ValueError where it should but does not."""
    if values is None:
        return False
    if hasattr(values, "__len__") and len(values) == count:
        return True
    if name in shared.KINDS or name in shared.NUMBERS:
        raise ValueError(f"{name} has no value for some samples")
    return False


def _parquet_tables(source: DumpFile, tally: Tally) -> Iterator[pa.Table]:
    numbers = re.findall(r"\d+", source.path.name)
    step = int(numbers[-1]) if numbers else 0
    for table in parquet_tables(source, _PARQUET, "tokens", lambda _bytes: None):
        columns = table.to_pydict()
        for name in ("tokens", "loss_mask", "rollout_log_probs"):
            columns[name] = _arrays(table, name)
        rows = zip(*columns.values(), strict=True)
        samples = [dict(zip(columns, row, strict=True)) for row in rows]
        yield from shared.tables(samples, step, tally, source.name)


def _arrays(table: pa.Table, name: str) -> list[np.ndarray | None]:
    """The rows of a list column as arrays, None for null; None for all without the column."""
    if name not in table.column_names or pa.types.is_null(table.column(name).type):
        return [None] * table.num_rows
    column = foreign_values.single(table.column(name))
    ends = _lists.offsets_of(_lists.lengths_of(column))[1:-1]
    rows: list[np.ndarray | None] = [*np.split(_lists.flat(column), ends)]
    for number in np.flatnonzero(_lists.is_null(column)):
        rows[number] = None
    return rows


class _Losses:
    """The inputs of each call of the policy loss, by rank and by the bits of log μ."""

    def __init__(self, sources: list[DumpFile], tally: Tally) -> None:
        self._tally = tally
        # Rarely more than one sample has the same bits: equal answers of few tokens.
        self._samples: dict[tuple[int, bytes], list[dict[str, Any]]] = {}
        for source in sources:
            with torch_file.laid_out(source.path, TITLE):
                content = torch_file.load(source.path)
                for sample in shared.samples_of(content, source):
                    if sample.get("rollout_log_probs") is not None:
                        key = int(content["rank"]), bits_of(sample["rollout_log_probs"])
                        self._samples.setdefault(key, []).append(sample)

    def join(self, sample: dict[str, Any], rank: int) -> dict[str, Any]:
        """The sample with the current log π, and the loss's old log π as recomputed unless it is
        μ itself.
        """
        mu = sample.get("rollout_log_probs")
        equal = [] if mu is None else self._samples.get((rank, bits_of(mu)), [])
        loss = equal.pop(0) if equal else {}
        old = loss.get("old_log_probs")
        # With --use-rollout-logprobs, the loss's "old" log-probabilities are the engine's.
        if old is not None and bits_of(old) == bits_of(mu):
            old = None
        recomputed = sample.get("log_probs")
        from_loss = {
            "train_log_probs": loss.get("train_log_probs"),
            "log_probs": None,
            "old_log_probs": old if recomputed is None else recomputed,
        }
        return sample | from_loss | {"newer_trainer": True}

    def finish(self) -> None:
        """Count the samples of the loss that no other file has."""
        self._tally.leave_out(NO_SAMPLE, sum(map(len, self._samples.values())))


def bits_of(values: Any) -> bytes:
    """Log-probabilities as bytes, equal only if they are equal bit for bit in float32."""
    return foreign_values.flat_array(values, pa.float32()).tobytes()
