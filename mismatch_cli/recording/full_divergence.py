"""`--full-divergence`: whether there is room for whole distributions, and where they wait between sampling and scoring.

The engine is gone when the trainer comes, so log μ over the vocabulary of the first N responses lies on disk between
them: a float32 file for each response, written token by token and read tile by tile. Once scored, TV and KL are in the
trace and the files are removed.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.engines import Sink, full_bytes
from mismatch_cli.errors import MismatchError
from mismatch_cli.models import load_config
from mismatch_cli.recording.config import ProbeConfig
from mismatch_cli.trace.files import replacing

_GIB = 2**30
_SHARE_OF_FREE_MEMORY = 0.5
_FLOAT32 = 4


@dataclass(frozen=True)
class Distributions:
    """log μ over the whole vocabulary of the first `count` responses of a run."""

    folder: Path
    count: int

    def path(self, number: int) -> Path:
        return self.folder / f"response-{number:05d}.float32"

    @contextmanager
    def sinks(self, first: int, responses: int) -> Iterator[list[Sink]]:
        """Who takes the distributions of a shard's responses, as far as they are wanted; `first` is its first's number.

        The files are renamed in at the end of the block, before the shard is: a shard that is there has its files.
        """
        wanted = range(first, min(first + responses, self.count))
        with ExitStack() as files:
            paths = [files.enter_context(replacing(self.path(number))) for number in wanted]
            opened = [files.enter_context(open(path, "wb")) for path in paths]
            yield [_writer(file) for file in opened]

    def read(self, first: int, table: pa.Table) -> list[np.ndarray | None]:
        """The distributions `[T, V]` of a shard's responses, None beyond the first N; nothing is in memory yet.

        Raises a `MismatchError` where a file is missing, or of another response than the one in the shard.
        """
        full_logp: list[np.ndarray | None] = [None] * len(table)
        for row in range(min(len(table), self.count - first)):
            ids, logp = (table.column(name)[row].as_py() for name in ("response_ids", "logp_rollout"))
            ids_T, logp_T = np.array(ids, dtype=np.int64), np.array(logp, dtype=np.float32)
            full_logp[row] = _read(self.path(first + row), ids_T, logp_T)
        return full_logp

    def remove(self) -> None:
        """Once all are scored; also what a killed run left."""
        for path in self.folder.glob("response-*.float32"):
            path.unlink()
        with suppress(OSError):
            self.folder.rmdir()


def _writer(file: Any) -> Sink:
    def write(logp_V: np.ndarray) -> None:
        file.write(np.ascontiguousarray(logp_V, dtype=np.float32).data)

    return write


def _read(path: Path, ids_T: np.ndarray, logp_T: np.ndarray) -> np.ndarray:
    try:
        mu_TV = np.asarray(np.memmap(path, dtype=np.float32, mode="r")).reshape(len(ids_T), -1)
        belongs = np.array_equal(mu_TV[np.arange(len(ids_T)), ids_T], logp_T)
    except (OSError, ValueError, IndexError):
        belongs = False
    if not belongs:
        raise MismatchError(
            f"{path} does not hold the whole distributions of its response, so there is no full divergence. "
            "Record anew with --force."
        )
    return mu_TV


def check_room(config: ProbeConfig, vocabulary: int, run_folder: Path) -> None:
    """Refuse, before anything loads, what would not fit: by the longest response in memory, by all of them on disk.

    Raises a `MismatchError` with what to type, a `UsageError` for an engine without whole distributions.
    """
    tokens, count = config.sampling.max_tokens, config.full_divergence
    needed = full_bytes(config.engine, vocabulary, tokens)
    limit = (config.full_divergence_memory or 0) * _GIB or _SHARE_OF_FREE_MEMORY * _free_memory()
    if needed > limit:
        given = "--full-divergence-memory is" if config.full_divergence_memory else "half of the free memory is"
        fitting = int(tokens * limit / needed)
        shorter = f"--max-tokens {fitting} would fit; " if fitting else ""
        raise MismatchError(
            f"--full-divergence: a response of {tokens} tokens over {vocabulary} would take {needed / _GIB:.1f} GiB of "
            f"memory in {config.engine}, and {given} {limit / _GIB:.1f} GiB. {shorter}--engine hf holds one token at a "
            f"time; --full-divergence-memory {needed / _GIB + 0.1:.1f} allows it."
        )
    on_disk, free = count * tokens * vocabulary * _FLOAT32, _free_disk(run_folder)
    if on_disk > free:
        raise MismatchError(
            f"--full-divergence {count} would take up to {on_disk / _GIB:.1f} GiB of disk until it is scored, and "
            f"{run_folder} has {free / _GIB:.1f} GiB. Ask for at most --full-divergence "
            f"{int(count * free / on_disk)}, for a shorter --max-tokens, or for another --output."
        )


def vocabulary_of(model: str, tokenizer: Any) -> int:
    """How many logits the model has: often a few more than its tokenizer has tokens."""
    config = load_config(model).get_text_config()
    return int(getattr(config, "vocab_size", len(tokenizer)))


def _free_disk(folder: Path) -> int:
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    return shutil.disk_usage(existing).free


def _free_memory() -> int:
    """Bytes that can be taken now, within what a container allows; all there is where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup")
    try:
        allowed, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = next(int(x.split()[1]) for x in (group / "memory.stat").open() if x.startswith("inactive_file"))
    except (OSError, ValueError, StopIteration):  # no group, or no limit: "max"
        return free
    return min(free, max(0, allowed - used + cached))
