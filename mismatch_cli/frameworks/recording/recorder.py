"""A recorder for any trainer: responses in, a trace out, without disturbing the run."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from mismatch_cli.base.errors import MismatchError, first_line, suggest
from mismatch_cli.base.numbers import counted, things
from mismatch_cli.frameworks.recording._folder_choice import candidate_folders, choosing_alone
from mismatch_cli.frameworks.recording._rank import Facts, RankFolder
from mismatch_cli.frameworks.recording._responses import (
    Batch,
    Padded,
    copy_to_host,
    count_responses,
    sample_prompts,
)
from mismatch_cli.frameworks.recording._thread import Writer

_LOG = logging.getLogger("mismatch_cli.frameworks.recording")
_REASONS = 5  # in the message at the end
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
        self._every = 1
        self._given = self._not_sampled = self._lost = 0
        self._warned = False
        self._first_loss = ""  # its fault
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._files: RankFolder | None = None
        self._writer: Writer | None = None
        self._requested = Path(folder)
        self._rank = rank
        self._ended = False
        self._open: Callable[[], None] | None = partial(
            self._open_folder, manifest or {}, tokenizer, vocabulary, resume
        )
        with self._guarded("nothing is recorded"):
            self._every = max(1, int(every))
            atexit.register(self.close)
        # A function for `resume` has an answer only once the trainer has loaded its checkpoint.
        if not callable(resume):
            self._open_once()

    @property
    def folder(self) -> Path:
        """Where the responses are; the requested folder until the recording has begun, which may
        be with the first response.
        """
        return self._files.folder if self._files else self._requested

    @property
    def counts(self) -> dict[str, int]:
        """The fate of the responses so far: after `close` the other counts add up to `given`."""
        files = self._files
        return {
            "given": self._given,
            "not sampled": self._not_sampled,  # for `every`
            "written": files.written if files else 0,
            "refused": files.refused.total() if files else 0,
            "lost": self._lost,
        }

    @property
    def next_step(self) -> int:
        """The step after the last one in the folder at the start, for runs that do not number
        their steps.
        """
        self._open_once()
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
            self._put(_copy_columns(columns))

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
        number = _row_count(response_ids)
        self._given += number
        with self._guarded("a batch is not recorded", lost=number):
            if prompt_mask is None or response_mask is None:
                raise ValueError(
                    "prompt_mask or response_mask is missing: which tokens are padding?"
                )
            matrices = {"prompt_ids": prompt_ids, "response_ids": response_ids, **columns}
            copies = _copy_columns(matrices)
            self._put(Padded(copies, copy_to_host(prompt_mask), copy_to_host(response_mask)))

    def flush(self) -> None:
        """Return once everything added so far is on disk, or after half a minute."""
        with self._guarded("not everything is on disk yet"):
            if self._writer is not None:
                self._writer.flush()

    def close(self) -> None:
        """Flush and end; later responses, and those that are not on disk by then, are lost and
        counted.
        """
        # A forked child inherits the recorder, and must not end its parent's recording.
        if self._ended or os.getpid() != self._process:
            return
        self._ended = True
        # From here on `_put` refuses responses, which are counted as lost.
        writer = self._writer
        self._writer = None
        with self._guarded("the end of the recording is not noted"):
            atexit.unregister(self.close)
            try:
                if writer is not None:
                    writer.close()
            finally:
                counts = self.counts
                accounted_for = sum(counts.values()) - counts["given"]
                self._lost += counts["given"] - accounted_for
                self._log_summary()

    def _log_summary(self) -> None:
        """Log where the responses are and how many: as a warning if the folder is not the
        requested one, or responses are missing.
        """
        counts = self.counts
        if not counts["given"]:
            return
        steps = things(len(self._files.steps) if self._files else 0, "step")
        sentences = [
            f"{counts['written']:,} of {things(counts['given'], 'response')} recorded in "
            f"{self.folder}, {steps}"
        ]
        for fate in ("not sampled", "refused", "lost"):
            if counts[fate]:
                sentences.append(f"{counts[fate]:,} {fate}{self._reasons(fate)}")
        is_expected = self.folder == self._requested and not (counts["refused"] or counts["lost"])
        _LOG.log(
            logging.INFO if is_expected else logging.WARNING,
            "%s. Look at them: %s",
            "; ".join(sentences),
            suggest("report", self.folder),
        )

    def _reasons(self, fate: str) -> str:
        """Why responses have met a fate, as far as that is known."""
        if fate == "lost" and self._first_loss:
            return f" (first: {self._first_loss})"
        if fate != "refused" or self._files is None:
            return ""
        refused = self._files.refused
        reasons = [counted(number, reason) for reason, number in refused.most_common(_REASONS)]
        if len(refused) > _REASONS:
            reasons.append(f"others for {things(len(refused) - _REASONS, 'more reason')}")
        return f" ({', '.join(reasons)})"

    def _open_once(self) -> None:
        """Choose the folder and start the writer, unless that has been tried before, with or
        without success.
        """
        open_folder = self._open
        self._open = None
        if open_folder is not None:
            with self._guarded("nothing is recorded"):
                open_folder()

    def _open_folder(
        self,
        manifest: Facts,
        tokenizer: Any,
        vocabulary: int | None,
        resume: bool | Callable[[], bool],
    ) -> None:
        """Take the first candidate folder that accepts the run, and start the writer's thread;
        raises if none does.
        """
        resumed = bool(resume() if callable(resume) else resume)
        rank = int(self._rank)
        if rank < 0:
            raise ValueError(f"rank is {rank}: ranks count from 0")
        refusal = ""
        with choosing_alone(self._requested):
            for folder in candidate_folders(self._requested, rank, resume=resumed):
                # Another model, or a damaged note: the next folder is as good.
                try:
                    self._files = RankFolder(
                        folder, rank, manifest, tokenizer, vocabulary, self._warn
                    )
                    break
                except MismatchError as error:
                    refusal = refusal or first_line(error)
        if self._files is None:
            raise MismatchError(refusal)
        if folder != self._requested:
            reason = refusal or (
                f"{self._requested} holds another recording or trace, "
                "and this run does not resume it"
            )
            _LOG.warning("%s. Recording into %s.", reason.rstrip("."), folder)
        self._writer = Writer(self._files, self._warn)

    def _put(self, batch: Batch) -> None:
        """Queue the sampled responses of a batch; the errors for what cannot be recorded are
        caught by `_guarded`.
        """
        # The writer's thread does not survive a fork: a child's responses would wait forever.
        if os.getpid() != self._process:
            raise RuntimeError(
                "this process was forked from the recording one: give it its own recorder and rank"
            )
        self._open_once()
        if self._writer is None:
            reason = "the recorder is closed" if self._files else "the recorder could not begin"
            raise RuntimeError(reason)
        columns = batch.columns if isinstance(batch, Padded) else batch
        # The writer refuses them, and notes why; the run hears of it at once.
        if "step" not in columns:
            self._warn("step is missing (which training step is it?): not recorded")
        elif self._every > 1:
            before = count_responses(batch)
            batch = sample_prompts(batch, self._every)
            self._not_sampled += before - count_responses(batch)
        if count_responses(batch):
            self._writer.put(batch)

    @contextmanager
    def _guarded(self, consequence: str, lost: int = 0) -> Iterator[None]:
        """Turn exceptions into a warning that names the consequence: no fault here ends the run."""
        try:
            yield
        except Exception as error:
            self._warn(f"{_describe(error)}: {consequence}", lost)

    def _warn(self, fault: str, lost: int = 0) -> None:
        # Both the run and the writer's thread come here.
        with self._lock:
            self._lost += lost
            if lost and not self._first_loss:
                self._first_loss = fault
            is_first = not self._warned
            self._warned = True
        if is_first:
            _LOG.warning(
                "%s. Training continues; later faults are only counted (Recorder.counts).", fault
            )


def never_raises(hook: Hook) -> Hook:
    """An adapter's hook inside a run, made safe: the first fault is logged, and faults return
    None.
    """
    has_warned = False

    @wraps(hook)
    def guarded(*positional: Any, **named: Any) -> Any:
        nonlocal has_warned
        try:
            return hook(*positional, **named)
        except Exception as error:
            if not has_warned:
                has_warned = True
                _LOG.warning(
                    "%s: this run's samples are not recorded. Training continues.",
                    _describe(error),
                )

    return cast("Hook", guarded)


def after(function: Hook, keep: Callable[[Any], Any]) -> Hook:
    """The function, with its results also passed to `keep`, whose faults never reach the caller."""
    guarded_keep = never_raises(keep)

    @wraps(function)
    def recorded(*positional: Any, **named: Any) -> Any:
        result = function(*positional, **named)
        guarded_keep(result)
        return result

    return cast("Hook", recorded)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _copy_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """Copies of the measured columns: the run may overwrite its own once `add` has returned."""
    return {name: copy_to_host(value) for name, value in columns.items() if value is not None}


def _row_count(responses: Any) -> int:
    try:
        return len(responses)
    except TypeError:  # not a matrix: counts as one lost response
        return 1
