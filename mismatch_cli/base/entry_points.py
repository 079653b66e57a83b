"""Masks, weights, engines, importers, checks and dialects that other packages add.

A package names one of its modules in a group, such as `mismatch_cli.trust_regions`; the module
defines what a file of that folder defines. Names come from the metadata of installed packages,
without importing them.
"""

import importlib
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import NamedTuple, NoReturn

from mismatch_cli.base.errors import MismatchError, first_line
from mismatch_cli.base.extras import not_installed

_IN_EVERY_IMPORTER = ("TITLE", "FILES", "ENABLE", "PI", "HOLDS", "SHIFT", "PADDING", "AVERAGING")
_NEEDED = {  # what a module of each group must define
    "importers": (*_IN_EVERY_IMPORTER, "recognises", "blocks"),
    "engines": ("REMOTE", "TAKES_WEIGHTS", "MEMORY_SHARE", "create"),
    "trust_regions": ("trust_region",),
    "weights": ("weight",),
    "checks": ("NAME", "STAGE", "TITLE", "CAUSE", "CHANGE", "SOURCE", "check"),
    "dialects": ("LINES", "WHEN"),
}
# The group of entry points that each registry includes
GROUPS = {
    "mismatch_cli.frameworks.NAME.importer": "mismatch_cli.importers",
    "mismatch_cli.frameworks.NAME.metrics": "mismatch_cli.dialects",
    "mismatch_cli.models.engines": "mismatch_cli.engines",
    "mismatch_cli.rules.trust_regions": "mismatch_cli.trust_regions",
    "mismatch_cli.rules.weights": "mismatch_cli.weights",
    "mismatch_cli.diagnosis.checks": "mismatch_cli.checks",
}
# Must not contain what separates names and parameters
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_SECTION = b"[mismatch_cli."
_METADATA = (".dist-info", ".egg-info")
ignored_points: list[str] = []
_leave = os._exit


class EntryPoint(NamedTuple):
    """A module of another package under a public name."""

    name: str
    module: str
    package: str  # its name for pip
    version: str

    @property
    def whose(self) -> str:
        """Words for messages: which package it is of."""
        return f"of the package {self.package} {self.version}"


def usable_points(package: str, taken: Collection[str]) -> Mapping[str, EntryPoint]:
    """The entry points of a registry's group by name; unusable ones are left out, and `ignored`
    says why.
    """
    group = GROUPS[package]
    usable: dict[str, EntryPoint] = {}
    for point in points_of_group(group):
        other = usable.get(point.name)
        if point.name in taken:
            fault = "mismatch-cli itself has that name. Ask its author for another name."
        elif other is not None:
            fault = f"{other.package} has that name too. Uninstall one of them."
        elif not _NAME.fullmatch(point.name):
            fault = "a name has lower-case letters, digits and single hyphens. Ask for another."
        else:
            usable[point.name] = point
            continue
        ignored_points.append(f"{group}: '{point.name}' {point.whose} is ignored: {fault}")
    return usable


def ignored() -> list[str]:
    """A sentence for each entry point that was found but cannot be used."""
    return list(dict.fromkeys(ignored_points))


@contextmanager
def foreign_code() -> Iterator[None]:
    """Keep code of others from writing to stdout, which belongs to the command, and from ending the
    program unnoticed.

    `os._exit` raises a SystemExit; what the code has forked still ends with it.
    """
    program = os.getpid()

    def leave(status: int) -> NoReturn:
        # A process that the code has forked ends at once: an exception would run our program in it.
        if os.getpid() != program:
            _leave(status)
        raise SystemExit(status)

    os._exit = leave
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os._exit = _leave


def load(package: str, point: EntryPoint, kind: str) -> ModuleType:
    """Import the module of an entry point; a `MismatchError` names the package if that fails."""
    subject = f"The {kind} '{point.name}' {point.whose}"
    try:
        with foreign_code():
            module = importlib.import_module(point.module)
    except (Exception, SystemExit) as error:
        lacks_extra = not_installed(error, subject)
        if lacks_extra is not None:
            raise MismatchError(lacks_extra) from error
        raise MismatchError(
            f"{subject} cannot be imported ({type(error).__name__}: {first_line(error)}). Update "
            f"the package, or: pip uninstall {point.package}"
        ) from error
    needed = _NEEDED[GROUPS[package].removeprefix("mismatch_cli.")]
    lacking = [name for name in needed if not hasattr(module, name)]
    if lacking:
        raise MismatchError(
            f"{subject} lacks {', '.join(lacking)}: {point.module} must define what mismatch-cli "
            f"guide extending lists. Update the package, or: pip uninstall {point.package}"
        )
    return module


def package_at_fault(error: BaseException) -> str:
    """The package, with its version, whose entry point an unexpected error passed through; empty
    if it is ours.
    """
    points: dict[str, EntryPoint] = {}
    for group in GROUPS.values():
        for point in points_of_group(group):
            points[_root(point.module)] = point
    for frame, _ in walk_tb(error.__traceback__):
        foreign = points.get(_root(frame.f_globals.get("__name__", "")))
        if foreign is not None:
            return f"{foreign.package} {foreign.version}"
    return ""


def _root(module: str) -> str:
    return module.partition(".")[0]


def fingerprint() -> Iterator[bytes]:
    """What identifies the code of each entry point, so that caches notice another version."""
    for group in GROUPS.values():
        for point in points_of_group(group):
            yield repr((group, point)).encode()
            source = getattr(sys.modules.get(point.module), "__file__", None)
            yield Path(source).read_bytes() if source else b""


@cache
def points_of_group(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group in all installed packages, ordered by package name."""
    folders = metadata_folders()
    if not folders:
        return ()
    from importlib.metadata import Distribution

    points_by_package: dict[str, list[EntryPoint]] = {}
    for folder in folders:
        distribution = Distribution.at(folder)
        package = distribution.metadata["Name"] or Path(folder).stem
        # A package can be installed twice: the first one on the path is what Python would import.
        if package in points_by_package:
            continue
        version = distribution.version or "of no version"
        points_by_package[package] = [
            EntryPoint(point.name.replace("_", "-"), point.module, package, version)
            for point in distribution.entry_points
            if point.group == group
        ]
    ordered: list[EntryPoint] = []
    for _, points in sorted(points_by_package.items()):
        ordered += sorted(points)
    return tuple(ordered)


@cache
def metadata_folders() -> tuple[str, ...]:
    """The metadata folders of installed packages that name one of our groups, in the order of the
    path.

    Without importlib.metadata, which takes 30 ms to import and to read a hundred packages.
    """
    folders: list[str] = []
    for importable in dict.fromkeys(sys.path):
        try:
            with os.scandir(importable or ".") as entries:
                ours = [entry.path for entry in entries if _is_ours(entry)]
        except OSError:
            continue  # an archive, or a missing folder
        folders += sorted(ours)
    return tuple(folders)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Whether this is the metadata folder of a package with an entry point in a group of ours."""
    if not entry.name.endswith(_METADATA):
        return False
    try:
        return _SECTION in Path(entry.path, "entry_points.txt").read_bytes()
    except OSError:
        return False
