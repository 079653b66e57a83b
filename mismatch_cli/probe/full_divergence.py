"""`--full-divergence`: is there room for full distributions, and where are they kept between
sampling and scoring?

The engine is gone when the trainer loads, so log μ over the vocabulary of the first N responses
waits on disk: one float32 file per response, written token by token and read tile by tile. Once
they are scored, TV and KL are in the trace, and the files are removed.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.models.engines import Sink, full_bytes
from mismatch_cli.models.loading import load_config
from mismatch_cli.probe.config import ProbeConfig
from mismatch_cli.trace.files import replacing

_GIB = 2**30
_SHARE_OF_FREE_MEMORY = 0.5
_FLOAT32 = 4


@dataclass(frozen=True)
class Distributions:
    """log μ over the full vocabulary of the first `count` responses of a run."""

    folder: Path
    count: int

    def path(self, number: int) -> Path:
        return self.folder / f"response-{number:05d}.float32"

    @contextmanager
    def sinks(self, first: int, responses: int) -> Iterator[list[Sink]]:
        """Sinks for the distributions of a shard's responses that are wanted; its first response is
        number `first`.

        The files are renamed into place at the end of the block, before the shard is: an existing
        shard has its files.
        """
        sinks: list[Sink] = []
        with ExitStack() as files:
            for number in range(first, min(first + responses, self.count)):
                path = files.enter_context(replacing(self.path(number)))
                sinks.append(_writer(files.enter_context(path.open("wb"))))
            yield sinks

    def read(self, first: int, table: pa.Table) -> list[np.ndarray | None]:
        """The distributions `[T, V]` of a shard's responses, None beyond the first N;
        memory-mapped.

        Raises a `MismatchError` if a file is missing, or belongs to a different response from the
        shard's.
        """
        full_logp: list[np.ndarray | None] = [None] * len(table)
        for row in range(min(len(table), self.count - first)):
            ids_T = np.array(table["response_ids"][row].as_py(), dtype=np.int64)
            logp_T = np.array(table["logp_rollout"][row].as_py(), dtype=np.float32)
            full_logp[row] = _read(self.path(first + row), ids_T, logp_T)
        return full_logp

    def remove(self) -> None:
        """Remove the files once all are scored, including those that a killed run left."""
        for path in self.folder.glob("response-*.float32"):
            path.unlink()
        with suppress(OSError):
            self.folder.rmdir()


def _writer(file: BinaryIO) -> Sink:
    def write(logp_V: np.ndarray) -> None:
        file.write(np.ascontiguousarray(logp_V, dtype=np.float32).data)

    return write


def _read(path: Path, ids_T: np.ndarray, logp_T: np.ndarray) -> np.ndarray:
    """The distributions in a file, `_TV`; a `MismatchError` if they are of another response."""
    try:
        mu_TV = np.asarray(np.memmap(path, dtype=np.float32, mode="r")).reshape(len(ids_T), -1)
        # Both were written from the same numbers: at the sampled ids they are equal to the bit.
        belongs = np.array_equal(mu_TV[np.arange(len(ids_T)), ids_T], logp_T)
    except (OSError, ValueError, IndexError):
        belongs = False
    if not belongs:
        raise MismatchError(
            f"{path} lacks the full distributions of its response, so the full divergence cannot "
            "be computed. Record again with --force."
        )
    return mu_TV


def check_room(config: ProbeConfig, vocabulary: int, run_folder: Path, problems: int) -> None:
    """Refuse, before anything loads, what would not fit: one response of full length in memory, all
    of them on disk. A run of so many problems may have fewer responses than were asked for.

    Raises a `MismatchError` that says what to type, or a `UsageError` for an engine without full
    distributions.
    """
    tokens = config.sampling.max_tokens
    needed = full_bytes(config.engine.name, vocabulary, tokens)
    allowed = config.extras.full_divergence_memory
    if allowed:
        limit, name_of_limit = allowed * _GIB, "full_divergence_memory"
    else:
        limit, name_of_limit = _SHARE_OF_FREE_MEMORY * free_memory(), "half of the free memory"
    if needed > limit:
        fitting = int(tokens * limit / needed)
        shorter = f"--max-tokens {fitting} would fit; " if fitting else ""
        raise MismatchError(
            f"--full-divergence: {tokens} tokens × a vocabulary of {vocabulary} would take "
            f"{needed / _GIB:.1f} GiB of memory in {config.engine.name}, and {name_of_limit} is "
            f"{limit / _GIB:.1f} GiB. {shorter}--engine hf keeps one token at a time; "
            f"full_divergence_memory = {needed / _GIB + 0.1:.1f} allows it."
        )
    count = min(config.extras.full_divergence, problems * config.sampler.samples_per_prompt)
    on_disk = count * tokens * vocabulary * _FLOAT32
    free = _free_disk(run_folder)
    if on_disk > free:
        fitting = int(count * free / on_disk)
        fewer = f"at most --full-divergence {fitting}, " if fitting else ""
        raise MismatchError(
            f"--full-divergence {count} would take up to {on_disk / _GIB:.1f} GiB of disk until "
            f"scoring, and {run_folder} has {free / _GIB:.1f} GiB free. Use {fewer}a smaller "
            "--max-tokens, or another --output."
        )


def vocabulary_of(model: str, tokenizer: Any) -> int:
    """The number of logits of the model: often slightly more than its tokenizer has tokens."""
    config = load_config(model).get_text_config()
    return int(getattr(config, "vocab_size", len(tokenizer)))


def _free_disk(folder: Path) -> int:
    """Free bytes of the disk on which a folder is, or will be created."""
    existing = next(filter(Path.exists, (folder, *folder.resolve().parents)))
    return shutil.disk_usage(existing).free


def free_memory() -> int:
    """Bytes of memory free now, within the container's limit; all memory where the system does
    not say.
    """
    try:
        free = 1024 * _entry(Path("/proc/meminfo"), "MemAvailable")
    except (OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        # Files that were read count as used, but their memory is there for whoever asks for it.
        cached = _entry(group / "memory.stat", "inactive_file")
    except (OSError, ValueError):  # no group, or no limit: "max"
        return free
    return min(free, max(0, limit - used + cached))


def _entry(path: Path, name: str) -> int:
    """The number on the line of a system's file that begins with this name; a `ValueError` if there
    is none.
    """
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise ValueError(name)
