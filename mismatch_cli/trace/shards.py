"""Opens and checks a shard, reads its footer and its row groups.

A damaged or foreign shard, which can be left out, is distinguished from a store that does not
answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_cli.base.errors import MismatchError, denied, first_line
from mismatch_cli.base.memory import allowance, decoded_bytes, too_large
from mismatch_cli.trace.columns import COLUMNS, REQUIRED, length_column
from mismatch_cli.trace.manifest import read_manifest, remedy
from mismatch_cli.trace.stores import StoreError, decoding, is_store, source_of

_RANGED = ("step", "version_rollout", "version_trainer")
_MOST_OF_A_GROUP = 2**28  # bytes of a row group besides 20 × the file; our own have less than half


class DamagedShard(MismatchError):
    """A shard that cannot be read, or holds invalid columns."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message, path)
        self.path = path

    def __str__(self) -> str:
        return str(self.args[0])


class Footer(NamedTuple):
    """What is known of a shard without reading its columns."""

    columns: frozenset[str]
    counts: Mapping[bytes, bytes]  # its metadata
    rows: tuple[int, ...]  # of each row group
    tokens: int
    # Of each row group: the minimum and maximum of some columns, where its writer noted them
    ranges: tuple[Mapping[str, tuple[int, int]], ...]
    rows_without_recomputed: int  # how many have no log π′


def open_shard(path: Path) -> pq.ParquetFile:
    """Open one shard and check its columns; a damaged or foreign file is a `MismatchError`."""
    try:
        with decoding(path):
            shard = pq.ParquetFile(source_of(path), memory_map=True, pre_buffer=is_store(path))
            _leaves(shard.metadata)  # a name that is not UTF-8 is damage
    except StoreError:
        raise
    # A file that is gone or closed to us is not damaged, so `--skip-broken` does not leave it out.
    except FileNotFoundError as error:
        raise MismatchError(
            f"{path} is gone, or not visible here. Restore it, or put it on a file system that "
            "all readers see."
        ) from error
    except PermissionError as error:
        raise denied(path) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        _check_it_answers(path, error)
        raise DamagedShard(
            f"{path} is damaged ({first_line(error)}). {_again(path)}", path
        ) from error
    _check_columns(shard.schema_arrow, path)
    size = path.stat().st_size
    if decoded_bytes(shard.metadata) > allowance(size):
        raise DamagedShard(str(too_large(path, size)), path)
    return shard


def _check_columns(schema: pa.Schema, path: Path) -> None:
    """A `DamagedShard` for columns that are missing, there twice, or of another type."""
    missing = [name for name in REQUIRED if name not in schema.names]
    if missing:
        raise DamagedShard(
            f"{path} is not a shard of a trace: it lacks {', '.join(missing)}. {_again(path)}", path
        )
    if len(set(schema.names)) < len(schema.names):
        raise DamagedShard(
            f"{path} is not a shard of a trace: it holds a column twice. {_again(path)}", path
        )
    for name in set(schema.names) & set(COLUMNS):
        actual, expected = schema.field(name).type, COLUMNS[name].type
        if not actual.equals(expected):
            raise DamagedShard(
                f"{path}: column {name} is {actual}, expected {expected}. {_again(path)}", path
            )


def footer_of(path: Path) -> Footer:
    """The footer of a shard, whose columns are checked as in `open_shard`."""
    shard = open_shard(path)
    footer, schema = shard.metadata, shard.schema_arrow
    leaves = _leaves(footer)
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    lengths = _index_of_list(leaves, length_column(schema.names))
    return Footer(
        columns=frozenset(schema.names),
        counts=schema.metadata or {},
        rows=tuple(group.num_rows for group in groups),
        tokens=sum(group.column(lengths).num_values for group in groups),
        ranges=tuple(_ranges(leaves, group) for group in groups),
        rows_without_recomputed=_rows_without_recomputed(leaves, groups),
    )


def _rows_without_recomputed(leaves: Sequence[str], groups: Sequence[pq.RowGroupMetaData]) -> int:
    recomputed = _index_of_list(leaves, "logp_recomputed")
    if recomputed is None:
        return sum(group.num_rows for group in groups)
    rows = 0
    for group in groups:
        column = group.column(recomputed)
        # Parquet stores a null list as a single null entry of its leaf, so these nulls are rows.
        if column.is_stats_set:
            rows += column.statistics.null_count
    return rows


def _index_of_list(leaves: Sequence[str], name: str) -> int | None:
    """The index of the column that holds the items of a list; None without the list."""
    for index, leaf in enumerate(leaves):
        if leaf.startswith(f"{name}."):
            return index
    return None


def _leaves(footer: pq.FileMetaData) -> list[str]:
    """The paths of the columns in a footer, such as `response_ids.list.element`."""
    return [footer.schema.column(index).path for index in range(footer.num_columns)]


def _ranges(leaves: Sequence[str], group: pq.RowGroupMetaData) -> dict[str, tuple[int, int]]:
    """The minimum and maximum of the columns in `_RANGED`, where the footer has them."""
    ranges = {}
    for name in _RANGED:
        if name in leaves:
            stats = group.column(leaves.index(name)).statistics
            if stats is not None and stats.has_min_max and not stats.null_count:
                ranges[name] = (stats.min, stats.max)
    return ranges


def read_group(shard: pq.ParquetFile, group: int, columns: list[str], path: Path) -> pa.Table:
    """Read some columns of a row group; a `DamagedShard` if it cannot be decoded, or not in
    bounded memory.
    """
    size = path.stat().st_size
    most = _MOST_OF_A_GROUP + allowance(size) - allowance(0)
    if decoded_bytes(shard.metadata, columns, [group]) > most:
        raise DamagedShard(str(too_large(path, size)), path)
    try:
        with decoding(path):
            return shard.read_row_group(group, columns=columns, use_threads=False)
    except (MemoryError, StoreError):
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        _check_it_answers(path, error)
        message = f"{path} is damaged in row group {group} ({first_line(error)}). {_again(path)}"
        raise DamagedShard(message, path) from error


def _check_it_answers(path: Path, error: Exception) -> None:
    """A `MismatchError` for a failure of the file system, which has a number and says nothing of
    the file.
    """
    if isinstance(error, OSError) and error.errno is not None:
        raise MismatchError(
            f"{path} cannot be read now ({error.strerror}). Check its file system."
        ) from error


def _again(shard: Path) -> str:
    """What to do about an unreadable shard."""
    try:
        manifest = read_manifest(shard.parent)
    except MismatchError:
        return "Restore it from a copy, or record it again."
    advice = remedy(shard.parent, manifest)
    # These commands resume a run, and then record a missing shard again.
    if manifest.get("command") in ("probe", "curate", "rescore"):
        return f"Delete it. {advice}"
    return advice
