"""A temporary folder for what an engine leaves: gone when it closes or, if it was killed, with the next one."""

from __future__ import annotations

import fcntl
import getpass
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

_PREFIX, _LOCK = "mismatch-cli-engine-", "in-use"


class TemporaryFolder:
    """The place of temporary files of this process and its children, from now until `close`.

    Its lock is held for as long as the process lives: that tells a folder in use from one whose owner was killed.
    """

    _shared: ClassVar[TemporaryFolder | None] = None

    @classmethod
    def shared(cls) -> TemporaryFolder:
        """One for all engines of the process, until the last of them closes.

        Folders within each other would soon be too deep for the names of sockets.
        """
        cls._shared = cls._shared or cls()
        cls._shared._users += 1
        return cls._shared

    def __init__(self) -> None:
        self._users = 0
        self._tempdir, self._environment = tempfile.tempdir, os.environ.get("TMPDIR")
        system = Path(tempfile.gettempdir())
        remove_abandoned(system)
        # Compiled code is kept between runs on purpose; its place would follow the temporary folder.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(system / f"torchinductor_{getpass.getuser()}"))
        new = Path(tempfile.mkdtemp(prefix="mismatch-cli-new-", dir=system))
        self._lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = system / f"{_PREFIX}{new.name.rpartition('-')[2]}"
        new.rename(self.path)  # nobody sees it before it is locked
        tempfile.tempdir = os.environ["TMPDIR"] = str(self.path)

    def close(self) -> None:
        """Remove the folder, if nobody else uses it; temporary files go where they went before."""
        self._users -= 1
        if self._users > 0:
            return
        if TemporaryFolder._shared is self:
            TemporaryFolder._shared = None
        tempfile.tempdir = self._tempdir
        if self._environment is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = self._environment
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned(system: Path) -> None:
    """Remove the folders of this user's engines whose process is gone; anybody else's stay."""
    for folder in system.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
