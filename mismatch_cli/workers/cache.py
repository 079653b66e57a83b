"""What was found in portions before, by the question and by the shards: what was read once is not read again.

A file holds what a pass has found in the first shards of a portion. Shards are known by path, size and time of change;
the question by its settings, and by the program that asks it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache as remembered
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mismatch_cli import trust_regions
from mismatch_cli.entry_points import fingerprint
from mismatch_cli.errors import MismatchError
from mismatch_cli.trace.files import replacing
from mismatch_cli.workers.portions import Pass, Portion

if TYPE_CHECKING:
    from mismatch_cli.workers.leaf import Leaf

_DIGEST = 32  # bytes


@dataclass(frozen=True)
class Cache:
    """A folder of parts, which is safe to delete. Its files are pickles: name no folder that others may write to."""

    folder: Path

    def entry(self, asked: Pass[Any], portion: Portion) -> Entry | None:
        """Where the answer to a question about a portion stands; made before the portion is read.

        None where a store does not say when a shard was changed: nothing would tell a new one from the old.
        """
        question = (_program(), type(asked).__qualname__, asked, portion.trace, portion.shards[:1], portion.step)
        found = ((path, path.stat()) for path in portion.shards)
        shards = [(str(path.absolute()), status.st_size, status.st_mtime_ns) for path, status in found]
        if not all(changed for _, _, changed in shards):
            return None
        return Entry(self.folder / f"{sha256(spelled(question)).hexdigest()[:40]}.part", shards)


class Entry(NamedTuple):
    """A file of the cache, and the shards of the portion as they are now."""

    path: Path
    shards: list[tuple[str, int, int]]  # path, bytes, time of the last change

    def known(self) -> tuple[Leaf[Any], int] | None:
        """What was found in the first shards of the portion, and in how many.

        None where nothing is known, where one of them has changed or is gone, and where the file is damaged.
        """
        try:
            content = self.path.read_bytes()
            digest, pickled = content[:_DIGEST], content[_DIGEST:]
            if sha256(pickled).digest() != digest:
                return None
            shards, leaf = pickle.loads(pickled)
        except OSError:
            return None
        return (leaf, len(shards)) if shards == self.shards[: len(shards)] else None

    def keep(self, leaf: Leaf[Any]) -> None:
        """Keep what was found in all of its shards."""
        pickled = pickle.dumps((self.shards, leaf), pickle.HIGHEST_PROTOCOL)
        with replacing(self.path) as temporary:
            temporary.write_bytes(sha256(pickled).digest() + pickled)


@remembered
def _program() -> str:
    """The package as it stands, and entry points beside it: no other code's numbers are taken for its own."""
    root, digest = Path(__file__).parent.parent, sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    for part in fingerprint():
        digest.update(part)
    return digest.hexdigest()


def spelled(value: Any) -> bytes:
    """A question in bytes that are the same in every process; a mask of the user's goes by what is in its file."""
    if isinstance(value, np.ndarray):
        return b"array" + str((value.dtype, value.shape)).encode() + np.ascontiguousarray(value).tobytes()
    if isinstance(value, Path):
        return spelled(str(value.absolute()))
    if isinstance(value, str) and value.endswith(".py"):
        return value.encode() + sha256(trust_regions.text_of(Path(value)).encode()).digest()
    if value is None or isinstance(value, str | int | float | bool | bytes | np.generic):
        return repr(value).encode()
    if isinstance(value, Mapping):
        return b"{" + b",".join(spelled(key) + b":" + spelled(item) for key, item in value.items()) + b"}"
    if isinstance(value, tuple | list):
        return b"[" + b",".join(map(spelled, value)) + b"]"
    if is_dataclass(value):
        named = {known.name: getattr(value, known.name) for known in fields(value)}
        return type(value).__qualname__.encode() + spelled(named)
    raise MismatchError(f"A question with {type(value).__name__} has no name in the cache. Leave out --cache.")
