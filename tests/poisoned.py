"""A folder of somebody else: files named like Python's own modules, which leave a trace where
they are imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

_POISON = (
    "import os\n"
    "os.close(os.open({marker!r}, os.O_CREAT))\n"
    "raise ImportError('this is not the real one')\n"
)
_NOT_SHADOWED = ("importlib", "os", "__future__")  # of which Python itself has copies
_PROGRAM = (
    "import sys\n"
    "from mismatch_cli.__main__ import main\n"
    "if __name__ == '__main__':\n"
    "    sys.exit(main())\n"
)


class PoisonedFolder:
    """Commands run in it as from a shell, by a console script in another folder."""

    def __init__(self, folder: Path) -> None:
        self.path, self._marks, self._program = (
            folder / "stranger's",
            folder / "imported",
            folder / "mismatch-cli",
        )
        self.path.mkdir()
        self._marks.mkdir()
        self._program.write_text(_PROGRAM)
        for name in sys.stdlib_module_names.difference(_NOT_SHADOWED, sys.builtin_module_names):
            (self.path / f"{name}.py").write_text(_POISON.format(marker=str(self._marks / name)))

    def run(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, self._program, *words],
            cwd=self.path,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        )

    def imported(self) -> list[str]:
        """The names of its files that were imported."""
        return sorted(mark.name for mark in self._marks.iterdir())
