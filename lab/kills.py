"""Runs of `probe` and `train` that are killed at random moments, resumed, and compared with an
unbroken run.

    python -m lab.kills probe --folder /tmp/kills --kills 50 [--seed 0] [--minutes 10]
    python -m lab.kills train --folder /tmp/kills --kills 50
    python -m lab.kills table --folder /tmp/kills
    python -m lab.kills folders --folder /tmp/kills --kills 60   # two at once, and more: see folders.py
    python -m lab.kills operations --folder /tmp/kills [--only import] [--step 3]   # see nothing_lost.py

Real processes, real vLLM. A moment is a share of the CPU time of an unbroken run, uniform from its
start to its end, so that it hits the same work on a busy machine. The signal is a SIGKILL to the
whole process group, one to only the main process as from the kernel's out-of-memory killer, a
Ctrl-C, or a SIGTERM. A resumed run may be killed again. Every kill is a line of FOLDER/kills.jsonl;
calling it again continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.broken import differences, half_files, left_over, look, phase

COMMANDS = {
    "probe": (
        "probe --eager --num-prompts 16 --samples-per-prompt 64 --max-tokens 16 "
        "--noise-responses 20 --threads 1"
    ),
    "train": (
        "train --steps 5 --prompts-per-step 8 --samples-per-prompt 4 --max-tokens 96 --threads 1 "
        "--num-problems 8 --eval-samples 2 --eval-every 3 --checkpoint-every 1 --trace-every 2 "
        "--report-every 10"
    ),
}
SIGNALS = {"SIGKILL, group": 60, "SIGKILL, main process": 15, "Ctrl-C": 15, "SIGTERM": 10}
_MARK = "MISMATCH_KILLS"
_PATIENCE = 300.0  # seconds for a run to react to a signal that lets it clean up
_ORPHANS_MAY_LIVE = 60.0  # seconds, to finish a drawing at the lowest priority on a busy machine
_DRAW_EVERY = 5  # kills: figures cost more than the rest of a report
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass
class Running:
    """One command-line process, with everything it started."""

    command: str
    folder: Path
    resume: bool
    said: Path
    mark: str = field(default_factory=lambda: f"{time.time_ns()}")

    def __post_init__(self) -> None:
        arguments = [*COMMANDS[self.command].split(), "--output", str(self.folder)]
        if self.resume:
            arguments.append("--resume")
        temporary = self.said.parent / "tmp"
        temporary.mkdir(exist_ok=True)
        environment = os.environ | {_MARK: self.mark, "TMPDIR": str(temporary)}
        self._said = open(self.said, "wb")  # noqa: SIM115 - open as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mismatch_cli", *arguments],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            start_new_session=True,
        )

    def cpu(self) -> float:
        """CPU seconds of the process and its descendants, including ended ones."""
        return sum(_cpu_of(pid) for pid in _with_descendants(self.process.pid))

    def all(self) -> list[int]:
        """Every process that inherited this one's environment, wherever it is in the tree."""
        return [
            int(path.name) for path in Path("/proc").glob("[0-9]*") if _is_marked(path, self.mark)
        ]

    def until(self, moment: float) -> bool:
        """Wait until this many CPU seconds are spent; returns whether it still runs."""
        while self.process.poll() is None:
            if self.cpu() >= moment:
                return True
            time.sleep(0.005)
        return False

    def send(self, what: str) -> None:
        if what == "SIGKILL, group":
            os.killpg(self.process.pid, signal.SIGKILL)
        elif what == "Ctrl-C":
            # A terminal sends it to the whole group
            os.killpg(self.process.pid, signal.SIGINT)
        else:
            self.process.send_signal(signal.SIGTERM if what == "SIGTERM" else signal.SIGKILL)

    def orphans(self) -> float | None:
        """Seconds until the last process was gone; None if one had to be killed."""
        began = time.monotonic()
        alive = self.all()
        while alive:
            if time.monotonic() - began > _ORPHANS_MAY_LIVE:
                for pid in alive:
                    os.kill(pid, signal.SIGKILL)
                return None
            time.sleep(0.02)
            alive = self.all()
        return time.monotonic() - began

    def stderr(self) -> str:
        return self.said.read_text(errors="replace")


def _with_descendants(pid: int) -> list[int]:
    pids, todo = [], [pid]
    while todo:
        pids.append(todo.pop())
        for children in Path(f"/proc/{pids[-1]}/task").glob("*/children"):
            try:
                todo += map(int, children.read_text().split())
            except OSError:
                continue
    return pids


def _cpu_of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICK


def _is_marked(process: Path, mark: str) -> bool:
    try:
        return f"{_MARK}={mark}".encode() in (process / "environ").read_bytes()
    except OSError:
        return False


def unbroken(command: str, folder: Path) -> tuple[Path, float]:
    """The run without kills, made once, and its CPU seconds."""
    run, note = folder / f"unbroken-{command}", folder / f"unbroken-{command}.json"
    if not note.is_file():
        shutil.rmtree(run, ignore_errors=True)
        running = Running(command, run, False, folder / f"unbroken-{command}.log")
        spent = 0.0
        while running.process.poll() is None:
            spent = max(spent, running.cpu())
            time.sleep(0.02)
        assert running.process.returncode == 0, running.stderr()
        note.write_text(json.dumps({"cpu": spent, "settings": COMMANDS[command]}))
    about = json.loads(note.read_text())
    assert about["settings"] == COMMANDS[command], (
        f"{note} is of other settings: choose another --folder"
    )
    return run, about["cpu"]


def can_resume(command: str, run: Path) -> bool:
    """Whether a person would resume: `probe` says itself that there is nothing to resume yet."""
    return (run / "trace" / "manifest.json").is_file() if command == "probe" else run.exists()


def one_process(
    command: str, folder: Path, run: Path, chance: random.Random, whole: float
) -> dict[str, Any]:
    """Start or resume a run, and kill it at a moment unless it ends before."""
    share = chance.random()
    what = chance.choices(list(SIGNALS), weights=list(SIGNALS.values()))[0]
    resumed = can_resume(command, run)
    running = Running(command, run, resumed, folder / "said.log")
    line: dict[str, Any] = {"moment": round(share, 4), "signal": what, "resumed": resumed}
    wrong = line["wrong"] = []
    killed = running.until(share * whole)
    if killed:
        line |= {"cpu": round(running.cpu(), 2), "phase": phase(command, run, running.stderr())}
        running.send(what)
    try:
        code = running.process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        wrong.append(f"hangs after {what}")
        os.killpg(running.process.pid, signal.SIGKILL)
        code = running.process.wait()
    line |= {"killed": killed, "code": code, "orphans_gone_after": running.orphans()}
    wrong += _wrong_end(line, running.stderr())
    return line


def _wrong_end(line: dict[str, Any], said: str) -> Iterator[str]:
    if line["code"] not in _expected_codes(line):
        yield f"exit code {line['code']}: {said[-500:]}"
    if "Traceback" in said or "This is a bug" in said:
        yield f"traceback: {said[-1500:]}"
    if line["orphans_gone_after"] is None:
        yield "an orphan survived"


def _expected_codes(line: dict[str, Any]) -> tuple[int, ...]:
    if not line["killed"]:
        return (0,)
    codes: tuple[int, ...] = {"SIGTERM": (-15, 0), "Ctrl-C": (130, 0)}.get(line["signal"], (-9, 0))
    # Everything is written; a shell shows a death by Ctrl-C as 130 too
    if line["phase"] == "exit":
        codes = (*codes, -signal.SIGINT)
    return codes


def after_a_kill(run: Path, folder: Path, *, draw: bool) -> dict[str, Any]:
    """What the broken folder contains, and what commands that read it say."""
    looked = look(run, folder / "scratch", draw=draw)
    shutil.rmtree(folder / "scratch", ignore_errors=True)
    return looked | {"wrong": looked["wrong"] + half_files(run)}


def go_on(
    command: str, folder: Path, seed: int, kills: int, minutes: float, say: Callable[[str], None]
) -> None:
    """Kill, resume and compare until there are enough kills and the last run is complete."""
    until = time.monotonic() + 60 * minutes
    whole_run, whole = unbroken(command, folder)
    record = folder / "kills.jsonl"
    while time.monotonic() < until:
        lines, done, number, begun = _progress(folder, command, seed)
        if done >= kills and not begun:
            return
        run = folder / f"{command}-{seed}-{number}"
        if not begun:
            shutil.rmtree(run, ignore_errors=True)
        chance = random.Random(f"{seed}/{command}/{lines}")
        line: dict[str, Any] = {"command": command, "seed": seed, "run": number}
        line |= one_process(command, folder, run, chance, whole if done < kills else 1e9)
        if line["code"] == 0:
            line["wrong"] += _wrong_result(run, whole_run)
            if not line["wrong"]:
                shutil.rmtree(run)
        elif run.exists():
            looked = after_a_kill(run, folder, draw=lines % _DRAW_EVERY == 0)
            line |= looked | {"wrong": line["wrong"] + looked["wrong"]}
        with open(record, "a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        say(f"{done + line['killed']}/{kills} {json.dumps(line)}")


def _wrong_result(run: Path, whole_run: Path) -> list[str]:
    differing = [f"differs: {name}" for name in differences(run, whole_run)]
    return differing + [f"left over: {name}" for name in left_over(run)]


def _progress(folder: Path, command: str, seed: int) -> tuple[int, int, int, bool]:
    """Processes so far, kills, runs that came to their end, and whether another has begun."""
    lines = done = number = 0
    begun = False
    for line in read(folder):
        if line["command"] == command and line["seed"] == seed:
            lines += 1
            done += line["killed"]
            # A kill may come too late: then it counts, and the run has ended
            begun = line["killed"] and line["code"] != 0
            number += not begun
    return lines, done, number, begun


def read(folder: Path) -> list[dict[str, Any]]:
    path = folder / "kills.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def table(folder: Path) -> str:
    """Counts by command, phase and signal, and everything wrong."""
    lines = read(folder)
    out: list[str] = []
    for command in COMMANDS:
        own = [line for line in lines if line["command"] == command]
        out += _table_of(command, own)
        for line in own:
            out += [f"  WRONG run {line['run']}: {wrong}" for wrong in line["wrong"]]
    return "\n".join(out)


def _table_of(command: str, lines: list[dict[str, Any]]) -> Iterator[str]:
    killed = [line for line in lines if line["killed"]]
    ended = [line for line in lines if line["code"] == 0]
    same = sum(not line["wrong"] for line in ended)
    yield (
        f"{command}: {len(killed)} kills, {len(ended)} runs to the end, {same} of them equal "
        "to the unbroken"
    )
    for what in ("phase", "signal"):
        counts = Counter(line[what] for line in killed)
        yield f"  by {what}: {' · '.join(f'{name} {n}' for name, n in counts.most_common())}"
    for reader in ("report", "diagnose"):
        codes = Counter(line[reader] for line in killed if reader in line)
        ends = ", ".join(f"exit {code}: {n}" for code, n in codes.items())
        yield f"  {reader} on the broken folder: {ends}"
    slowest = max((line["orphans_gone_after"] or 0 for line in killed), default=0)
    yield f"  last process gone after at most {slowest:.1f} s"


def main() -> None:
    options = command_line().parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.command == "folders":
        from lab.folders import all_classes

        print(all_classes(options.folder, options.kills, options.seed))
    elif options.command == "operations":
        from lab.nothing_lost import all_operations

        print(all_operations(options.folder, say, options.only, options.step))
    else:
        if options.command != "table":
            go_on(
                options.command, options.folder, options.seed, options.kills, options.minutes, say
            )
        print(table(options.folder))


def say(line: str) -> None:
    print(line, flush=True)


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=[*COMMANDS, "table", "folders", "operations"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=10, help="start no other process after this time"
    )
    parser.add_argument("--only", default="", help="operations: only cases whose names begin so")
    parser.add_argument(
        "--step", type=int, default=1, help="operations: a fault at every so many of them"
    )
    return parser


if __name__ == "__main__":
    main()
