"""A pass over traces: reads portions, here or in workers, and merges them into one result.

Portions depend only on the files, each is read into its own accumulator, and accumulators are
merged in a tree whose shape depends only on their number: one process, several, or a cluster give
the same bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mismatch_cli.base.errors import UsageError
from mismatch_cli.trace.stores import is_store

RAY = "ray"
_ADDRESS = re.compile(r"ray://[^/:]+:\d+")


@dataclass(frozen=True)
class Workers:
    """How traces are read: by which workers, with which cache, and with or without broken
    shards.
    """

    who: int | str = 1  # processes, `ray`, or `ray://HOST:PORT`
    cache: Path | None = None
    skip_broken: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.who, str) and not (self.who == RAY or _ADDRESS.fullmatch(self.who)):
            raise UsageError(
                f"--workers {self.who} is invalid. Use a number, ray, or ray://HOST:PORT."
            )
        if self.cache is not None and not _can_be_folder(self.cache):
            raise UsageError(
                f"--cache {self.cache} is not a folder. Name one that all workers can access."
            )
        if isinstance(self.who, int) and self.who < 1:
            raise UsageError(f"--workers {self.who} is too small. Use at least 1.")

    @classmethod
    def parsed(cls, who: str, cache: Path | None, *, skip_broken: bool) -> Workers:
        """Make one from the command line's values."""
        is_number = who.lstrip("-").isdecimal()
        return cls(int(who) if is_number else who, cache, skip_broken)


def _can_be_folder(path: Path) -> bool:
    if is_store(path):
        return False
    return path.is_dir() or not path.exists()


ALONE = Workers()  # this process
