"""The thread that writes: responses are gathered into shards, and a bounded queue takes these to the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, Full, Queue

from mismatch_cli.errors import MismatchError
from mismatch_cli.record._rank import RankFolder
from mismatch_cli.record._responses import Padded, Row, responses_in, tokens_in

_SHARD_TOKENS, _SHARD_SECONDS = 2**18, 60.0  # whichever comes first ends a shard: a trace is read while it grows
_QUEUED = 4  # shards that may wait before the run waits for the disk
_GLANCE = 1.0  # seconds between two looks at responses that wait
_PATIENCE = 30.0  # seconds that the run waits at most

Item = (
    list[Row | Padded] | threading.Event | None
)  # of one shard, a wish to be told once all before it is written, the end


class Writer:
    """Takes responses from the run and never keeps it waiting for long; what begins with `_` runs in the thread."""

    def __init__(self, files: RankFolder, warn: Callable[[str, int], None]) -> None:
        self._files, self._warn = files, warn
        self._queue: Queue[Item] = Queue(_QUEUED)
        self._gathering = (
            threading.Lock()
        )  # over the responses of the next shard, their tokens, and the age of the first
        self._given: list[Row | Padded] = []
        self._tokens, self._since = 0, 0.0
        self._thread = threading.Thread(target=self._run, name="mismatch-cli recorder", daemon=True)
        self._thread.start()

    def put(self, given: Row | Padded) -> None:
        """Hand over responses; where the disk is slower than the run, wait for it, though not for ever."""
        tokens = tokens_in(given)
        with self._gathering:
            if not self._given:
                self._since = time.monotonic()
            self._given.append(given)
            self._tokens += tokens
            if self._tokens >= _SHARD_TOKENS:
                self._hand_over()

    def flush(self) -> None:
        """Return once everything that was put is in shards; a `MismatchError` where that takes too long."""
        done = threading.Event()
        with self._gathering:
            self._hand_over()
            self._queue.put(done, timeout=_PATIENCE)
        until = time.monotonic() + _PATIENCE
        while self._thread.is_alive() and not done.wait(0.1):
            if time.monotonic() > until:
                raise MismatchError(f"the disk has not taken everything in {_PATIENCE:g} seconds")

    def close(self) -> None:
        """Write what is left, say that it is all, and let the folder go."""
        with self._gathering:
            self._hand_over()
            self._queue.put(None, timeout=_PATIENCE)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            raise MismatchError(f"the disk has not taken everything in {_PATIENCE:g} seconds")

    def _hand_over(self) -> None:
        """Pass on the responses of the next shard; whoever calls this holds their lock."""
        given = self._gathered()
        try:
            self._queue.put(given, timeout=_PATIENCE)
        except Full:
            self._warn(
                f"the disk has taken nothing in {_PATIENCE:g} seconds: responses are lost",
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
        """Responses that have waited so long that a reader should see them."""
        if time.monotonic() - self._since < _SHARD_SECONDS or not self._gathering.acquire(blocking=False):
            return []  # whoever holds the lock may wait for this thread
        try:
            return self._gathered()
        finally:
            self._gathering.release()
