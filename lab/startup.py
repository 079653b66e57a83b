"""What commands cost before their first output: CPU time as a ratio to a process that loads numpy
and pyarrow.

    python -m lab.startup [--rounds 9] [--only gate] [--check] [--python PYTHON --checkout FOLDER]

Every command runs in its own process and an empty folder, alternating with `python -c "import
numpy, pyarrow.parquet"`; medians of the user and system time of both. Bytecode is compiled before
the first round, as it is after a program's first run. With `--check` a median above its target
gives exit code 1; `--python` and `--checkout` measure another installation. For the cost of a page
compared with its numbers see `page.py`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FLOOR = ("-c", "import numpy, pyarrow.parquet")


@dataclass(frozen=True)
class Start:
    """A command line, its target cost, and its exit code."""

    line: str
    target: float
    code: int = 0


_STARTS = (
    Start("--help", 1.2),
    *(Start(f"{name} --help", 1.6) for name in ("probe", "train", "report", "clipstats")),
    Start("probe ./nonexistent", 1.2, 1),
    Start("report ./nonexistent", 1.2, 1),
    Start("import ./nonexistent", 1.2, 1),
    Start("report --as verll", 1.2, 2),
    Start("gate --limits prime", 1.2, 2),
    Start("clipstats -a dpo-binary-tv", 1.2, 2),
    Start("train -a dppo-binary-tv:max_tv=-1", 1.2, 2),
    Start("probe --temperature 0", 1.2, 2),
    Start("algorithms", 1.5),
    Start("verdict k3=0.0015", 2.0),
    Start("gate", 4.0, 3),
    Start("report --json", 8.0),
    Start("compare --json", 8.0),
    Start("diagnose --json", 8.0),
    Start("clipstats --json", 8.0),
)


def seconds(
    command: Sequence[str], environment: dict[str, str], folder: Path, code: int = 0
) -> float:
    """User and system time of a process and its children; it must end with this code."""
    process = subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != code:
        raise SystemExit(
            f"{' '.join(command)} ended with {process.returncode}: {said.decode().strip()}"
        )
    return usage.ru_utime + usage.ru_stime


def measure(
    python: str, checkout: Path, starts: Sequence[Start], rounds: int
) -> dict[str, list[float]]:
    """CPU seconds by command line, the floor's under its own; every round runs each once."""
    times: dict[str, list[float]] = {
        line: [] for line in (_FLOOR[1], *(start.line for start in starts))
    }
    with tempfile.TemporaryDirectory() as temporary:
        compiled = {"PYTHONPYCACHEPREFIX": f"{temporary}/compiled", "PYTHONPATH": str(checkout)}
        environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
        }
        for number in range(rounds + 1):
            for start in (None, *starts):
                folder = Path(tempfile.mkdtemp(dir=temporary))
                line = _FLOOR if start is None else ("-m", "mismatch_cli", *start.line.split())
                taken = seconds(
                    [python, *line], environment | compiled, folder, start.code if start else 0
                )
                if number:  # the first one compiles
                    times[_FLOOR[1] if start is None else start.line].append(taken)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="commands whose line contains this")
    parser.add_argument(
        "--check", action="store_true", help="exit code 1 if a median is above its target"
    )
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).resolve().parents[1])
    options = parser.parse_args()
    starts = [start for start in _STARTS if options.only in start.line]
    times = measure(options.python, options.checkout, starts, options.rounds)
    floor = statistics.median(times[_FLOOR[1]])
    print(f"{_FLOOR[1]}: {floor:.3f} s ({min(times[_FLOOR[1]]):.3f}–{max(times[_FLOOR[1]]):.3f})")
    print(f"{'':<36}{'CPU s':>8}{'ratio':>8}{'range':>14}{'target':>8}")
    missed = False
    for start in starts:
        taken = times[start.line]
        ratio = statistics.median(taken) / floor
        spread = f"{min(taken) / floor:.2f}–{max(taken) / floor:.2f}"
        above = " missed" if ratio > start.target else ""
        missed |= bool(above)
        print(
            f"{start.line:<36}{statistics.median(taken):>8.3f}{ratio:>8.2f}{spread:>14}{start.target:>8.1f}{above}"
        )
    sys.exit(options.check and missed)


if __name__ == "__main__":
    main()
