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
        return f"of the package {self.package} {self.version}"


def beside(package: str, taken: Collection[str]) -> Mapping[str, EntryPoint]:
    """The entry points of a registry's group by name; unusable ones are left out, and `ignored`
    says why.
    """
    found: dict[str, EntryPoint] = {}
    for point in of_group(GROUPS[package]):
        where = f"{GROUPS[package]}: '{point.name}' {point.whose} is ignored"
        if point.name in taken:
            ignored_points.append(
                f"{where}: mismatch-cli itself has that name. Ask its author for another name."
            )
        elif point.name in found:
            ignored_points.append(
                f"{where}: {found[point.name].package} has that name too. Uninstall one of them."
            )
        elif not _NAME.fullmatch(point.name):
            ignored_points.append(
                f"{where}: a name has lower-case letters, digits and single hyphens. Ask for "
                "another."
            )
        else:
            found[point.name] = point
    return found


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
    what = f"The {kind} '{point.name}' {point.whose}"
    try:
        with foreign_code():
            module = importlib.import_module(point.module)
    except (Exception, SystemExit) as error:
        if sentence := not_installed(error, what):
            raise MismatchError(sentence) from error
        raise MismatchError(
            f"{what} cannot be imported ({type(error).__name__}: {first_line(error)}). Update "
            f"the package, or: pip uninstall {point.package}"
        ) from error
    lacking = [
        name
        for name in _NEEDED[GROUPS[package].removeprefix("mismatch_cli.")]
        if not hasattr(module, name)
    ]
    if lacking:
        raise MismatchError(
            f"{what} lacks {', '.join(lacking)}: {point.module} must define what mismatch-cli "
            f"guide extending lists. Update the package, or: pip uninstall {point.package}"
        )
    return module


def package_at_fault(error: BaseException) -> str:
    """The package (with version) whose entry point raised an unexpected error; empty if it is
    ours.
    """
    modules = {frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)}
    by_root = {
        point.module.partition(".")[0]: point
        for group in GROUPS.values()
        for point in of_group(group)
    }
    guilty = (by_root.get(module.partition(".")[0]) for module in modules)
    return next((f"{point.package} {point.version}" for point in guilty if point), "")


def fingerprint() -> Iterator[bytes]:
    """What identifies the code of each entry point, so that caches notice another version."""
    for group in GROUPS.values():
        for point in of_group(group):
            yield repr((group, point)).encode()
            source = getattr(sys.modules.get(point.module), "__file__", None)
            yield Path(source).read_bytes() if source else b""


@cache
def of_group(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group in all installed packages, ordered by package name."""
    folders = metadata_folders()
    if not folders:
        return ()
    from importlib.metadata import Distribution

    found: dict[str, list[EntryPoint]] = {}
    for folder in folders:
        distribution = Distribution.at(folder)
        package, version = (
            distribution.metadata["Name"] or Path(folder).stem,
            distribution.version or "of no version",
        )
        points = [
            EntryPoint(known.name.replace("_", "-"), known.module, package, version)
            for known in distribution.entry_points
            if known.group == group
        ]
        found.setdefault(package, points)  # the first one on the path is what Python would import
    return tuple(point for _, points in sorted(found.items()) for point in sorted(points))


@cache
def metadata_folders() -> tuple[str, ...]:
    """The metadata folders of installed packages that name one of our groups, in the order of the
    path.

    Without importlib.metadata, which takes 30 ms to import and to read a hundred packages.
    """
    found: list[str] = []
    for folder in dict.fromkeys(sys.path):
        try:
            with os.scandir(folder or ".") as entries:
                found += sorted(
                    entry.path
                    for entry in entries
                    if entry.name.endswith(_METADATA) and _names_us(entry)
                )
        except OSError:
            continue  # an archive, or a missing folder
    return tuple(found)


def _names_us(metadata: os.DirEntry[str]) -> bool:
    try:
        return _SECTION in Path(metadata.path, "entry_points.txt").read_bytes()
    except OSError:
        return False
