"""Where to find the bundled model, data and guide: beside the code in a wheel, at the root in a
checkout.

Also how reports show local paths: reports are shared, and must not reveal the folders of their
authors.
"""

import os
import re
from itertools import combinations
from pathlib import Path
from typing import Any

TRAINING = "smollm2-training"  # what commands read without an argument
FAULTY = "fp8-kv"  # or this: six steps, with a setting to find and a limit to exceed
BUNDLED_MODEL = "sample_data/model"  # its name in the manifests of bundled traces
PACKAGE = Path(__file__).parents[1]
# pyproject.toml copies both folders into the package when a wheel is built
_IN_WHEEL = PACKAGE / "sample_data"
_IN_CHECKOUT = PACKAGE.parent / "sample_data"
_GUIDE_IN_WHEEL = PACKAGE / "guide"
_GUIDE_IN_CHECKOUT = PACKAGE.parent / "docs"


def bundled(name: str) -> Path:
    """The path of a bundled file or folder, such as `model` or `problems.jsonl`."""
    folder = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CHECKOUT
    return folder / name


def guide_pages() -> dict[str, Path]:
    """The pages of the guide by the names that users type: `gate`, `json/gate`; `json` lists
    that folder.
    """
    folder = _GUIDE_IN_WHEEL if _GUIDE_IN_WHEEL.is_dir() else _GUIDE_IN_CHECKOUT
    # Those of the folder itself come before those of folders in it.
    pages = sorted(folder.rglob("*.md"), key=lambda path: (path.parent != folder, path))
    return {page_name(path.relative_to(folder).as_posix()): path for path in pages}


def page_name(file: str) -> str:
    """The name that users type for a page, from its file in the guide's folder."""
    return file.removesuffix(".md").removesuffix("/README")


def bundled_trace(name: str = TRAINING) -> Path:
    """A bundled trace by the name that users type; by default a few steps of training a real
    model.
    """
    return bundled("traces") / name


def bundled_names() -> tuple[str, ...]:
    """The names that users type for bundled traces."""
    return tuple(sorted(path.name for path in bundled("traces").iterdir()))


def resolve_bundled(path: Path) -> Path:
    """The bundled trace of this name, unless a file or folder has it; else the path itself."""
    if path.exists() or str(path) not in bundled_names():
        return path
    return bundled_trace(str(path))


def is_bundled(folder: Path) -> bool:
    """Whether a folder is a bundled trace rather than a user's run."""
    return folder.parent == bundled("traces")


_ABSOLUTE = re.compile(r"(?<![^\s'\"(=:])(?:/[^\s/'\"():;,]+){2,}")  # in a sentence or a command


def shorten_paths(value: Any) -> Any:
    """The value, or everything in it, with absolute paths shortened: relative to the working
    folder, or `…/NAME`.

    For settings and names; never for text of models or data.
    """
    if isinstance(value, dict):
        return {key: shorten_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shorten_paths(item) for item in value]
    if isinstance(value, Path):
        if not value.is_absolute():
            return value
        return Path(shorten_paths(str(value)))
    if not isinstance(value, str) or "/" not in value:
        return value
    if os.path.isabs(value):
        return _short(value)
    return _ABSOLUTE.sub(lambda match: _short(match.group()), value)


def shorten_to_folder(path: str) -> str:
    """An absolute path with the folder that it is in: relative to the working folder, or
    `…/FOLDER/NAME`.
    """
    return _short(path, 2)


def shorten_apart(*values: Any) -> tuple[Any, ...]:
    """Different values, shown so that they still differ: each path with as many names as that
    takes.
    """
    shortest = tuple(map(shorten_paths, values))
    if _all_differ(shortest) or not all(isinstance(value, str) for value in values):
        return shortest
    most = max(len(Path(value).parts) for value in values)
    for names in range(2, most + 1):
        longer = tuple(_short(value, names) for value in values)
        if _all_differ(longer):
            return longer
    return shortest


def _all_differ(values: tuple[Any, ...]) -> bool:
    return all(first != other for first, other in combinations(values, 2))


def _short(path: str, names: int = 1) -> str:
    """The path relative to the working folder; elsewhere so many of its last names, and for a trace
    in a run that of the run.
    """
    folder = Path(path)
    if folder.is_relative_to(Path.cwd()):
        return str(folder.relative_to(Path.cwd()))
    # These are in every run, and only its name tells them apart.
    if folder.name in ("trace", "held-out"):
        names += 1
    return "/".join(("…", *folder.parts[1:][-names:]))
