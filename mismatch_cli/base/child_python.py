"""Python programs that this one starts: none imports from the current directory, where anybody's
`json.py` may lie.

`python -m` looks there first. `-P` leaves it out and, unlike `-I`, keeps PYTHONPATH. Programs that
libraries start, such as the workers of vLLM, Ray and multiprocessing, get the variable that does
the same.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_SAFE_PATH = "PYTHONSAFEPATH"
# Any text switches it on; by this one `users_environment` knows that we did, and not the user.
_OURS = "mismatch-cli"
_CHECKOUT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line of `python -m MODULE`, with our Python and without the current directory."""
    return [sys.executable, "-P", "-m", module, *arguments]


@contextmanager
def safe_path() -> Iterator[None]:
    """Keep the current directory out of every Python that starts within the block, whoever
    starts it.
    """
    if os.environ.get(_SAFE_PATH):
        yield
        return
    before = os.environ.get("PYTHONPATH")
    os.environ[_SAFE_PATH] = _OURS
    with suppress(OSError):  # the current directory has been removed
        # `python -m mismatch_cli` without an installation finds the package in the current
        # directory. Its children do not look there any more, so the path has to name it.
        if os.getcwd() == _CHECKOUT:
            os.environ["PYTHONPATH"] = f"{_CHECKOUT}{os.pathsep}{before}" if before else _CHECKOUT
    try:
        yield
    finally:
        os.environ.pop(_SAFE_PATH, None)
        os.environ.pop("PYTHONPATH", None)
        if before is not None:
            os.environ["PYTHONPATH"] = before


def users_environment() -> dict[str, str]:
    """The environment without our variable: a script that the user's code starts finds its own
    folder.
    """
    environment = dict(os.environ)
    if environment.get(_SAFE_PATH) == _OURS:
        del environment[_SAFE_PATH]
    return environment
