"""The exceptions that users see: each message says what happened, to what, and what to type
next.
"""

import shlex
from pathlib import Path


class MismatchError(Exception):
    """An expected failure (exit code 1): a missing file, a damaged trace, an engine that cannot
    start.
    """

    exit_code = 1


class UsageError(MismatchError):
    """An invalid command line (exit code 2): an unknown name, a value out of range, conflicting
    flags.
    """

    exit_code = 2


class AccessDenied(MismatchError):
    """The system does not let us read something, which may be whole."""


def denied(path: object) -> AccessDenied:
    """The error for something that we may not read."""
    return AccessDenied(
        f"{path}: permission denied. Get access to it and its folders (chmod, chown), or run "
        "this as its owner."
    )


def unreadable(
    path: object, error: BaseException, advice: str, fault: str = "is damaged ({})"
) -> MismatchError:
    """The error for a file whose reading fails: without permission to read it, `fault` and
    `advice` would be wrong.
    """
    if isinstance(error, PermissionError):
        return denied(path)
    return MismatchError(f"{path} {fault.format(first_line(error))}. {advice}")


def first_line(error: BaseException) -> str:
    """The first line of a foreign error, to put into our own message; its type if it has no
    text.
    """
    try:
        lines = str(error).splitlines()
    except BaseException:
        # Foreign code may raise anything when its error is printed.
        lines = []
    if not lines:
        return type(error).__name__
    return lines[0].rstrip(".")


def suggest(*words: str | Path) -> str:
    """A `mismatch-cli` command of these words, quoted for a shell; a path that starts with a
    dash becomes `./-…`.
    """
    return f"mismatch-cli {quoted(*words)}"


def quoted(*words: str | Path) -> str:
    """Words quoted for a shell as `suggest` quotes them, without `mismatch-cli`."""
    return shlex.join(map(_as_argument, words))


def _as_argument(word: str | Path) -> str:
    is_like_a_flag = isinstance(word, Path) and str(word).startswith("-")
    return f"./{word}" if is_like_a_flag else str(word)
