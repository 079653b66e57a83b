"""The training loop as users run it, with real vLLM: `python -m lab.training sanity`, or
another of these:

    sanity    the default command on three seeds: wall time with start-up, and the accuracy of the last evaluation
    phases    the time of a step by phase; all but sampling, grading, model passes, optimiser and sync at most 5 %
    collapse  one setting, several algorithms and seeds: reward, mismatch and bad updates, with their spread over seeds
    game      the game of several turns in docs/environments.md on three seeds, as that page trains it

Finished runs stay in --folder and are not repeated. Flags after `--` go to `mismatch-cli train`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.docs.pages import DOCS, File, steps

SANITY_ACCURACY, SANITY_MINUTES = 0.95, 15
OVERHEAD = 0.05  # of a step: everything but the work of a model or its engine
# The update: model passes and optimiser
WORK = ("sample", "grade", "recompute", "sync", "update", "evaluate")
ALGORITHMS = (
    "reinforce",
    "pg-is",
    "pg-tis",
    "grpo-clip-higher",
    "dppo-binary-tv",
    "dppo-binary-kl",
)
LAST = 10  # steps of a mean
GAME = shlex.split(
    "--episodes 256 --eval-episodes 64 --turn-tokens 8 --max-tokens 64 --steps 20 --eval-every 10"
)

Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["sanity", "phases", "collapse", "game"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    own, _, flags = " ".join(map(shlex.quote, sys.argv[1:])).partition(" -- ")
    options = parser.parse_args(shlex.split(own), argparse.Namespace(flags=shlex.split(flags)))
    lines = {"sanity": sanity, "phases": phases, "collapse": collapse, "game": game}[options.what](
        options
    )
    for line in lines:
        print(line, flush=True)


def sanity(options: argparse.Namespace) -> Iterator[str]:
    yield f"targets: {SANITY_MINUTES} minutes, accuracy {SANITY_ACCURACY}"
    yield f"{'seed':>4}{'minutes':>9}{'steps':>7}{'reward, last 10':>17}{'accuracy':>10}"
    for seed in options.seeds:
        records, minutes = run(
            options.folder / f"seed-{seed}", ["--seed", str(seed), *options.flags]
        )
        reward, accuracy = mean_of_last(records, "reward"), records[-1]["eval_accuracy"]
        yield f"{seed:>4}{minutes:>9.1f}{records[-1]['step']:>7}{reward:>17.3f}{accuracy:>10.3f}"


def phases(options: argparse.Namespace) -> Iterator[str]:
    records, _ = run(options.folder / "phases", ["--steps", "20", *options.flags])
    # The first one compiles and warms up
    steps = [record["seconds"] for record in records if "reward" in record][1:]
    by_phase: Counter[str] = Counter()
    for step in steps:
        by_phase.update(step)
    total = by_phase.total()
    for phase, seconds in sorted(by_phase.items()):
        yield f"{phase:<12}{seconds / len(steps):>8.3f} s a step{100 * seconds / total:>7.1f} %"
    rest = sum(seconds for phase, seconds in by_phase.items() if phase not in WORK)
    yield f"all but {', '.join(WORK)}: {100 * rest / total:.1f} % (target {100 * OVERHEAD:.0f} %)"


def collapse(options: argparse.Namespace) -> Iterator[str]:
    yield f"{'':<20}{'':>5}{'reward, mean of steps':>26}{'|π−μ| at equal weights':>25}"
    yield (
        f"{'algorithm':<20}{'seed':>5}{'first 5':>9}{'best 5':>8}{'last 10':>9}{'first 5':>16}{'last 10':>9}"
        f"{'bad of A<0':>12}"
    )
    ends: dict[str, list[float]] = {}
    for name in options.algorithms:
        for seed in options.seeds:
            flags = ["--algorithm", name, "--seed", str(seed), *options.flags]
            records, _ = run(options.folder / f"{name}-seed-{seed}", flags)
            trained = [record for record in records if "reward" in record]
            reward_N = np.array([record["reward"] for record in trained])
            ends.setdefault(name, []).append(float(reward_N[-LAST:].mean()))
            best = np.convolve(reward_N, np.full(5, 0.2), "valid").max()
            gap_N = [record["mismatch"].get("abs_dp_mean") or np.nan for record in trained]
            bad = np.nanmean([record.get("bad_over_negative") or 0.0 for record in records])
            yield (
                f"{name:<20}{seed:>5}{reward_N[:5].mean():>9.3f}{best:>8.3f}{ends[name][-1]:>9.3f}"
                f"{np.nanmean(gap_N[:5]):>16.5f}{np.nanmean(gap_N[-LAST:]):>9.5f}{bad:>12.5f}"
            )
    for name, rewards in sorted(ends.items(), key=lambda item: -np.mean(item[1])):
        yield (
            f"{name:<20} last 10: {np.mean(rewards):.3f}, seeds from {min(rewards):.3f} to "
            f"{max(rewards):.3f}"
        )


def game(options: argparse.Namespace) -> Iterator[str]:
    options.folder.mkdir(parents=True, exist_ok=True)
    environment = options.folder / "simon.py"
    for step in steps(DOCS / "environments.md"):
        if isinstance(step, File) and step.name == environment.name:
            environment.write_text(step.text, encoding="utf-8")
    flags = ["--environment", f"{environment}:Simon", *GAME, *options.flags]
    yield (
        f"{'seed':>4}{'minutes':>9}{'accuracy before':>17}{'at the end':>12}  reward of each "
        "step, turns of the last"
    )
    for seed in options.seeds:
        records, minutes = run(options.folder / f"game-{seed}", ["--seed", str(seed), *flags])
        rewards = " ".join(f"{record['reward']:.2f}" for record in records[1:])
        first, last = records[0]["eval_accuracy"], records[-1]
        yield (
            f"{seed:>4}{minutes:>9.1f}{first:>17.3f}{last['eval_accuracy']:>12.3f}  {rewards}  "
            f"{last['turns']:.2f}"
        )


def run(folder: Path, flags: Sequence[str]) -> tuple[list[Record], float]:
    """The metrics lines of a `train` run, and its wall time in minutes with start-up and report."""
    clock = folder / "minutes.txt"
    if not clock.is_file():
        command = [sys.executable, "-m", "mismatch_cli", "train"]
        command += ["--quiet", "--output", str(folder), *flags]
        # Remains of a broken run, whose time would be incomplete
        shutil.rmtree(folder, ignore_errors=True)
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        clock.write_text(str((time.monotonic() - began) / 60))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], float(clock.read_text())


def mean_of_last(records: Sequence[Record], name: str) -> float:
    return float(np.mean([record[name] for record in records[-LAST:]]))


if __name__ == "__main__":
    main()
