"""Training on several ranks: seconds and memory compared with one rank, and ranks killed at random
moments.

    python -m lab.ranks race --folder /tmp/ranks [--ranks 1 2] [--steps 6]
    python -m lab.ranks kills --folder /tmp/ranks --kills 20 [--seed 0]
    python -m lab.ranks learn --folder /tmp/ranks     # the default command on two ranks, to its end
    python -m lab.ranks every --folder /tmp/ranks     # three steps by every algorithm, on one rank and on two

Real processes, real vLLM unless `--engine hf`. A kill is a SIGKILL of a random rank at a random
moment, under `--max-restarts`; at the end every step must be in metrics.jsonl once, in order, and
no process may be left. Every result is a line of FOLDER/ranks.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CLI = [sys.executable, "-m", "mismatch_cli"]
# A run that outlives all kills
_LONG = (
    "--steps 100000 --checkpoint-every 1 --prompts-per-step 8 --eval-samples 1 --num-problems 16 "
    "--no-plots"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("race", "kills", "learn", "every", "trained"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="vllm")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    jobs = {"race": race, "kills": kills, "learn": learn, "every": every, "trained": trained}
    jobs[arguments.what](arguments)


def race(arguments: argparse.Namespace) -> None:
    """The same steps on each number of ranks: seconds per step by phase, tokens per second,
    memory of each rank.
    """
    for ranks in arguments.ranks:
        folder = arguments.folder / f"race-{ranks}"
        shutil.rmtree(folder, ignore_errors=True)
        flags = ["--steps", str(arguments.steps), "--eval-samples", "1"]
        process = _start(folder, ranks, arguments.engine, flags)
        peak: dict[int, float] = {}
        while process.poll() is None:
            for rank, child in (_ranks(process.pid) or {0: process.pid}).items():
                peak[rank] = max(peak.get(rank, 0.0), _gigabytes(child))
            time.sleep(0.1)
        # The first step warms up
        lines = _lines(folder)[1:]
        seconds = _seconds_of_phases([line["seconds"] for line in lines])
        step = sum(seconds.values())
        tokens = statistics.mean(line["length"] for line in lines) * 512
        result = {
            "ranks": ranks,
            "seconds": seconds,
            "step": step,
            "tokens_s": tokens / step,
            "gigabytes": peak,
        }
        _note(arguments.folder, "race", result)


def _seconds_of_phases(steps: list[dict[str, float]]) -> dict[str, float]:
    """The median of each phase over the steps; an evaluation is not part of a step."""
    phases: set[str] = set().union(*steps) - {"evaluate"}
    medians = {}
    for phase in sorted(phases):
        medians[phase] = statistics.median(step.get(phase, 0.0) for step in steps)
    return medians


def kills(arguments: argparse.Namespace) -> None:
    """Kill the ranks of one long run one after the other."""
    folder, chance = arguments.folder / "kills", random.Random(arguments.seed)
    shutil.rmtree(folder, ignore_errors=True)
    restarts = ["--max-restarts", str(arguments.kills)]
    process = _start(folder, 2, arguments.engine, [*restarts, *_LONG.split()])
    dead: set[int] = set()
    for number in range(arguments.kills):
        alive = _restarted(process, dead, number)
        began = time.monotonic()
        time.sleep(chance.uniform(0, 40))
        rank = chance.choice([0, 1])
        if process.poll() is not None:
            raise SystemExit(f"It ended with {process.returncode} after {number} kills.")
        dead |= set(alive.values())
        os.kill(alive[rank], signal.SIGKILL)
        result = {"rank": rank, "after": time.monotonic() - began, "steps": len(_lines(folder))}
        _note(arguments.folder, "kill", result)
    recorded = len(_lines(folder))
    while len(_lines(folder)) <= recorded + 1:
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    code = process.wait()
    steps = [line["step"] for line in _lines(folder)]
    whole = steps == list(range(1, len(steps) + 1))
    result = {"code": code, "steps": len(steps), "each_once": whole, "left": _left(dead)}
    _note(arguments.folder, "kills", result)


def _restarted(process: subprocess.Popen[bytes], dead: set[int], number: int) -> dict[int, int]:
    """Both ranks of the attempt after this number of kills."""
    while True:
        ranks = _ranks(process.pid)
        # The ranks of an ended attempt may still be listed
        if len(ranks) == 2 and dead.isdisjoint(ranks.values()):
            return ranks
        if process.poll() is not None:
            raise SystemExit(f"It ended with {process.returncode} after {number} kills.")
        time.sleep(0.05)


def learn(arguments: argparse.Namespace) -> None:
    """The final reward of the default command on two ranks."""
    folder = arguments.folder / "learn"
    shutil.rmtree(folder, ignore_errors=True)
    code = _start(folder, 2, arguments.engine, []).wait()
    rewards = [line["reward"] for line in _lines(folder) if line["step"]]
    last_ten = statistics.mean(rewards[-10:])
    _note(arguments.folder, "learn", {"code": code, "steps": len(rewards), "last_ten": last_ten})


def every(arguments: argparse.Namespace) -> None:
    """Three steps of two minibatches by every algorithm of the table, with a reward that varies
    in most groups.
    """
    from mismatch_cli.rules.algorithms.table import TABLE

    reward = arguments.folder / "even.py"
    reward.write_text(
        "def even(response):\n    return sum(ord(c) % 2 for c in response) / (1 + len(response))\n"
    )
    for ranks in arguments.ranks:
        folder = arguments.folder / f"every-{ranks}"
        shutil.rmtree(folder, ignore_errors=True)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        began = time.monotonic()
        job = [__file__, "trained", "--folder", str(folder)]
        code = subprocess.run([*launcher, *job], check=False).returncode
        whole, still = 0, []
        for name in TABLE:
            norms = [line["grad_norm"] for line in _lines(folder / name) if line["step"]]
            whole += len(norms) == 3
            if not any(norms):
                still.append(name)
        result = {
            "ranks": ranks,
            "code": code,
            "algorithms": len(TABLE),
            "whole": whole,
            "still": still,
            "seconds": time.monotonic() - began,
        }
        _note(arguments.folder, "every", result)


def trained(arguments: argparse.Namespace) -> None:
    """What each rank of `every` does."""
    import torch

    from mismatch_cli.processes.ranks.joined import joined
    from mismatch_cli.rules.algorithms.table import TABLE
    from mismatch_cli.train.loop import train
    from mismatch_cli.train.train_config import load_config

    torch.set_num_threads(1)
    short = {
        "engine": "hf", "rollout_dtype": "float32", "threads": 1, "steps": 3, "prompts_per_step": 4,
        "minibatches": 2,
        "samples_per_prompt": 4, "num_problems": 4, "max_tokens": 24, "eval_every": 0,
        "eval_samples": 1,
        "reward": f"{arguments.folder.parent / 'even.py'}:even",
    }  # fmt: skip
    with joined("") as world:
        for name in TABLE:
            config = load_config("miniature", short | {"algorithm": name})
            train(config, arguments.folder / name, lambda _: None, world=world)


def _start(folder: Path, ranks: int, engine: str, more: list[str]) -> subprocess.Popen[bytes]:
    arguments = ["train", "--nproc", str(ranks), "--engine", engine, "--eval-every", "0", "--quiet"]
    with open(folder.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(
            [*_CLI, *arguments, *more, "--output", str(folder)], stdout=log, stderr=log
        )


def _ranks(launcher: int) -> dict[int, int]:
    ranks: dict[int, int] = {}
    try:
        for thread in Path(f"/proc/{launcher}/task").iterdir():
            for child in (thread / "children").read_text().split():
                for setting in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                    if setting.startswith(b"RANK="):
                        ranks[int(setting.removeprefix(b"RANK="))] = int(child)
    except OSError:  # one has just ended
        return {}
    return ranks


def _gigabytes(process: int) -> float:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE / 1e9
    except (OSError, IndexError):
        return 0.0


def _left(processes: set[int]) -> int:
    return sum(
        Path(f"/proc/{process}/cmdline").exists() and _gigabytes(process) > 0
        for process in processes
    )


def _lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _note(folder: Path, what: str, result: dict[str, Any]) -> None:
    line = json.dumps({"what": what, **result})
    print(line, flush=True)
    with open(folder / "ranks.jsonl", "a") as lines:
        lines.write(line + "\n")


if __name__ == "__main__":
    main()
