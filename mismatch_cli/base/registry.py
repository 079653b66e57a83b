"""A folder is its own registry: the file name is the public name, and listing names imports
nothing.

A registry is named by its package, `mismatch_cli.rules.trust_regions`, or by a pattern in which
`NAME` is what the public name is read from: `mismatch_cli.frameworks.NAME.importer` has a folder
for each name, and `mismatch_cli.*.commands.NAME` is spread over all rooms, so that a program
brings its own. Some registries also include the entry points of installed packages
(`base/entry_points.py`).
"""

import difflib
import importlib
import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mismatch_cli.base import entry_points
from mismatch_cli.base.entry_points import EntryPoint
from mismatch_cli.base.errors import UsageError

_ROOMS = Path(__file__).parents[1]
_NAME = "NAME"
_NEAR = 0.5  # similarity at which a name counts as misspelled
_MOST_LISTED = 16  # more names are a wall that nobody reads: three lines at 80 characters


def names_file(specs: str | Iterable[str]) -> bool:
    """Whether one of these names, perhaps with parameters, is a Python file, which runs when it is
    looked up.
    """
    if isinstance(specs, str):
        specs = [specs]
    return any(spec.partition(":")[0].endswith(".py") for spec in specs)


def names(package: str) -> list[str]:
    """The public names of a registry: its own files', and its entry points'."""
    return sorted([*modules(package), *installed(package)])


@cache
def modules(package: str) -> Mapping[str, str]:
    """The modules of a registry by public name, without entry points."""
    return {
        name: ".".join(path.relative_to(_ROOMS.parent).with_suffix("").parts)
        for name, path in files(package).items()
    }


@cache
def tables(package: str) -> Mapping[str, Mapping[str, Any]]:
    """The tables of data of a registry by public name, in its order:
    `mismatch_cli.frameworks.NAME.limits` has a `limits.toml` in some frameworks' folders.
    """
    return {name: table_of(path) for name, path in sorted(files(package, ".toml").items())}


def table_of(file: str | Path) -> dict[str, Any]:
    """The table of data of a file's name: `causes.toml` of `causes.py`."""
    return tomllib.loads(Path(file).with_suffix(".toml").read_text(encoding="utf-8"))


def files(package: str, suffix: str = ".py") -> dict[str, Path]:
    """The files of a registry by public name: `binary_tv.py` is `binary-tv`, and a leading
    underscore marks a helper.
    """
    levels = package.split(".")[1:]
    if _NAME not in levels:
        levels.append(_NAME)
    level_of_name = levels.index(_NAME)
    levels[level_of_name] = "*"
    by_name = {}
    for path in _ROOMS.glob("/".join(levels) + suffix):
        name = path.relative_to(_ROOMS).with_suffix("").parts[level_of_name]
        if not name.startswith("_"):
            by_name[name.replace("_", "-")] = path
    return by_name


@cache
def installed(package: str) -> Mapping[str, EntryPoint]:
    """What other packages add to a registry, by name; empty if it has no entry points."""
    if package not in entry_points.GROUPS:
        return {}
    return entry_points.usable_points(package, modules(package))


def check(package: str, name: str, kind: str) -> None:
    """A `UsageError` that suggests the nearest name for an unknown one; imports nothing."""
    available = names(package)
    if name not in available:
        raise UsageError(unknown_name(kind, name, available))


def load(package: str, name: str, kind: str) -> ModuleType:
    """Check a public name and import its module; a `MismatchError` names a package that fails."""
    check(package, name, kind)
    foreign = installed(package).get(name)
    if foreign is not None:
        return entry_points.load(package, foreign, kind)
    return importlib.import_module(modules(package)[name])


@cache
def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only parameters of a function with their defaults."""
    every = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in every if p.kind is inspect.Parameter.KEYWORD_ONLY}


def unknown_name(kind: str, name: str, available: Iterable[str], listed: Iterable[str] = ()) -> str:
    """The message for an unknown name: the nearest of the available ones, if any, and all of them,
    or only those `listed`, unless these are too many to read.
    """
    return f"Unknown {kind} '{name}'. {_instead(name, sorted(available), listed)}"


def lacks_name(
    owner: object, kind: str, name: str, available: Iterable[str], listed: Iterable[str] = ()
) -> str:
    """The message for a name that this file or algorithm does not have; continues like that of
    `unknown_name`.
    """
    return f"{owner} has no {kind} '{name}'. {_instead(name, sorted(available), listed)}"


def _instead(name: str, available: Sequence[str], listed: Iterable[str]) -> str:
    meant = did_you_mean(name, available)
    names_listed = sorted(listed) or available
    if len(names_listed) <= _MOST_LISTED:
        return f"{meant}Available: {', '.join(names_listed)}."
    if meant:
        return meant.rstrip()
    nearest = difflib.get_close_matches(name.lower(), available, n=3, cutoff=0)
    return f"Try {alternatives(nearest)}."


def did_you_mean(name: str, available: Iterable[str], *, cutoff: float = _NEAR) -> str:
    """`Did you mean …? ` with the nearest of these names; empty if none is near."""
    every = sorted(available)
    typed = name.upper() if name.isupper() else name.lower()
    if not typed:
        return ""
    # Users remember a piece of a name; without such a name, those with nearly this spelling.
    near = sorted((each for each in every if typed in each), key=len)
    if not near:
        near = difflib.get_close_matches(typed, every, n=3, cutoff=cutoff)
    if not near:
        return ""
    return f"Did you mean {alternatives(near[:3])}? "


def alternatives(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} or {names[-1]}"
