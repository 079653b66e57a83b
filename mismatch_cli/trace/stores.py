"""Traces on object stores: paths with the parts of `pathlib.Path` that readers use, on pyarrow's
file systems.

`s3://`, `gs://` and `abfs://` are pyarrow's own; any other scheme is fsspec's, such as `hf://`, and
needs its package. Requests to a slow or busy store are retried within the limits below. A folder is
listed once: its files carry their sizes and times along, to other processes too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from mismatch_cli.base import memory
from mismatch_cli.base.errors import MismatchError, denied, first_line

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

ATTEMPTS = 8  # of a request to S3
_SECONDS_TO_CONNECT, _SECONDS_TO_ANSWER = 10.0, 60.0  # per attempt
_AGAIN = timedelta(minutes=5)  # requests to Google's store are retried for so long
# A `Path` turns the two slashes of a URL into one, so both forms are read.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}([^/].*)", re.DOTALL)
_BUCKETS, _AZURE = ("s3", "gs", "gcs"), ("abfs", "abfss")
_CREDENTIALS = {
    "s3": (
        "AWS_ACCESS_KEY_ID, AWS_PROFILE or the machine's role; AWS_ENDPOINT_URL for your own store"
    ),
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or the machine's account",
    "abfs": "AZURE_STORAGE_ACCOUNT and its key, or the machine's identity",
}


class StoreError(MismatchError, OSError):
    """A store that does not answer, or refuses: the files are not to blame."""


class Status(NamedTuple):
    """The parts of `os.stat` that readers use."""

    st_size: int
    st_mtime_ns: int  # 0: the store does not say


def local_or_store(path: Path) -> Path:
    """The path itself, or a `StorePath` for a URL that is not a local file."""
    if isinstance(path, StorePath):
        return path
    url = _URL.fullmatch(str(path))
    if url is None or path.exists():
        return path
    scheme, key = url.groups()
    if scheme == "file":
        return Path(f"/{key}")
    return cast("Path", _named(scheme, key.rstrip("/")))


@cache
def _named(scheme: str, key: str) -> StorePath:
    """The same object each time, so that a folder is not listed twice."""
    return StorePath(scheme, key)


def list_folders_again() -> None:
    """List folders again from now on: a trace may have grown."""
    _named.cache_clear()


def is_store(path: object) -> bool:
    """Whether this is on a store."""
    return isinstance(path, StorePath) or _URL.fullmatch(str(path)) is not None


def source_of(path: Path) -> Any:
    """What pyarrow reads a file from."""
    if isinstance(path, StorePath):
        return path.opened()
    return path


@dataclass(frozen=True)
class StorePath:
    """A file or folder on a store, `SCHEME://KEY`; behaves like an absolute `Path`."""

    scheme: str
    key: str
    status: Status | None = field(default=None, compare=False)  # as listed

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"

    def __lt__(self, other: StorePath) -> bool:
        return self.key < other.key

    def __truediv__(self, name: str | Path) -> StorePath:
        return _named(self.scheme, f"{self.key}/{name}")

    def __getstate__(self) -> dict[str, Any]:
        # The listing of a large folder is not sent to other processes: each file carries its own
        # size and time.
        return {"scheme": self.scheme, "key": self.key, "status": self.status}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        return _named(self.scheme, self.key.rpartition("/")[0])

    @property
    def parts(self) -> tuple[str, ...]:
        return f"{self.scheme}://", *self.key.split("/")

    @property
    def file_system(self) -> FileSystem:
        return file_system(self.scheme, self.key.partition("/")[0])

    @property
    def inside(self) -> str:
        """Its path within the file system."""
        if self.scheme in _BUCKETS:
            return self.key
        if self.scheme in _AZURE:
            container, _, path = self.key.partition("/")
            return f"{container.partition('@')[0]}/{path}"
        import fsspec

        return str(fsspec.get_filesystem_class(self.scheme)._strip_protocol(str(self)))

    def absolute(self) -> StorePath:
        return self

    def resolve(self) -> StorePath:
        return self

    def expanduser(self) -> StorePath:
        return self

    def is_absolute(self) -> bool:
        return True

    def is_relative_to(self, _other: object) -> bool:
        return False

    def exists(self) -> bool:
        return self._kind != "NotFound"

    def is_file(self) -> bool:
        return self._kind == "File"

    def is_dir(self) -> bool:
        return self._kind == "Directory"

    def stat(self) -> Status:
        """Size and modification time, as listed or from the store."""
        status = self.status or _status(self._ask(lambda fs: fs.get_file_info(self.inside)))
        if status is None:
            raise FileNotFoundError(str(self))
        return status

    def opened(self) -> Any:
        """The file, open for random access."""
        return self._ask(lambda fs: fs.open_input_file(self.inside))

    def read_bytes(self) -> bytes:
        def content(fs: FileSystem) -> bytes:
            with fs.open_input_stream(self.inside) as stream:
                return bytes(stream.read())

        return cast("bytes", self._ask(content))

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def glob(self, pattern: str) -> Iterator[StorePath]:
        """The files in this folder, or in folders in it, with matching names."""
        first, _, rest = pattern.partition("/")
        for path in self._listing:
            if fnmatchcase(path.name, first):
                yield from path.glob(rest) if rest else (path,)

    @cached_property
    def _listing(self) -> tuple[StorePath, ...]:
        from pyarrow.fs import FileSelector

        selected = FileSelector(self.inside, allow_not_found=True)
        listed: list[FileInfo] = self._ask(lambda fs: fs.get_file_info(selected))
        paths = []
        for info in listed:
            paths.append(StorePath(self.scheme, f"{self.key}/{info.base_name}", _status(info)))
        return tuple(paths)

    @cached_property
    def _kind(self) -> str:
        if self.status is not None:  # only files are listed with one
            return "File"
        return str(self._ask(lambda fs: fs.get_file_info(self.inside)).type.name)

    def _ask(self, request: Callable[[FileSystem], Any]) -> Any:
        with blame_store(self):
            return request(self.file_system)


@contextmanager
def blame_store(path: object) -> Iterator[None]:
    """Turn a store's failure to answer into a `StoreError`; errors about local files stay as
    they are.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, MismatchError) or not isinstance(path, StorePath):
            raise
        needs = _CREDENTIALS.get(path.scheme, "")
        hint = f" It may need {needs}." if needs else ""
        raise StoreError(
            f"Could not read {path} ({first_line(error)}).{hint} Run the same command again."
        ) from error


@contextmanager
def decoding(path: object) -> Iterator[None]:
    """For decoding a file: an error blames the file, unless a store, a permission or memory is
    to blame.
    """
    try:
        yield
    except Exception as error:
        if memory.is_out_of_memory(error):
            raise MemoryError(first_line(error)) from error
        if isinstance(error, OSError) and isinstance(path, StorePath):
            # Arrow's errors do not tell a broken file from a store that fails to answer.
            # Reading the file once more raises a `StoreError` if it is the store.
            path.read_bytes()
        elif isinstance(error, PermissionError):
            raise denied(path) from error
        raise


@cache
def file_system(scheme: str, bucket: str) -> FileSystem:
    """The file system of a scheme for one bucket; a `MismatchError` if its package is not
    installed.
    """
    import pyarrow.fs as fs

    if scheme == "s3":
        retries = fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS)
        return fs.S3FileSystem(
            retry_strategy=retries,
            connect_timeout=_SECONDS_TO_CONNECT,
            request_timeout=_SECONDS_TO_ANSWER,
            **bucket_location(bucket),
        )
    if scheme in _BUCKETS:
        return fs.GcsFileSystem(retry_time_limit=_AGAIN)
    if scheme in _AZURE:
        return fs.FileSystem.from_uri(f"{scheme}://{bucket}/")[0]
    try:
        import fsspec

        foreign, _ = fsspec.core.url_to_fs(f"{scheme}://{bucket}")
    except (ImportError, ValueError) as error:
        raise MismatchError(
            f"{scheme}:// needs fsspec and the package of that scheme, such as huggingface_hub "
            f"for hf:// ({first_line(error)}). Install them with: pip install fsspec"
        ) from error
    return fs.PyFileSystem(fs.FSSpecHandler(foreign))


def bucket_location(bucket: str) -> dict[str, str]:
    """The location of an S3 bucket: your own endpoint, the configured region, or the one that
    Amazon reports.
    """
    import pyarrow.fs as fs

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        scheme, _, host = endpoint.rpartition("://")
        return {"endpoint_override": host.rstrip("/"), "scheme": scheme or "https"}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return {"region": region or fs.resolve_s3_region(bucket)}


def _status(info: FileInfo) -> Status | None:
    """Size and time of a file; None for a folder, or nothing."""
    if not info.is_file:
        return None
    return Status(info.size, info.mtime_ns or 0)
