"""Reads `.pt` files as data: weights-only loading runs no code, and files that need more are
refused.
"""

import pickle
import re
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import MismatchError, first_line, unreadable
from mismatch_cli.frameworks.importing import pickled_numpy

_ELSE = "Copy it again, or leave it out."
_ZIP = b"PK"  # how the files of torch.save begin since torch 1.6


def load(path: Path) -> Any:
    """The content of a file from `torch.save`; tensors stay on disk until they are read.

    Raises `MismatchError` for a file that is truncated, or holds more than tensors, numpy arrays,
    numbers, text, lists and dicts.
    """
    import torch

    is_zip = zipfile.is_zipfile(path)
    if is_zip:
        _refuse_packed(path)
    else:
        _refuse_truncated(path)
    # torch calls a function by the name in the pickle: ours take the place of numpy's.
    stand_ins: list[Any] = [(kind, name) for name, kind in pickled_numpy.NAMES.items()]
    try:
        with torch.serialization.safe_globals(stand_ins):
            # Only an archive can be mapped into memory; for others torch's default holds.
            content = torch.load(path, weights_only=True, map_location="cpu", mmap=is_zip or None)
            return pickled_numpy.with_arrays(content)
    except pickle.UnpicklingError as error:
        reason = "cannot be loaded weights-only, and anything else could run any code"
        raise NeedsItsFramework(path, reason) from error
    except (
        RuntimeError,
        OSError,
        EOFError,
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
        IndexError,
    ) as error:
        check_memory(error)
        fault = "is broken, or torch.save did not write it ({})"
        raise unreadable(path, error, _ELSE, fault) from error


def _refuse_truncated(path: Path) -> None:
    """Refuse a zip archive without its end, where its list of records would be."""
    with path.open("rb") as file:
        if file.read(len(_ZIP)) == _ZIP:
            raise MismatchError(f"{path} is truncated: the end of the file is missing. {_ELSE}")


def _refuse_packed(path: Path) -> None:
    """Refuse compressed records: `torch.save` writes none, and one could expand to any size."""
    try:
        with zipfile.ZipFile(path) as archive:
            methods = {record.compress_type for record in archive.infolist()}
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise unreadable(path, error, _ELSE, "is broken ({})") from error
    if methods - {zipfile.ZIP_STORED}:
        raise MismatchError(
            f"{path} holds compressed records, which torch.save never writes. Save it again, or "
            "leave it out."
        )


def check_memory(error: Exception) -> None:
    """Turn torch's out-of-memory error into Python's `MemoryError`."""
    if isinstance(error, RuntimeError) and "allocate memory" in str(error):
        raise MemoryError from error


@contextmanager
def laid_out(path: Path, title: str) -> Iterator[None]:
    """Turn Python's errors about unexpected values into a `MismatchError` that names the file."""
    try:
        yield
    except (
        TypeError,
        ValueError,
        KeyError,
        IndexError,
        AttributeError,
        OverflowError,
        RuntimeError,
    ) as error:
        check_memory(error)
        fault = f"{type(error).__name__}: {first_line(error)}"
        raise MismatchError(
            f"{path} does not have the layout of {title} ({fault}). Formats: mismatch-cli import "
            "--formats"
        ) from error


def keys_of(content: Any) -> frozenset[str]:
    """The keys of a dict, and those of its first sample or columns: `samples.tokens`,
    `rollout_data.tokens`.
    """
    if not isinstance(content, dict):
        return frozenset()
    keys = set(map(str, content))
    samples = content.get("samples")
    columns = content.get("rollout_data")
    if isinstance(samples, list) and samples and isinstance(samples[0], dict):
        keys.update(f"samples.{key}" for key in samples[0])
    if isinstance(columns, dict):
        keys.update(f"rollout_data.{key}" for key in columns)
    return frozenset(keys)


class NeedsItsFramework(MismatchError):
    """A file that is not opened here; `lines` convert it where its framework is installed."""

    def __init__(self, path: Path, reason: str) -> None:
        self.lines = ""
        advice = (
            "Export it from its framework in the plain schema instead: mismatch-cli import --schema"
        )
        for about in pickles():
            if re.fullmatch(about["name"], path.name):
                self.lines = about["lines"].format(path=str(path))
                written = "rollout_data.pt" if "torch.save" in self.lines else "dump.jsonl"
                advice = (
                    f"Run the lines above where {about['framework']} is installed, then: "
                    f"mismatch-cli import {written}"
                )
                break
        super().__init__(f"{path} {reason}. {advice}")


def pickles() -> list[dict[str, str]]:
    """Which frameworks write which files as pickles, and the lines that turn one into a dump."""
    table = Path(__file__).parent / "pickles.toml"
    files: list[dict[str, str]] = tomllib.loads(table.read_text("utf-8"))["file"]
    return files
