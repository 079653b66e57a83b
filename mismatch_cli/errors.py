"""The two exceptions that reach a person: each message says what happened, to what, and what to type next."""

import shlex
from pathlib import Path


class MismatchError(Exception):
    """An expected failure (exit code 1): a missing file, a damaged trace, an engine that cannot start."""

    exit_code = 1


class UsageError(MismatchError):
    """A command line that makes no sense (exit code 2): an unknown name, a value out of range, flags at odds."""

    exit_code = 2


def first_line(error: BaseException) -> str:
    """What a foreign error says, as a clause for a sentence of ours: its first line, else its kind."""
    try:
        lines = str(error).splitlines()
    except BaseException:  # the error of an error, in code that is not ours
        lines = []
    return (lines or [type(error).__name__])[0].rstrip(".")


def suggest(*words: str | Path) -> str:
    """`mismatch-cli` with these words, quoted for a shell; a path that begins with a dash becomes `./-…`."""
    return f"mismatch-cli {quoted(*words)}"


def quoted(*words: str | Path) -> str:
    """The words alone, quoted in the same way."""
    return shlex.join(f"./{w}" if isinstance(w, Path) and str(w).startswith("-") else str(w) for w in words)
