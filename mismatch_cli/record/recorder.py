"""A recorder for any trainer: responses in, a trace out, and the run that is recorded never notices."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.importers._rows import prompt_hash, text_key
from mismatch_cli.metrics.hashing import hash_keys
from mismatch_cli.record._thread import Writer

_SEED = 2  # of the hash that chooses prompts
_LOG = logging.getLogger("mismatch_cli.record")


class Recorder:
    """Writes responses as they are handed over into a trace folder, in whole shards, from a thread of its own.

    Each rank of a run has a recorder with its `rank` in the same `folder`; that of rank 0 writes the manifest, with
    what `manifest` tells of the run (sections `rollout`, `trainer`, `config` as in a trace). With `every` above 1 only
    one in so many prompts of a step is recorded, the same on all ranks, with all of its responses. `vocabulary` is how
    many token ids there are, where it is known: what is beyond is refused.

    Nothing here raises into the run: the first fault is logged as a warning, each is counted in `counts`.
    """

    def __init__(
        self,
        folder: str | Path,
        every: int = 1,
        rank: int = 0,
        manifest: Mapping[str, Any] | None = None,
        *,
        tokenizer: Any = None,
        vocabulary: int | None = None,
    ) -> None:
        self._every, self._warned = max(1, int(every)), False
        self.counts = {"given": 0, "left to chance": 0, "lost": 0}
        self._writer: Writer | None = None
        with _Guard(self):
            self._writer = Writer(Path(folder), rank, dict(manifest or {}), tokenizer, vocabulary, self._warn)
            atexit.register(self.close)

    def add(self, **columns: Any) -> None:
        """Record one response: `step`, `prompt_ids`, `response_ids`, `logp_rollout`, and any other column of a trace.

        Lists, numpy arrays or tensors, copied before this returns; `advantage` is one number or one per token,
        `prompt_id` a number or a text (default: a hash of the prompt), `sample_index` counts where it is absent. What
        is None was not measured.
        """
        with _Guard(self):
            self.counts["given"] += 1
            if self._writer is None:
                self.counts["lost"] += 1
            elif self._every > 1 and not _chosen(columns, self._every):
                self.counts["left to chance"] += 1
            else:
                self._writer.put({name: _copied(value) for name, value in columns.items() if value is not None})

    def add_padded(
        self, *, prompt_ids: Any, response_ids: Any, prompt_mask: Any, response_mask: Any, **columns: Any
    ) -> None:
        """Record a batch of padded matrices: [S, P] of prompts and [S, T] of responses, each with a mask of its tokens.

        Padding may stand on either side. Other matrices over [S, T] are cut by the response mask; what has one value
        for each response, or one for the whole batch, is handed on as such. `loss_mask`, where given, says which of the
        response's tokens are trained.
        """
        with _Guard(self):
            batch = {"prompt_ids": prompt_ids, "response_ids": response_ids, **columns}
            for row in _rows(batch, _copied(prompt_mask), _copied(response_mask)):
                self.add(**row)

    def flush(self) -> None:
        """Return once everything that was added is on disk."""
        with _Guard(self):
            if self._writer is not None:
                self._writer.flush()

    def close(self) -> None:
        """The same, and end: what is added later is lost, and counted."""
        with _Guard(self):
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()
            atexit.unregister(self.close)

    def _warn(self, fault: str, lost: int = 0) -> None:
        self.counts["lost"] += lost
        if not self._warned:
            self._warned = True
            _LOG.warning("%s. Training goes on; faults after this one are only counted.", fault)


def _chosen(columns: Mapping[str, Any], every: int) -> bool:
    """Whether a prompt of a step is one of those that are recorded: a hash, the same on every rank."""
    prompt = columns.get("prompt_id")
    if prompt is None:
        prompt = int(
            prompt_hash(pa.array([np.asarray(_copied(columns["prompt_ids"])).ravel()], pa.list_(pa.int32())))[0]
        )
    key = text_key(prompt) if isinstance(prompt, str) else int(prompt)
    return int(hash_keys(np.array([int(columns["step"])]), np.array([key]), seed=_SEED)[0] % np.uint64(every)) == 0


class _Guard:
    """Whatever goes wrong inside is a warning: not even memory that runs out ends the run that is recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        self._recorder._warn(f"Nothing more can be recorded ({type(error).__name__}: {error})", 1)
        return True


def _copied(value: Any) -> Any:
    """A copy on the host; what has `detach` is a tensor, of whatever library, and numpy knows no bfloat16."""
    if hasattr(value, "detach"):
        value = value.detach()
        value = (value.float() if value.is_floating_point() else value).cpu().numpy()
    if isinstance(value, np.ndarray):
        return value.copy()
    return list(value) if isinstance(value, list | tuple) else value


def _rows(batch: Mapping[str, Any], prompt_SP: Any, response_ST: Any) -> Iterator[dict[str, Any]]:
    held = {name: _copied(value) for name, value in batch.items() if value is not None}
    prompt_SP, response_ST = np.asarray(prompt_SP).astype(bool), np.asarray(response_ST).astype(bool)
    for row in range(len(response_ST)):
        yield {name: _row(name, value, row, prompt_SP, response_ST) for name, value in held.items()}


def _row(name: str, value: Any, row: int, prompt_SP: np.ndarray, response_ST: np.ndarray) -> Any:
    if not isinstance(value, np.ndarray | list) or np.ndim(value) == 0:
        return value
    mask_T = (prompt_SP if name == "prompt_ids" else response_ST)[row]
    of_row = value[row]
    return np.asarray(of_row)[mask_T] if np.ndim(of_row) and len(of_row) == len(mask_T) else of_row
