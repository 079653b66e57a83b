"""The runs behind docs/evidence.md, and the page made of them.

    python -m lab.evidence cost --folder /tmp/runs     what a step of each part costs, before anything runs
    python -m lab.evidence run --folder /tmp/runs      the runs that are not kept yet, one after another
    python -m lab.evidence page                        the page's tables and figures, from the kept runs

--only PART … chooses parts (default: tokens variants solutions), --seeds N … other seeds.

A part is a set of runs:

    tokens      rare-tokens, 2, 16 and 32 updates a rollout × three algorithms × three seeds: 27 runs of 7 steps
    variants    rare-tokens, 16 updates, two more algorithms × three seeds: 6 runs
    solutions   rare-solutions, 16 updates, three algorithms × three seeds: 9 runs of 12 steps
    stability   preset collapse, five algorithms × three seeds: 15 runs of 20 steps
    real        .real-model with LoRA (see rare_words.py), 8 updates, two algorithms × two seeds: 4 runs of 8 steps
    full        rare-solutions, five algorithms × five numbers of updates × three rates × five seeds: 375 of 15 steps

Updates are minibatches × epochs: 2 = 2 × 1, 4 = 4 × 1, 8 = 4 × 2, 16 = 4 × 4, 32 = 4 × 8.

A run that ends is kept in lab/evidence/NAME (metrics.jsonl with six digits, config.toml with
paths inside the checkout) and is not run again; a run that was interrupted starts again. One process
at a time, vLLM, one thread, no pictures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "lab" / "evidence"
SEEDS = (21, 22, 23)  # the pilot had 1, 2 and 3, and the earlier runs of collapse 11, 12 and 13
FULL_SEEDS = (*SEEDS, 24, 25)
REAL_SEEDS = SEEDS[:2]
THREE = ("grpo-clip-higher", "dppo-binary-tv", "pg-is")
# δ and weight as those of binary TV, so that only the mask differs: by default δ is 0.2 and r is capped at 5
VARIANTS = ("dppo-topk-tv:max_tv=0.15,cap=1e6", "relax-both")
# Minibatches and epochs by the number of updates a rollout
UPDATES = {2: (2, 1), 4: (4, 1), 8: (4, 2), 16: (4, 4), 32: (4, 8)}
FIRST = ("tokens", "variants", "solutions")
_DIGITS = 6
# A short run to learn what a step costs; its seed is in no part
_SMOKE_STEPS, _SMOKE_SEED = 3, 4
_COMMON = (
    *("--engine", "vllm", "--threads", "1", "--no-plots", "--report-every", "0"),
    *("--trace-every", "0", "--quiet"),
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One training run of the design."""

    part: str
    updates: int
    algorithm: str
    seed: int
    flags: tuple[str, ...]
    rate: str = ""  # only where a part has several

    @property
    def name(self) -> str:
        """Its folder."""
        algorithm = self.algorithm.partition(":")[0]
        words = [self.part, f"{self.updates}-updates", self.rate, algorithm, f"{self.seed}"]
        return "-".join(filter(None, words))

    @property
    def command(self) -> list[str]:
        """The arguments of `train`."""
        minibatches, epochs = UPDATES[self.updates]
        shape = ("--minibatches", str(minibatches), "--epochs", str(epochs))
        return [*self.flags, "-a", self.algorithm, "--seed", str(self.seed), *shape, *_COMMON]


def design(part: str, seeds: Sequence[int] = ()) -> list[Run]:
    """The runs of a part, seed by seed, so that the first seed is complete first."""
    return list(_PARTS[part](seeds))


def _tokens(seeds: Sequence[int]) -> Iterator[Run]:
    for seed, updates, algorithm in product(seeds or SEEDS, (16, 2, 32), THREE):
        yield Run("tokens", updates, algorithm, seed, ("--preset", "rare-tokens"))


def _variants(seeds: Sequence[int]) -> Iterator[Run]:
    for seed, algorithm in product(seeds or SEEDS, VARIANTS):
        yield Run("variants", 16, algorithm, seed, ("--preset", "rare-tokens"))


def _solutions(seeds: Sequence[int]) -> Iterator[Run]:
    for seed, algorithm in product(seeds or SEEDS, THREE):
        yield Run("solutions", 16, algorithm, seed, ("--preset", "rare-solutions"))


def _stability(seeds: Sequence[int]) -> Iterator[Run]:
    flags = ("--preset", "collapse", "--eval-samples", "1")
    for seed, algorithm in product(seeds or SEEDS, (*THREE, *VARIANTS)):
        yield Run("stability", 16, algorithm, seed, flags)


def _full(seeds: Sequence[int]) -> Iterator[Run]:
    rates, algorithms = ("1e-4", "3e-4", "6e-4"), (*THREE, *VARIANTS)
    for seed, rate, updates, algorithm in product(seeds or FULL_SEEDS, rates, UPDATES, algorithms):
        flags = ("--preset", "rare-solutions", "--steps", "15", "--learning-rate", rate)
        yield Run("full", updates, algorithm, seed, flags, rate)


def _real(seeds: Sequence[int]) -> Iterator[Run]:
    # In float32 the engine samples seven times faster on a CPU without bfloat16
    flags = shlex.split(
        "--preset rare-tokens --model .real-model --dataset lab/evidence/rare_words.jsonl "
        "--reward lab/rare_words.py:rare_word --prompt-template raw --max-tokens 3 --steps 8 "
        "--prompts-per-step 4 --samples-per-prompt 32 --learning-rate 1e-3 "
        "--lora --lora-rank 8 --lora-targets q_proj,v_proj --rollout-dtype float32"
    )
    for seed, algorithm in product(seeds or REAL_SEEDS, THREE[:2]):
        yield Run("real", 8, algorithm, seed, tuple(flags))


_PARTS = {
    "tokens": _tokens,
    "variants": _variants,
    "solutions": _solutions,
    "stability": _stability,
    "real": _real,
    "full": _full,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["cost", "run", "page"])
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=list(FIRST), metavar="PART")
    parser.add_argument("--seeds", type=int, nargs="+", default=[])
    parser.add_argument("--folder", type=Path, help="for runs while they last")
    options = parser.parse_args()
    if options.what == "page":
        # Its packages are needed for the page alone
        page = importlib.import_module("lab.evidence_page")
        page.write(page.Evidence(design, KEPT))
        return
    if options.folder is None:
        parser.error("name a --folder for the runs")
    runs: list[Run] = []
    for part in options.only:
        runs += design(part, options.seeds)
    for line in {"cost": _costs, "run": _all}[options.what](runs, options.folder):
        print(line, flush=True)


def _all(runs: Sequence[Run], folder: Path) -> Iterator[str]:
    """Do what is not kept yet; a line for each run."""
    for number, run in enumerate(runs, start=1):
        head = f"{number}/{len(runs)} {run.name}"
        if (KEPT / run.name).is_dir():
            yield f"{head}: kept"
            continue
        seconds = _train(run, folder / run.name)
        records = _keep(folder / run.name, run.name)
        shutil.rmtree(folder / run.name)
        rewards = " ".join(f"{record['reward']:.2f}" for record in records if "reward" in record)
        yield f"{head}: {seconds:.0f} s, reward {rewards}"


def _costs(runs: Sequence[Run], folder: Path) -> Iterator[str]:
    """What a step of each part costs, from a short run of its first algorithm."""
    for part in dict.fromkeys(run.part for run in runs):
        own = [run for run in runs if run.part == part]
        cpu = os.times()
        short = replace(own[0], seed=_SMOKE_SEED)
        wall = _train(short, folder / "cost", "--steps", str(_SMOKE_STEPS))
        later = os.times()
        spent = later.children_user + later.children_system
        spent -= cpu.children_user + cpu.children_system
        lines = (folder / "cost" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [sum(json.loads(line)["seconds"].values()) for line in lines]
        shutil.rmtree(folder / "cost")
        shown = ", ".join(f"{seconds:.1f}" for seconds in steps)
        yield (
            f"{part}: steps of {shown} s (the last with its evaluation), {wall:.0f} s and "
            f"{spent:.0f} CPU s with start-up; {len(own)} runs"
        )


def _train(run: Run, folder: Path, *flags: str) -> float:
    """Train from the start in this folder; the wall time in seconds."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "mismatch_cli", "train", *run.command, *flags]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--output", str(folder.resolve())],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{run.name}: {done.stderr}")
    return time.monotonic() - began


def _keep(folder: Path, name: str) -> list[dict[str, Any]]:
    """Copy what the page needs; the folder appears when it is complete."""
    settings = (folder / "config.toml").read_text(encoding="utf-8")
    begun = KEPT / f".{name}"
    begun.mkdir(parents=True, exist_ok=True)
    records = []
    with (begun / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            record = _rounded(json.loads(line))
            records.append(record)
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
    inside = settings.replace(f"{ROOT}/", "")
    (begun / "config.toml").write_text(inside, encoding="utf-8")
    # A rename is atomic, so a folder of this name is complete
    begun.rename(KEPT / name)
    return records


def _rounded(value: Any) -> Any:
    """The same JSON with numbers of six significant digits."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
