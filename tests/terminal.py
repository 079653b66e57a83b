"""A command in a real terminal of its own, whose width can change and whose keys can be pressed."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import struct
import subprocess
import termios
import time
from contextlib import suppress
from pathlib import Path


class Terminal:
    """A running command; `text` is its output so far."""

    def __init__(
        self, command: list[str], columns: int, folder: Path | None = None, **variables: str
    ) -> None:
        self._end, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        ours = ("COLUMNS", "LINES", "NO_COLOR")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        self.process = subprocess.Popen(
            command,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            cwd=folder,
            env=environment | {"TERM": "xterm"} | variables,
            preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
        )
        os.close(inside)
        os.set_blocking(self._end, False)
        # A read can end within a character
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.text = ""

    def _read(self) -> None:
        self.text += self._decoder.decode(os.read(self._end, 1 << 20))

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def shows(self, what: str) -> bool:
        try:
            self._read()
        except BlockingIOError:
            assert self.process.poll() is None, self.text
        except OSError:  # the other end is closed
            assert what in self.text, self.text
        return what in self.text

    def finish(self) -> int:
        while self.process.poll() is None:
            try:
                self._read()
            except OSError:  # nothing yet
                time.sleep(0.05)
        # One read does not take all that is left
        with suppress(OSError):
            while True:
                self._read()
        return self.process.returncode
