"""Runs that differ in some settings: each has a folder and a process, and as many go at once as there are devices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mismatch_cli.configuration import without_variables
from mismatch_cli.errors import MismatchError
from mismatch_cli.extras import require
from mismatch_cli.text import visible
from mismatch_cli.trace.manifest import FILE_NAME
from mismatch_cli.workers.on_ray import connected

RAY = "ray"
_DEVICES = "CUDA_VISIBLE_DEVICES"
_PATIENCE = 20  # seconds in which a run that is interrupted may write down where it is


@dataclass(frozen=True)
class Member:
    """One of the runs: its folder, and the words after `mismatch-cli` that make it."""

    folder: Path
    words: tuple[str, ...]
    typed_in: Path  # the working folder, which relative names start from on other machines too
    note: str = f"trace/{FILE_NAME}"  # the file by which a run that was begun is known
    result: str = "summary.json"  # and one that has ended
    anew: tuple[str, ...] = ("--force",)  # how one is begun

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def finished(self) -> bool:
        return (self.folder / self.result).is_file()

    @property
    def command(self) -> list[str]:
        """What is typed: what was begun goes on."""
        how = ("--resume",) if (self.folder / self.note).is_file() else self.anew
        return [sys.executable, "-m", "mismatch_cli", *self.words, "--output", str(self.folder), "--quiet", *how]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `fault` is its last line, empty where all went well."""

    member: Member
    fault: str = ""


def visible_devices() -> list[str]:
    """The GPUs that this process may use, by what CUDA_VISIBLE_DEVICES calls them; none without GPUs."""
    if (named := os.environ.get(_DEVICES)) is not None:
        return [device for device in named.split(",") if device.strip() not in ("", "-1")]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(number) for number, line in enumerate(listed.splitlines()) if line.startswith("GPU ")]


def run_members(members: Sequence[Member], devices: Sequence[str], tell: Callable[[Outcome], None]) -> list[Outcome]:
    """Make each run on a device of its own, the next one where a device is free; without devices one after the other.

    An exception here, Ctrl-C among them, interrupts those that are at work and lets them note where they are.
    """
    free: SimpleQueue[str | None] = SimpleQueue()
    for device in devices or (None,):
        free.put(device)
    running: set[subprocess.Popen[str]] = set()
    stopped = threading.Event()

    def make(member: Member) -> Outcome:
        device = free.get()
        try:
            outcome = Outcome(member, "it was not begun") if stopped.is_set() else _made(member, device, running)
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
    environment = without_variables(os.environ) | ({_DEVICES: device} if device is not None else {})
    process = subprocess.Popen(
        member.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        errors="replace", env=environment, start_new_session=True, cwd=member.typed_in,
    )  # fmt: skip
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


def run_on_ray(members: Sequence[Member], address: str, tell: Callable[[Outcome], None]) -> list[Outcome]:
    """The same as tasks of a Ray cluster, a GPU each where it has any; a node that dies is replaced by another one.

    All nodes have to see the folder; a `MismatchError` where this machine does not see what was made.
    """
    require(RAY, f"--devices {address}")
    with connected(address) as ray:
        needs: dict[str, Any] = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}
        task: Any = ray.remote(**needs, max_retries=3)(_made_there)
        waiting = {task.remote(member): member for member in members}
        outcomes: dict[str, Outcome] = {}
        while waiting:
            (done, *_), _ = ray.wait(list(waiting), num_returns=1)
            member = waiting.pop(done)
            outcome = Outcome(member, ray.get(done))
            if not outcome.fault and not member.finished:
                raise MismatchError(f"{member.folder} is not seen here. Name an --output that all nodes see.")
            outcomes[member.name] = outcome
            tell(outcome)
    return [outcomes[member.name] for member in members]


def _made_there(member: Member) -> str:
    return _made(member, None, set()).fault
