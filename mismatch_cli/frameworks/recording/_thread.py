"""The writer's thread: gathers responses into shards, which a bounded queue passes to the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, Full, Queue

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.frameworks.recording._rank import RankFolder
from mismatch_cli.frameworks.recording._responses import Padded, Row, responses_in, tokens_in

# Whichever comes first ends a shard: traces are read while they grow
_SHARD_TOKENS, _SHARD_SECONDS = 2**18, 60.0
_QUEUED = 4  # shards that may wait before the run waits for the disk
_GLANCE = 1.0  # seconds between checks for waiting responses
_PATIENCE = 30.0  # most seconds that the run waits

Item = (
    list[Row | Padded] | threading.Event | None
)  # a shard's responses, an event to set once everything before it is written, or the end


class Writer:
    """Takes responses from the run without delaying it for long; methods that begin with `_` run
    in the thread.
    """

    def __init__(self, files: RankFolder, warn: Callable[[str, int], None]) -> None:
        self._files, self._warn = files, warn
        self._queue: Queue[Item] = Queue(_QUEUED)
        # Guards the next shard's responses, their tokens, and the age of the first
        self._gathering = threading.Lock()
        self._given: list[Row | Padded] = []
        self._tokens, self._since = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="mismatch-cli recorder", daemon=True)
        self._thread.start()

    def put(self, given: Row | Padded) -> None:
        """Hand over responses; if the disk is slower than the run, wait for it, but not forever."""
        tokens = tokens_in(given)
        with self._gathering:
            if not self._given:
                self._since = time.monotonic()
            self._given.append(given)
            self._tokens += tokens
            if self._tokens >= _SHARD_TOKENS:
                self._hand_over()

    def flush(self) -> None:
        """Return once everything so far is in shards; a `MismatchError` if that takes too long."""
        done = threading.Event()
        with self._gathering:
            self._hand_over()
            self._queue.put(done, timeout=_PATIENCE)
        until = time.monotonic() + _PATIENCE
        while self._thread.is_alive() and not done.wait(0.1):
            if time.monotonic() > until:
                raise MismatchError(
                    f"the disk did not accept everything within {_PATIENCE:g} seconds"
                )

    def close(self) -> None:
        """Write the rest, note that the recording is complete, and release the folder."""
        with self._gathering:
            self._hand_over()
            self._queue.put(None, timeout=_PATIENCE)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            raise MismatchError(f"the disk did not accept everything within {_PATIENCE:g} seconds")

    def _hand_over(self) -> None:
        """Pass on the responses of the next shard; the caller holds their lock."""
        given = self._gathered()
        try:
            self._queue.put(given, timeout=_PATIENCE)
        except Full:
            self._warn(
                f"the disk accepted nothing for {_PATIENCE:g} seconds: responses are lost",
                sum(map(responses_in, given)),
            )

    def _gathered(self) -> list[Row | Padded]:
        given, self._given, self._tokens = self._given, [], 0
        return given

    def _run(self) -> None:
        while True:
            try:
                item: Item = self._queue.get(timeout=_GLANCE)
            except Empty:
                item = self._old_ones()
            if isinstance(item, threading.Event):
                item.set()
            elif item is None:
                self._files.close()
                return
            elif item:
                self._files.write(item)

    def _old_ones(self) -> list[Row | Padded]:
        """The waiting responses, if readers should see them by now."""
        if time.monotonic() - self._since < _SHARD_SECONDS or not self._gathering.acquire(
            blocking=False
        ):
            return []  # the lock's holder may be waiting for this thread
        try:
            return self._gathered()
        finally:
            self._gathering.release()
