"""Caches the results of portions by question and shards, so that nothing is read twice.

A file holds the result of a pass over the first shards of a portion. Shards are identified by path,
size and modification time, the question by its settings and by the program's own code.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache as remembered
from hashlib import sha256
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from mismatch_cli.base.entry_points import fingerprint
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import PACKAGE
from mismatch_cli.processes.workers.portions import Leaf, Portion, TracePass
from mismatch_cli.rules import trust_regions
from mismatch_cli.trace.files import replacing

_DIGEST = 32  # bytes
_PLAIN = (str, int, float, bool, bytes, np.generic, NoneType)  # equal values have equal texts


@dataclass(frozen=True)
class Cache:
    """A folder with the results of portions, safe to delete.

    Its files are pickles: never use a folder that others can write to.
    """

    folder: Path

    def entry(self, question: TracePass[Any], portion: Portion) -> Entry | None:
        """The file for the answer to a question about a portion; call this before reading the
        portion.

        None if a store does not report modification times: a changed shard would go unnoticed.
        """
        identity = (
            program_hash(),
            type(question).__qualname__,
            question,
            portion.trace,
            portion.shards[:1],
            # Without it, the cache would answer for one step with the whole shard.
            portion.step,
        )
        shards: list[tuple[str, int, int]] = []
        for path in portion.shards:
            status = path.stat()
            if not status.st_mtime_ns:
                return None
            shards.append((str(path.absolute()), status.st_size, status.st_mtime_ns))
        name = sha256(as_bytes(identity)).hexdigest()[:40]
        return Entry(self.folder / f"{name}.part", shards)


class Entry(NamedTuple):
    """A file of the cache for one question about one portion, and the portion's shards as they are
    now.
    """

    path: Path
    shards: list[tuple[str, int, int]]  # path, bytes, modification time

    def read(self) -> tuple[Leaf[Any] | None, int]:
        """The result for the first shards of the portion, and their number.

        None and 0 if there is none, one of the shards has changed or is gone, or the file is
        damaged.
        """
        try:
            content = self.path.read_bytes()
            digest, pickled = content[:_DIGEST], content[_DIGEST:]
            if sha256(pickled).digest() != digest:
                return None, 0
            shards, leaf = pickle.loads(pickled)
        except OSError:
            return None, 0
        if shards != self.shards[: len(shards)]:
            return None, 0
        return leaf, len(shards)

    def write(self, leaf: Leaf[Any]) -> None:
        """Store the result for all of its shards."""
        pickled = pickle.dumps((self.shards, leaf), pickle.HIGHEST_PROTOCOL)
        with replacing(self.path) as temporary:
            temporary.write_bytes(sha256(pickled).digest() + pickled)


@remembered
def program_hash() -> str:
    """A hash of the package's code and of entry points: results of different code do not count."""
    digest = sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    for code in fingerprint():
        digest.update(code)
    return digest.hexdigest()


def as_bytes(value: Any) -> bytes:
    """A question as bytes that are equal in every process; a user's mask is identified by its
    file's content.
    """
    if isinstance(value, np.ndarray):
        header = str((value.dtype, value.shape)).encode()
        return b"array" + header + np.ascontiguousarray(value).tobytes()
    if isinstance(value, Path):
        return as_bytes(str(value.absolute()))
    if isinstance(value, str) and value.endswith(".py"):
        return value.encode() + sha256(trust_regions.source_text(Path(value)).encode()).digest()
    if isinstance(value, _PLAIN):
        return repr(value).encode()
    if isinstance(value, Mapping):
        items = [as_bytes(key) + b":" + as_bytes(item) for key, item in value.items()]
        return b"{" + b",".join(items) + b"}"
    if isinstance(value, tuple | list):
        return b"[" + b",".join(map(as_bytes, value)) + b"]"
    if is_dataclass(value):
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        return type(value).__qualname__.encode() + as_bytes(values)
    raise MismatchError(
        f"The cache cannot store a question with {type(value).__name__}. Leave out --cache."
    )
