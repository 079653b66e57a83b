"""Each fault in a copy of the checkout, against the tests that can notice it.

The tests run in a process forked from one that has imported torch, transformers and vLLM; the
package itself is imported after the fork, with the fault.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.operators import Fault
from tests.paths import ROOT
from tests.warm import Forked

# A busy machine is several times slower than at the recording.
_LEAST_SECONDS, _TIMES_EXPECTED = 300.0, 10.0


@dataclass(frozen=True)
class Verdict:
    """`outcome`: survived, killed, or hung (the tests did not end, which a person would see)."""

    name: str  # of the fault
    outcome: str
    by: str  # the test that noticed
    tests: int
    seconds: float


class Copy:
    """A checkout of its own, in which one file at a time is wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        files = "git ls-files -co --exclude-standard -z"
        copied = f"{files} | xargs -0 cp --preserve=all --parents --target-directory '{folder}'"
        # A file that git lists and somebody has removed is not copied
        subprocess.run(copied, cwd=ROOT, shell=True, stderr=subprocess.DEVNULL, check=False)
        self._clock = int(time.time())

    def write(self, path: str, source: bytes) -> None:
        """Replace a module. Bytecode is renewed by the file's time, which counts in seconds."""
        target = self.folder / "mismatch_cli" / path
        target.write_bytes(source)
        self._clock += 2
        os.utime(target, (self._clock, self._clock))


class Trial:
    """A fault, planted, and the running process of its tests."""

    def __init__(self, fault: Fault, tests: Sequence[str], copy: Copy, expected: float) -> None:
        self.fault, self._copy, self._tests = fault, copy, tests
        self._sound = (copy.folder / "mismatch_cli" / fault.path).read_bytes()
        copy.write(fault.path, fault.planted(self._sound))
        log = copy.folder / "trial.log"
        log.unlink(missing_ok=True)
        self._started = time.monotonic()
        self._until = self._started + max(_LEAST_SECONDS, _TIMES_EXPECTED * expected)
        self._running = Forked("tests.faults.trials", str(copy.folder), *tests, log=log)

    def verdict(self) -> Verdict | None:
        """None while the tests run."""
        code = self._running.poll()
        if code is None and time.monotonic() < self._until:
            return None
        self.kill()
        self._copy.write(self.fault.path, self._sound)
        said = self._running.said()
        if code == pytest.ExitCode.USAGE_ERROR and "not found:" in said:
            raise LookupError("A test is gone: first `python -m tests.faults record`.")
        outcome, by = "killed", ""
        if code is None:
            outcome = "hung"
        elif code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            outcome = "survived"
        if outcome != "survived":
            by = _who_failed(said)
        seconds = time.monotonic() - self._started
        return Verdict(self.fault.name, outcome, by, len(self._tests), seconds)

    def kill(self) -> None:
        """End the tests, with whatever they started in their session."""
        with suppress(ProcessLookupError):
            os.killpg(self._running.pid, signal.SIGKILL)


def run_trials(
    planned: Sequence[tuple[Fault, Sequence[str], float]], at_a_time: int
) -> Iterator[Verdict]:
    """The verdicts of faults with their tests and the seconds that these take, as they come."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        idle = [Copy(Path(folder) / str(i)) for i in range(at_a_time)]
        waiting = list(reversed(planned))
        running: dict[Trial, Copy] = {}
        try:
            while waiting or running:
                while waiting and idle:
                    copy = idle.pop()
                    fault, tests, expected = waiting.pop()
                    running[Trial(fault, tests, copy, expected)] = copy
                for trial in list(running):
                    verdict = trial.verdict()
                    if verdict:
                        idle.append(running.pop(trial))
                        yield verdict
                time.sleep(0.05)
        finally:
            for trial in running:
                trial.kill()


def _who_failed(log: str) -> str:
    """The test named in pytest's summary, or what ended it before."""
    lines = log.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else (lines or ["nothing was said"])[-1]


def main(folder: str, *tests: str) -> int:
    """In the forked process, which it ends: pytest on the copy until the first failure."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder
    for name in list(sys.modules):
        # The fault is in the copy, from which these are imported again
        if name.split(".")[0] in ("tests", "mismatch_cli"):
            del sys.modules[name]
    sys.path.insert(0, folder)
    quiet = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", "300", "-m", "not slow"]
    return pytest.main([*quiet, *(f"{folder}/{test}" for test in tests)])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
