"""Prevents or undoes what vLLM does to this process: its output, changed transformers classes,
temporary files.

vLLM's Transformers backend decorates the decoder class for torch.compile: from then on instances
can be made only inside vLLM, and run through vLLM's compiler. For some model types vLLM also
registers its own configuration class.
"""

from __future__ import annotations

import fcntl
import gc
import getpass
import io
import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from mismatch_cli.models.engines import OnFinished, token_counter
from mismatch_cli.processes.ranks import World
from mismatch_cli.trace.files import LOG_HEAD, could_not_write, open_to_append


@contextmanager
def engine_log(path: Path | None) -> Iterator[None]:
    """Redirect everything that an engine prints, C++ included, to its log file; Python loggers at
    WARNING and above.

    The file descriptors are redirected, not only `sys.stdout`: native code writes to them directly.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {number: os.dup(number) for number in (1, 2)}
    with _open_log(path) as log, warnings.catch_warnings():
        _log_warnings_to(path)
        warnings.simplefilter("ignore")
        for number in saved:
            os.dup2(log.fileno(), number)
        try:
            yield
        finally:
            # What is still buffered belongs to the engine, so it is written before the switch back.
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in saved.items():
                os.dup2(copy, number)
                os.close(copy)


def _open_log(path: Path | None) -> BinaryIO:
    if path is None:
        return open(os.devnull, "ab")
    try:
        log = open_to_append(path)
        if not os.fstat(log.fileno()).st_size:
            log.write(LOG_HEAD)
            log.flush()
    except OSError as error:
        raise could_not_write(path, error) from error
    return log


class _LogFile(logging.FileHandler):
    """A handler that opens its file as `engine_log` does, at the first line."""

    def _open(self) -> Any:
        return io.TextIOWrapper(open_to_append(Path(self.baseFilename)), encoding="utf-8")


def _log_warnings_to(path: Path | None) -> None:
    """Keep vLLM's warnings in the log: "Failed to load weights" is the only sign of a failed
    sync.
    """
    logger = logging.getLogger("vllm")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    handler: logging.Handler = logging.NullHandler()
    if path is not None:
        handler = _LogFile(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False


@contextmanager
def preserved_gc() -> Iterator[None]:
    """Inside the block, what is frozen (`gc.freeze`) stays frozen, and nothing else becomes so.

    vLLM would freeze everything it loads, and unfreeze everything to free it. Collecting its
    garbage now skips the million imported objects, which saves half a second when it closes.
    """
    freeze, unfreeze = gc.freeze, gc.unfreeze
    # vLLM unfreezes everything in `shutdown`, to collect what remains of it.
    # That would walk all imports, which are frozen before it loads.
    gc.freeze = gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.freeze, gc.unfreeze = freeze, unfreeze


@contextmanager
def preserved_process_group(world: World) -> Iterator[None]:
    """Inside the block, vLLM cannot destroy the process group of several ranks."""
    import torch.distributed as dist

    destroy = dist.destroy_process_group
    if world.size > 1:
        # vLLM ends the process group when it closes, though the ranks made it.
        # They could not exchange anything after the engine.
        dist.destroy_process_group = lambda *_: None
    try:
        yield
    finally:
        dist.destroy_process_group = destroy


def progress_bar(on_finished: OnFinished) -> Callable[..., Any]:
    """vLLM drives a tqdm bar: give it one that draws nothing and passes the count on."""
    from tqdm import tqdm

    class CountingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = "Processed" in kwargs.get("desc", "")  # not the bar for adding requests
            super().__init__(*args, **kwargs)

        def display(self, *_: Any, **__: Any) -> None:
            pass

        def close(self) -> None:
            self.disable = True  # nothing to wipe from the terminal

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts and n:
                on_finished(int(n))
            return super().update(n)

    return CountingBar


@contextmanager
def counted_steps(llm: Any, on_finished: OnFinished) -> Iterator[None]:
    """Tell a caller that counts tokens what vLLM samples: one a step for each response that it
    has room to compute.
    """
    on_tokens = token_counter(on_finished)
    if on_tokens is None:
        yield
        return
    engine = llm.llm_engine
    step = engine.step
    most = engine.vllm_config.scheduler_config.max_num_seqs

    def step_and_count() -> Any:
        outputs = step()
        on_tokens(min(engine.get_num_unfinished_requests(), most))
        return outputs

    engine.step = step_and_count
    try:
        yield
    finally:
        engine.step = step


def one_sentence(error: BaseException) -> str:
    """The part of a library's error that says what is wrong, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Pydantic counts the errors in its first line, and the next two are the field and the reason.
    if len(lines) > 2 and "validation error" in lines[0]:
        lines = [" ".join(lines[1:3])]
    sentence = lines[0] if lines else type(error).__name__
    for line in lines:
        if line.startswith(("Value error,", "Assertion failed,")):
            sentence = line.split(",", 1)[1].strip()
            break
    sentence = sentence.split(" [type=")[0].strip()
    if sentence.endswith((".", "!", "?")):
        return sentence
    return sentence + "."


@dataclass(frozen=True)
class ModelClasses:
    """Model classes as they were before an engine loaded, and the table of configuration
    classes.
    """

    classes: dict[type, tuple[tuple[type, ...], dict[str, Any]]]  # bases and attributes
    configs: dict[Any, Any]

    @classmethod
    def current(cls, model: str) -> ModelClasses:
        """The classes now, including those of the family of `model`, which transformers imports
        only on demand.
        """
        from transformers import (
            CONFIG_MAPPING,
            AutoConfig,
            AutoModel,
            AutoModelForCausalLM,
            PreTrainedModel,
        )

        with suppress(Exception):  # transformers may not know a model that vLLM knows
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
            for each in (config, config.get_text_config()):
                for auto in (AutoModel, AutoModelForCausalLM):
                    # A look-up imports the class.
                    auto._model_mapping.get(type(each), None)
        classes = {
            kind: (kind.__bases__, dict(vars(kind))) for kind in _with_subclasses(PreTrainedModel)
        }
        return cls(classes, dict(CONFIG_MAPPING._extra_content))

    def restore(self, llm: Any = None) -> None:
        """Restore every class; the engine's instances move to a subclass with the changes."""
        from transformers import CONFIG_MAPPING

        CONFIG_MAPPING._extra_content.clear()
        CONFIG_MAPPING._extra_content.update(self.configs)
        decorated: dict[type, type] = {}
        for kind, (bases, _) in self.classes.items():
            if kind.__bases__ != bases:
                decorated[kind] = self._undo_changes(kind)
        if decorated and llm is not None:
            llm.apply_model(partial(_move, decorated))

    def _undo_changes(self, changed: type) -> type:
        """Restore a class; returns a subclass that has the changes."""
        bases, attributes = self.classes[changed]
        added = tuple(base for base in changed.__bases__ if base not in bases)
        changes = {
            name: value
            for name, value in vars(changed).items()
            if attributes.get(name) is not value
        }
        changed.__bases__ = bases
        for name in changes:
            if name in attributes:
                setattr(changed, name, attributes[name])
            else:
                delattr(changed, name)
        changes["__module__"] = changed.__module__
        return type(changed.__name__, (changed, *added), changes)


def _move(decorated: dict[type, type], model: Any) -> None:
    """Make the engine's objects of restored classes those of the decorated subclasses."""
    for module in model.modules():
        if type(module) in decorated:
            # Its class is transformers' own again, without the decoration that vLLM runs with.
            # The engine's object becomes one of a subclass that has it; new objects do not.
            module.__class__ = decorated[type(module)]


def _with_subclasses(base: type) -> set[type]:
    """A class and all that descend from it."""
    subclasses: list[type] = base.__subclasses__()
    return {base}.union(*map(_with_subclasses, subclasses))


_PREFIX, _LOCK = "mismatch-cli-engine-", "in-use"


class TemporaryFolder:
    """The folder for temporary files of this process and its children, until `close`.

    The process holds its lock for as long as it lives, which distinguishes a folder in use from one
    left by a kill.
    """

    current: ClassVar[TemporaryFolder | None] = None

    @classmethod
    def shared(cls) -> TemporaryFolder:
        """One folder for all engines of the process, until the last of them closes.

        Nested folders would soon make paths too long for sockets.
        """
        cls.current = cls.current or cls()
        cls.current._users += 1
        return cls.current

    def __init__(self) -> None:
        self._users = 0
        self._tempdir = tempfile.tempdir
        self._environment = os.environ.get("TMPDIR")
        system = Path(tempfile.gettempdir())
        remove_abandoned(system)
        # Compiled code stays between runs on purpose: by default it would be in the new folder.
        compiled = system / f"torchinductor_{getpass.getuser()}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
        new = Path(tempfile.mkdtemp(prefix="mismatch-cli-new-", dir=system))
        self._lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # It gets the name that `remove_abandoned` looks for only once it is locked.
        self.path = system / f"{_PREFIX}{new.name.rpartition('-')[2]}"
        new.rename(self.path)
        tempfile.tempdir = os.environ["TMPDIR"] = str(self.path)

    def close(self) -> None:
        """Remove the folder if no other engine uses it, and restore the previous one for temporary
        files.
        """
        self._users -= 1
        if self._users > 0:
            return
        if TemporaryFolder.current is self:
            TemporaryFolder.current = None
        tempfile.tempdir = self._tempdir
        if self._environment is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = self._environment
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned(system: Path) -> None:
    """Remove the folders of this user's engines whose process is gone; other users' folders
    stay.
    """
    for folder in system.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
