"""A folder is its own registry: the file name is the public name, and listing names imports
nothing.

Some folders also include the entry points of installed packages (`entry_points.py`).
"""

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mismatch_cli.base import entry_points
from mismatch_cli.base.entry_points import EntryPoint
from mismatch_cli.base.errors import UsageError

_NEAR = 0.5  # similarity at which a name counts as misspelled
_MOST_LISTED = 16  # more names are a wall that nobody reads: three lines at 80 characters


def names_file(specs: str | Iterable[str]) -> bool:
    """Whether one of these names, perhaps with parameters, is a Python file: to look it up runs
    it.
    """
    each = [specs] if isinstance(specs, str) else specs
    return any(spec.partition(":")[0].endswith(".py") for spec in each)


def names(package: str) -> list[str]:
    """The public names of a package folder and of its entry points."""
    return sorted([*_own(package), *installed(package)])


def _own(package: str) -> list[str]:
    """`binary_tv.py` is `binary-tv`; a leading underscore marks a helper."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not a package")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return [p.stem.replace("_", "-") for p in folder.glob("*.py") if not p.stem.startswith("_")]


@cache
def installed(package: str) -> Mapping[str, EntryPoint]:
    """What other packages add to a folder, by name; empty if the folder has no entry points."""
    return entry_points.beside(package, _own(package)) if package in entry_points.GROUPS else {}


def check(package: str, name: str, kind: str) -> None:
    """A `UsageError` that suggests the nearest name for an unknown one; imports nothing."""
    known = names(package)
    if name not in known:
        raise UsageError(unknown(kind, name, known))


def load(package: str, name: str, kind: str) -> ModuleType:
    """Check a public name and import its module; a `MismatchError` names a package that fails."""
    check(package, name, kind)
    if foreign := installed(package).get(name):
        return entry_points.load(package, foreign, kind)
    return importlib.import_module(f"{package}.{name.replace('-', '_')}")


@cache
def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only parameters of a function with their defaults."""
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in found if p.kind is inspect.Parameter.KEYWORD_ONLY}


def unknown(kind: str, name: str, known: Iterable[str], listed: Iterable[str] = ()) -> str:
    """The message for an unknown name: the nearest ones, if any, and the available ones, `listed`
    or known, unless these are too many to read.
    """
    return f"Unknown {kind} '{name}'. {_instead(name, sorted(known), listed)}"


def lacks(
    owner: object, kind: str, name: str, known: Iterable[str], listed: Iterable[str] = ()
) -> str:
    """The message for a name that this file or algorithm does not have; continues like that of
    `unknown`.
    """
    return f"{owner} has no {kind} '{name}'. {_instead(name, sorted(known), listed)}"


def _instead(name: str, known: Sequence[str], listed: Iterable[str]) -> str:
    names_listed = sorted(listed) or known
    if len(names_listed) <= _MOST_LISTED:
        return f"{meant(name, known)}Available: {', '.join(names_listed)}."
    nearest = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0)
    return meant(name, known).rstrip() or f"Try {alternatives(nearest)}."


def meant(name: str, known: Iterable[str], *, cutoff: float = _NEAR) -> str:
    """`Did you mean …? ` with the nearest of these names; empty if none is near."""
    known = sorted(known)
    typed = name.upper() if name.isupper() else name.lower()
    containing = sorted(
        (known_name for known_name in known if typed and typed in known_name), key=len
    )
    near = (containing or difflib.get_close_matches(typed, known, n=3, cutoff=cutoff))[:3]
    return f"Did you mean {alternatives(near)}? " if near else ""


def alternatives(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join([", ".join(names[:-1]), *names[-1:]] if len(names) > 1 else names)
