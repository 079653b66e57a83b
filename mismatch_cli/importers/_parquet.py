"""Reading Parquet as Arrow tables of about half a million tokens, whatever the file's row groups are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from mismatch_cli.errors import MismatchError, first_line
from mismatch_cli.importers._sources import Source, open_parquet
from mismatch_cli.memory import allowance, decoded_bytes, too_large

TOKENS_PER_BLOCK = 2**19
_BYTES_PER_BLOCK = 2**27  # where other columns are longer


def tables(source: Source, columns: Sequence[str], tokens: str, advance: Callable[[int], None]) -> Iterator[pa.Table]:
    """The rows in order, as far as the file has these columns; `tokens` names the list column that sets the pace."""
    file = open_parquet(source)
    names = [name for name in columns if name in file.schema_arrow.names]
    rows, size = file.metadata.num_rows, decoded_bytes(file.metadata, names)
    if size > allowance(source.size):
        raise too_large(source.path, source.size)
    try:
        by_tokens = TOKENS_PER_BLOCK * rows // max(1, _values_in(file.metadata, tokens))
        batch = max(1, min(by_tokens, _BYTES_PER_BLOCK * rows // max(1, size)))
        for found in file.iter_batches(batch, columns=names, use_threads=False):
            yield pa.Table.from_batches([found])
            advance(source.size * found.num_rows // max(1, rows))
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise MismatchError(
            f"{source.path} is damaged ({first_line(error)}). Copy it again, or name the other files only."
        ) from error


def _values_in(metadata: object, tokens: str) -> int:
    """How many values the list column holds, from the footer."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]  # type: ignore[attr-defined]
    return sum(
        group.column(i).num_values
        for group in groups
        for i in range(group.num_columns)
        if group.column(i).path_in_schema.split(".")[0] == tokens
    )
