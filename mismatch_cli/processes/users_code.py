"""FILE.py:NAME, a function or class of the user's: checked here, loaded in a child."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from mismatch_cli.base.child_python import users_environment
from mismatch_cli.base.errors import MismatchError, UsageError

_MODULE = "_own_reward"  # not the file's name, which a library may have too
SHOWN = 300  # characters of an error


def check(spec: str, flag: str, kind: str, example: str) -> tuple[str, str]:
    """The file of FILE.py:NAME, and FILE.py:NAME with its full path; a `UsageError` where the
    file does not exist.
    """
    file, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier() or not Path(file).is_file():
        raise UsageError(f"{flag} {spec}: no such {kind}. Write it as path/to/file.py:{example}.")
    return file, f"{Path(file).resolve()}:{name}"


class UserFunction(NamedTuple):
    """A user's function or class, the names of its parameters, and those without a default."""

    function: Callable[..., Any]
    parameters: list[str]
    needed: list[str]


def load(spec: str, given_as: str) -> UserFunction:
    """What FILE.py:NAME names; a `MismatchError` if the file cannot be loaded or lacks it."""
    file, _, name = spec.rpartition(":")
    # Scripts that the user's code starts find their own folder: our variable would hide it.
    for ours in os.environ.keys() - users_environment().keys():
        del os.environ[ours]
    try:
        function = getattr(_module(file), name, None)
    except BaseException as error:
        raise MismatchError(
            f"{file} cannot be loaded ({describe_error(error)}). Fix the file."
        ) from error
    if not callable(function):
        raise MismatchError(f"{file} has no function '{name}'. Give {given_as}.")
    parameters = []
    needed = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            continue
        parameters.append(parameter.name)
        if parameter.default is parameter.empty:
            needed.append(parameter.name)
    return UserFunction(function, parameters, needed)


def load_in_pool(argument: str) -> None:
    """Load FILE.py:NAME, the last argument of a child, in a process of a pool that it started,
    which looks up names by their module.
    """
    file = argument.rpartition(":")[0]
    if Path(file).is_file():
        _module(file)


def _module(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses look up their annotations here
    sys.path.insert(0, str(Path(file).parent))
    spec.loader.exec_module(module)
    return module


def describe_error(error: BaseException) -> str:
    """A sentence of ours as it is; the type and the beginning of any other error."""
    if isinstance(error, MismatchError):
        return str(error)
    kind = type(error).__name__
    try:
        message = str(error)[:SHOWN]
    except BaseException:
        # The user's own exception may raise another when it is printed.
        message = ""
    return f"{kind}: {message}" if message else kind
