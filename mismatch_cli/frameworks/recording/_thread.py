"""The writer's thread: gathers responses into shards, which a bounded queue passes to the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, Full, Queue

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.recording._rank import RankFolder
from mismatch_cli.frameworks.recording._responses import Batch, count_responses, count_tokens

# Whichever comes first ends a shard: traces are read while they grow
_SHARD_TOKENS, _SHARD_SECONDS = 2**18, 60.0
_QUEUED = 4  # shards that may wait before the run waits for the disk
_GLANCE = 1.0  # seconds between checks for waiting responses
_PATIENCE = 30.0  # most seconds that the run waits

# A shard's responses, an event to set once everything before it is written, or the end.
Item = list[Batch] | threading.Event | None


class Writer:
    """Takes responses from the run without delaying it for long, and writes them from a thread of
    its own.
    """

    def __init__(self, files: RankFolder, warn: Callable[[str, int], None]) -> None:
        self._files = files
        self._warn = warn
        self._queue: Queue[Item] = Queue(_QUEUED)
        # The run adds to the next shard, and the thread takes it when it is old: the lock guards
        # its responses, their tokens, and the time of the first.
        self._gathering = threading.Lock()
        self._pending: list[Batch] = []
        self._pending_tokens = 0
        self._pending_since = 0.0
        self._thread = threading.Thread(target=self._run, name="mismatch-cli recorder", daemon=True)
        self._thread.start()

    def put(self, batch: Batch) -> None:
        """Hand over responses; if the disk is slower than the run, wait for it, but not forever."""
        tokens = count_tokens(batch)
        with self._gathering:
            if not self._pending:
                self._pending_since = time.monotonic()
            self._pending.append(batch)
            self._pending_tokens += tokens
            if self._pending_tokens >= _SHARD_TOKENS:
                self._queue_pending()

    def flush(self) -> None:
        """Return once everything so far is in shards; a `MismatchError` if that takes too long."""
        written = threading.Event()
        with self._gathering:
            self._queue_pending()
            self._queue_signal(written)
        until = time.monotonic() + _PATIENCE
        # The wait is short, since a thread that has died sets no event.
        while self._thread.is_alive() and not written.wait(0.1):
            if time.monotonic() > until:
                raise _slow_disk()

    def close(self) -> None:
        """Write the rest, note that the recording is complete, and release the folder."""
        with self._gathering:
            self._queue_pending()
            self._queue_signal(None)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            raise _slow_disk()

    def _queue_signal(self, signal: threading.Event | None) -> None:
        try:
            self._queue.put(signal, timeout=_PATIENCE)
        except Full as error:
            raise _slow_disk() from error

    def _queue_pending(self) -> None:
        """Queue the next shard, or lose it if the disk accepts nothing; the caller holds the
        lock.
        """
        shard = self._take_pending()
        try:
            self._queue.put(shard, timeout=_PATIENCE)
        except Full:
            self._warn(
                f"the disk accepted nothing for {_PATIENCE:g} seconds: responses are lost",
                sum(map(count_responses, shard)),
            )

    def _take_pending(self) -> list[Batch]:
        shard = self._pending
        self._pending = []
        self._pending_tokens = 0
        return shard

    def _run(self) -> None:
        """The thread: write what is queued, and what has waited long enough, until the end."""
        while True:
            try:
                item: Item = self._queue.get(timeout=_GLANCE)
            except Empty:
                item = self._take_old_pending()
            if isinstance(item, threading.Event):
                item.set()
            elif item is None:
                self._files.close()
                return
            elif item:
                self._files.write(item)

    def _take_old_pending(self) -> list[Batch]:
        """The next shard, if readers should see it by now; otherwise an empty one."""
        if time.monotonic() - self._pending_since < _SHARD_SECONDS:
            return []
        # The lock's holder may be waiting for this thread to empty the queue.
        # Waiting for the lock would be a deadlock, and the next glance comes in a second.
        if not self._gathering.acquire(blocking=False):
            return []
        try:
            return self._take_pending()
        finally:
            self._gathering.release()


def _slow_disk() -> MismatchError:
    return MismatchError(f"the disk did not accept everything within {_PATIENCE:g} seconds")
