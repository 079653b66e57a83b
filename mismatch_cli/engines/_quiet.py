"""Keep an engine's noise off the terminal and in its log file."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def engine_log(path: Path | None) -> Iterator[None]:
    """Send everything that an engine prints, from C++ too, to its log file; Python loggers at WARNING and above.

    The file descriptors are redirected, not only `sys.stdout`: native code writes to them directly.
    """
    path = path or Path(os.devnull)
    if path.parent != Path("/dev"):
        path.parent.mkdir(parents=True, exist_ok=True)
    _log_to(path)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with open(path, "ab") as log, warnings.catch_warnings():
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


def _log_to(path: Path) -> None:
    """vLLM's warnings stay readable: "Failed to load weights" is the only sign of a sync that went wrong."""
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
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
