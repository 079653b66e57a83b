"""Keep an engine's noise off the terminal and in its log file."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mismatch_cli.trace.files import LOG_HEAD, could_not_write, open_to_append


@contextmanager
def engine_log(path: Path | None) -> Iterator[None]:
    """Send everything that an engine prints, from C++ too, to its log file; Python loggers at WARNING and above.

    The file descriptors are redirected, not only `sys.stdout`: native code writes to them directly.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with _open(path) as log, warnings.catch_warnings():
        _log_to(path)
        warnings.simplefilter("ignore")
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
            os.close(saved[0])
            os.close(saved[1])


def _open(path: Path | None) -> BinaryIO:
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
    """A handler that opens its file as `engine_log` does, when the first line comes."""

    def _open(self) -> Any:
        return io.TextIOWrapper(open_to_append(Path(self.baseFilename)), encoding="utf-8")


def _log_to(path: Path | None) -> None:
    """vLLM's warnings stay readable: "Failed to load weights" is the only sign of a sync that went wrong."""
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.NullHandler() if path is None else _LogFile(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False


def one_sentence(error: BaseException) -> str:
    """The part of a library's error that says what is wrong, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and "validation error" in lines[0]:
        lines = [" ".join(lines[1:3])] if len(lines) > 2 else lines
    told = next((line for line in lines if line.startswith(("Value error,", "Assertion failed,"))), None)
    text = told.split(",", 1)[1].strip() if told else (lines[0] if lines else type(error).__name__)
    text = text.split(" [type=")[0].strip()
    return text if text.endswith((".", "!", "?")) else text + "."
