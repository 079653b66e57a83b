"""A recorder for any trainer: responses in, a trace out, without disturbing the run."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from mismatch_cli.base.errors import MismatchError, first_line, suggest
from mismatch_cli.base.numbers import things
from mismatch_cli.frameworks.recording._place import choosing, places
from mismatch_cli.frameworks.recording._rank import RankFolder
from mismatch_cli.frameworks.recording._responses import Padded, Row, chosen, copied, responses_in
from mismatch_cli.frameworks.recording._thread import Writer

_LOG = logging.getLogger("mismatch_cli.frameworks.recording")
Facts = Mapping[str, Any] | Callable[[], Mapping[str, Any]]  # a manifest's sections, or a function
Hook = TypeVar("Hook", bound=Callable[..., Any])


class Recorder:
    """Writes responses to a trace folder, in complete shards, from its own thread.

    Each rank of a run has a recorder with its `rank` and the same `folder`; rank 0 writes the
    manifest. A run that is not resumed never mixes with an earlier one: if the folder holds
    responses, or anything else, it records beside it (`recorded-2`). `resume` says that the trainer
    continues from a checkpoint, and so does the recording: what it has of a repeated step stays. A
    function for `resume` is called at the first response, when the trainer knows.

    With `every` above 1, one in `every` prompts of a step is recorded, the same on all ranks, with
    all its responses.

    `manifest` holds what the tokens do not show: sections `rollout` (engine, version, model, dtype,
    kv_cache_dtype), `trainer` (name, version, model, dtype) and `sampling` (temperature, top_p,
    top_k), or a function that returns it. `tokenizer`, from Hugging Face, provides the text of
    tokens. `vocabulary` is the number of token ids: larger ids are refused.

    Nothing here raises into the run: the first fault is logged as a warning, and `counts` counts
    all of them.
    """

    def __init__(
        self,
        folder: str | Path,
        every: int = 1,
        rank: int = 0,
        manifest: Facts | None = None,
        *,
        tokenizer: Any = None,
        vocabulary: int | None = None,
        resume: bool | Callable[[], bool] = False,
    ) -> None:
        self._every, self._warned, self._lock = 1, False, threading.Lock()
        self._given = self._not_sampled = self._lost = 0
        self._process = os.getpid()
        self._files: RankFolder | None = None
        self._writer: Writer | None = None
        self._asked, self._rank, self._ended = Path(folder), rank, False
        self._start: Callable[[], None] | None = partial(
            self._begin, manifest or {}, tokenizer, vocabulary, resume
        )
        with self._guarded("nothing is recorded"):
            self._every = max(1, int(every))
            atexit.register(self.close)
        if not callable(resume):
            self._started()

    @property
    def folder(self) -> Path:
        """Where the responses are; before the first one perhaps still where they were asked to
        be.
        """
        return self._files.folder if self._files else self._asked

    @property
    def counts(self) -> dict[str, int]:
        """The fate of the responses so far: after `close` the other counts add up to `given`."""
        return {
            "given": self._given,
            "not sampled": self._not_sampled,  # for `every`
            "written": self._files.written if self._files else 0,
            "refused": self._files.refused if self._files else 0,
            "lost": self._lost,
        }

    @property
    def next_step(self) -> int:
        """The step after the last one in the folder at the start, for runs that do not number
        their steps.
        """
        self._started()
        return 1 + self._files.last_step if self._files else 0

    def add(self, **columns: Any) -> None:
        """Record one response: `step`, `prompt_ids`, `response_ids`, `logp_rollout`, and any other
        column of a trace.

        Takes lists, numpy arrays or tensors, and copies them before it returns. `advantage` is one
        number or one per token, `prompt_id` a number or a text (default: a hash of the prompt),
        `sample_index` is counted by default. None means not measured.
        """
        self._given += 1
        with self._guarded("a response is not recorded", lost=1):
            self._put({name: copied(value) for name, value in columns.items() if value is not None})

    def add_padded(
        self,
        *,
        prompt_ids: Any = None,
        response_ids: Any = None,
        prompt_mask: Any = None,
        response_mask: Any = None,
        **columns: Any,
    ) -> None:
        """Record a batch of padded matrices: prompts [S, P] and responses [S, T], each with a mask
        of its tokens.

        Padding may be on either side. Other [S, T] matrices are cut by the response mask; columns
        may also have one value per response, or one for the whole batch. `loss_mask`, if given,
        marks the response's trained tokens.
        """
        given = _number_of(response_ids)
        self._given += given
        with self._guarded("a batch is not recorded", lost=given):
            if prompt_mask is None or response_mask is None:
                raise ValueError(
                    "prompt_mask or response_mask is missing: which tokens are padding?"
                )
            batch = {"prompt_ids": prompt_ids, "response_ids": response_ids, **columns}
            held = {name: copied(value) for name, value in batch.items() if value is not None}
            self._put(Padded(held, copied(prompt_mask), copied(response_mask)))

    def flush(self) -> None:
        """Return once everything added so far is on disk, or after half a minute."""
        with self._guarded("not everything is on disk yet"):
            if self._writer is not None:
                self._writer.flush()

    def close(self) -> None:
        """Flush and end; later responses, and those that are not on disk by then, are lost and
        counted.
        """
        if self._ended or os.getpid() != self._process:
            return
        self._ended, writer, self._writer = True, self._writer, None
        with self._guarded("the end of the recording is not noted"):
            atexit.unregister(self.close)
            try:
                if writer is not None:
                    writer.close()
            finally:
                self._lost += self._given - sum(
                    count for name, count in self.counts.items() if name != "given"
                )
                self._conclude()

    def _conclude(self) -> None:
        """Say where the responses are and how many: as a warning if that is not what was asked
        for.
        """
        counts = self.counts
        if not counts["given"]:
            return
        steps = things(len(self._files.steps) if self._files else 0, "step")
        sentence = (
            f"{counts['written']:,} of {things(counts['given'], 'response')} recorded in "
            f"{self.folder}, {steps}"
        )
        others = [
            f"{counts[name]:,} {name}"
            for name in ("not sampled", "refused", "lost")
            if counts[name]
        ]
        what = "; ".join([sentence, *others])
        unusual = counts["refused"] or counts["lost"] or self.folder != self._asked
        _LOG.log(
            logging.WARNING if unusual else logging.INFO,
            "%s. Look at them: %s",
            what,
            suggest("report", self.folder),
        )

    def _started(self) -> None:
        """Begin, unless that has been tried: a function for `resume` waits for the first
        response.
        """
        start, self._start = self._start, None
        if start is not None:
            with self._guarded("nothing is recorded"):
                start()

    def _begin(
        self,
        manifest: Facts,
        tokenizer: Any,
        vocabulary: int | None,
        resume: bool | Callable[[], bool],
    ) -> None:
        resumed, rank, reason = bool(resume() if callable(resume) else resume), int(self._rank), ""
        if rank < 0:
            raise ValueError(f"rank is {rank}: ranks count from 0")
        with choosing(self._asked):
            for folder in places(self._asked, rank, resume=resumed):
                try:
                    self._files = RankFolder(
                        folder, rank, manifest, tokenizer, vocabulary, self._warn
                    )
                    break
                except (
                    MismatchError
                ) as error:  # another model, or a damaged note: the next place is as good
                    reason = reason or first_line(error)
        if self._files is None:
            raise MismatchError(reason)
        if folder != self._asked:
            why = (
                reason
                or f"{self._asked} holds another recording or trace, and this run does not resume it"
            )
            _LOG.warning("%s. Recording into %s.", why.rstrip("."), folder)
        self._writer = Writer(self._files, self._warn)

    def _put(self, given: Row | Padded) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "this process was forked from the recording one: give it its own recorder and rank"
            )
        self._started()
        if self._writer is None:
            raise RuntimeError(
                "the recorder is closed" if self._files else "the recorder could not begin"
            )
        if "step" not in (given.columns if isinstance(given, Padded) else given):
            raise ValueError("step is missing: which training step is it?")
        if self._every > 1:
            before = responses_in(given)
            given = chosen(given, self._every)
            self._not_sampled += before - responses_in(given)
        if responses_in(given):
            self._writer.put(given)

    @contextmanager
    def _guarded(
        self, consequence: str = "a batch is not recorded", lost: int = 0
    ) -> Iterator[None]:
        """Turn exceptions into a warning that names the consequence: no fault here ends the run."""
        try:
            yield
        except Exception as error:
            self._warn(f"{_told(error)}: {consequence}", lost)

    def _warn(self, fault: str, lost: int = 0) -> None:
        with self._lock:
            self._lost += lost
            first, self._warned = not self._warned, True
        if first:
            _LOG.warning(
                "%s. Training continues; later faults are only counted (Recorder.counts).", fault
            )


def never_raises(hook: Hook) -> Hook:
    """An adapter's hook inside a run, made safe: the first fault is logged, and faults return
    None.
    """
    warned: list[str] = []

    @wraps(hook)
    def guarded(*given: Any, **named: Any) -> Any:
        try:
            return hook(*given, **named)
        except Exception as error:
            if not warned:
                warned.append(_told(error))
                _LOG.warning(
                    "%s: this run's samples are not recorded. Training continues.", warned[0]
                )

    return cast("Hook", guarded)


def after(function: Hook, keep: Callable[[Any], Any]) -> Hook:
    """The function, with its results also passed to `keep`, whose faults never reach the caller."""
    guarded_keep = never_raises(keep)

    @wraps(function)
    def recorded(*given: Any, **named: Any) -> Any:
        answer = function(*given, **named)
        guarded_keep(answer)
        return answer

    return cast("Hook", recorded)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _number_of(responses: Any) -> int:
    try:
        return len(responses)
    except TypeError:  # not a matrix: counts as one lost response
        return 1
