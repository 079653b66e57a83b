"""Runs that differ in some settings: each has its own folder and process, and one runs per
device at a time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mismatch_cli.base.child_python import command
from mismatch_cli.base.configuration import WRITTEN, without_variables
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.extras import require
from mismatch_cli.base.text import visible
from mismatch_cli.processes.workers.on_ray import connected
from mismatch_cli.trace.drafts import NEW, RUN
from mismatch_cli.trace.manifest import FILE_NAME
from mismatch_cli.trace.work import begun_beside

RAY = "ray"
_DEVICES = "CUDA_VISIBLE_DEVICES"
_PATIENCE = 20  # seconds that an interrupted run has to save its state


@dataclass(frozen=True)
class Member:
    """One of the runs: its folder, and its arguments to `mismatch-cli`."""

    folder: Path
    words: tuple[str, ...]
    typed_in: Path  # the working folder that relative names start from, on other machines too
    note: str = f"trace/{FILE_NAME}"  # exists once a run has begun
    result: str = "summary.json"  # exists once it has ended
    fresh: tuple[str, ...] = ("--force",)  # the flags that begin one
    replaces: bool = False  # an older run that the folder may have

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def finished(self) -> bool:
        return (self.folder / self.result).is_file() and begun_beside(self.folder) is None

    @property
    def command(self) -> list[str]:
        """The command line: begins the run, or resumes it."""
        beside = (self.folder / RUN / NEW / self.note).is_file()
        begun = beside or (not self.replaces and (self.folder / self.note).is_file())
        how = ("--resume",) if begun else self.fresh
        return command("mismatch_cli", *self.words, "--output", str(self.folder), "--quiet", *how)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `fault` is its last line, empty if all went well."""

    member: Member
    fault: str = ""


def visible_devices() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; none without GPUs."""
    if (named := os.environ.get(_DEVICES)) is not None:
        return [device for device in named.split(",") if device.strip() not in ("", "-1")]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [
        str(number) for number, line in enumerate(listed.splitlines()) if line.startswith("GPU ")
    ]


def run_members(
    members: Sequence[Member], devices: Sequence[str], tell: Callable[[Outcome], None]
) -> list[Outcome]:
    """Make each run on its own device, the next as soon as one is free; without devices, one after
    the other.

    An exception here, including Ctrl-C, interrupts the runs in progress and lets them save their
    state.
    """
    free: SimpleQueue[str | None] = SimpleQueue()
    for device in devices or (None,):
        free.put(device)
    running: set[subprocess.Popen[str]] = set()
    stopped = threading.Event()

    def make(member: Member) -> Outcome:
        device = free.get()
        try:
            outcome = (
                Outcome(member, "it was not started")
                if stopped.is_set()
                else _made(member, device, running)
            )
            tell(outcome)
            return outcome
        finally:
            free.put(device)

    with ThreadPoolExecutor(len(devices) or 1) as threads, _ended(running, stopped):
        return list(threads.map(make, members))


@contextmanager
def _ended(running: set[subprocess.Popen[str]], stopped: threading.Event) -> Iterator[None]:
    try:
        yield
    except BaseException:
        stopped.set()
        for process in list(running):
            process.send_signal(signal.SIGINT)
        for process in list(running):
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
        raise


def _made(member: Member, device: str | None, running: set[subprocess.Popen[str]]) -> Outcome:
    environment = without_variables(os.environ) | {WRITTEN: "1"}
    if device is not None:
        environment[_DEVICES] = device
    process = subprocess.Popen(
        member.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
        cwd=member.typed_in,
    )
    running.add(process)
    try:
        _, said = process.communicate()
    finally:
        running.discard(process)
    return Outcome(member, _fault(process.returncode, said))


def _fault(code: int, said: str) -> str:
    if code == 0:
        return ""
    lines = [line for line in said.splitlines() if line.strip()]
    return visible(lines[-1].removeprefix("mismatch-cli: ")) if lines else f"it ended with {code}"


def run_on_ray(
    members: Sequence[Member], address: str, tell: Callable[[Outcome], None]
) -> list[Outcome]:
    """The same as tasks of a Ray cluster, one GPU each if it has any; another node takes over from
    one that dies.

    All nodes must see the folder; a `MismatchError` if this machine does not see the result.
    """
    require(RAY, f"--devices {address}")
    with connected(address) as ray:
        needs: dict[str, Any] = (
            {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}
        )
        task: Any = ray.remote(**needs, max_retries=3)(_made_there)
        waiting = {task.remote(member): member for member in members}
        outcomes: dict[str, Outcome] = {}
        while waiting:
            (done, *_), _ = ray.wait(list(waiting), num_returns=1)
            member = waiting.pop(done)
            outcome = Outcome(member, ray.get(done))
            if not outcome.fault and not member.finished:
                raise MismatchError(
                    f"{member.folder} is not visible on this machine. Name an --output on a disk "
                    "that all nodes share."
                )
            outcomes[member.name] = outcome
            tell(outcome)
    return [outcomes[member.name] for member in members]


def _made_there(member: Member) -> str:
    return _made(member, None, set()).fault
