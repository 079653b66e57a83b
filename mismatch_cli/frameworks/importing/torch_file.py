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


def load(path: Path) -> Any:
    """The content of a file from `torch.save`; tensors stay on disk until they are read.

    Raises `MismatchError` for a file that is truncated, or holds more than tensors, numpy arrays,
    numbers, text, lists and dicts.
    """
    import torch

    whole = zipfile.is_zipfile(path)
    if whole:
        _refuse_packed(path)
    else:
        with path.open("rb") as file:
            if file.read(2) == b"PK":
                raise MismatchError(
                    f"{path} is truncated: the end of the file is missing. Copy it again, or "
                    "leave it out."
                )
    try:
        with torch.serialization.safe_globals(
            [(kind, name) for name, kind in pickled_numpy.NAMES.items()]
        ):
            return pickled_numpy.with_arrays(
                torch.load(path, weights_only=True, map_location="cpu", mmap=whole or None)
            )
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
        raise unreadable(path, error, "Copy it again, or leave it out.", fault) from error


def _refuse_packed(path: Path) -> None:
    """Refuse compressed records: `torch.save` writes none, and one could expand to any size."""
    try:
        with zipfile.ZipFile(path) as archive:
            packed = any(
                record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()
            )
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise unreadable(
            path, error, "Copy it again, or leave it out.", "is broken ({})"
        ) from error
    if packed:
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
    keys = {str(key) for key in content}
    samples, columns = content.get("samples"), content.get("rollout_data")
    if isinstance(samples, list) and samples and isinstance(samples[0], dict):
        keys |= {f"samples.{key}" for key in samples[0]}
    if isinstance(columns, dict):
        keys |= {f"rollout_data.{key}" for key in columns}
    return frozenset(keys)


class NeedsItsFramework(MismatchError):
    """A file that is not opened here; `lines` convert it where its framework is installed."""

    def __init__(self, path: Path, reason: str) -> None:
        known = (
            (about["framework"], about["lines"])
            for about in pickles()
            if re.fullmatch(about["name"], path.name)
        )
        framework, lines = next(known, ("", ""))
        self.lines = lines.format(path=str(path))
        written = "rollout_data.pt" if "torch.save" in self.lines else "dump.jsonl"
        advice = (
            f"Run the lines above where {framework} is installed, then: mismatch-cli import "
            f"{written}"
            if self.lines
            else (
                "Export it from its framework in the plain schema instead: mismatch-cli import "
                "--schema"
            )
        )
        super().__init__(f"{path} {reason}. {advice}")


def pickles() -> list[dict[str, str]]:
    """Which frameworks write which files as pickles, and the lines that turn one into a dump."""
    files: list[dict[str, str]] = tomllib.loads(
        (Path(__file__).parent / "pickles.toml").read_text("utf-8")
    )["file"]
    return files
