"""Files that are either there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mismatch_cli.errors import MismatchError

TEMPORARY_SUFFIX = ".part"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` and rename it over `path` once the block has written it.

    An exception leaves `path` as it was and removes the temporary file; a kill leaves the temporary file, which nothing
    reads and the next attempt overwrites. A full disk is a `MismatchError`.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())  # the rename must not become durable before the content
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise MismatchError(
            f"Could not write {path} ({error.strerror or error}). What was recorded before is kept: "
            "make room or choose another --output, then go on with --resume."
        ) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
