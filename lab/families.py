"""Model families: `python -m lab.families --folder F` runs the commands on a tiny random
model of each.

A row: the float32 control of `probe` with vLLM and Hugging Face (mean and largest |Δlog p|), the
same trace against a trainer that lacks the family's distinctive part, `diagnose`, and three steps
of `train`: all weights, LoRA, on two ranks. Refusals are printed below the table, word for word; if
float32 is refused, bfloat16 is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.families import FAMILIES, save_family
from tests.train.small_runs import reward_file
from tests.warm import Forked

ENGINES = ("vllm", "hf")
SAMPLED = (
    "--num-prompts 8 --samples-per-prompt 2 --max-tokens 48 --noise-responses 8 --no-plots "
    "--quiet --force"
)
STEPS = (
    "--preset miniature --steps 3 --prompts-per-step 4 --samples-per-prompt 4 --max-tokens 24 "
    "--num-problems 4 --eval-every 0 --checkpoint-every 3 --trace-every 0 --learning-rate 1e-3 "
    "--no-plots --quiet"
)
COLUMNS = (
    "family", "parameters", "probe vllm", "probe hf", "without its part", "diagnose", "train vllm",
    "train hf",
    "LoRA vllm", "LoRA hf", "recomputed layers", "two ranks",
)  # fmt: skip


class Refused(Exception):
    """The message of a command that refused."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="models and runs; finished runs are not repeated"
    )
    parser.add_argument("--only", default=",".join(FAMILIES), help="families, comma-separated")
    parser.add_argument(
        "--one-rank", action="store_true", help="leave out the runs on two ranks, the slowest"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    # This checkout in every child
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    for line in table(
        options.folder.resolve(), options.only.split(","), two_ranks=not options.one_rank
    ):
        print(line, flush=True)


def table(folder: Path, families: Sequence[str], *, two_ranks: bool) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
    refusals: list[str] = []
    reward = reward_file(folder)
    for name in families:
        family = Measured(folder, name, reward)
        cells = family.cells(two_ranks=two_ranks)
        yield f"| {' | '.join(cells)} |"
        refusals += family.refused
    yield from ("", *dict.fromkeys(refusals))


class Measured:
    """The commands for one family, and their results."""

    def __init__(self, folder: Path, name: str, reward: str) -> None:
        self.folder, self.name, self.reward = folder / "runs", name, reward
        self.model = save_family(folder / "models", name)
        self.changed = save_family(folder / "changed", name, **FAMILIES[name].without)
        self.refused: list[str] = []

    def cells(self, *, two_ranks: bool) -> tuple[str, ...]:
        probed = [self.or_refused(self.probe, engine) for engine in ENGINES]
        without, diagnosed = self.without(), self.diagnose()
        trained = [self.or_refused(self.train, engine) for engine in ENGINES]
        for engine in ENGINES:
            adapter = ("lora", "--lora", "--lora-rank", "4")
            trained.append(self.or_refused(self.train, engine, *adapter))
        trained.append(self.or_refused(self.train, "hf", "layers", "--gradient-checkpointing"))
        ranks = "not tried"
        if two_ranks:
            ranks = self.or_refused(self.train, "hf", "ranks", "--nproc", "2")
        return (self.name, self.parameters(), *probed, without, diagnosed, *trained, ranks)

    def parameters(self) -> str:
        from safetensors import safe_open

        with safe_open(f"{self.model}/model.safetensors", "pt") as weights:
            shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118 - not a mapping
        return f"{sum(map(math.prod, shapes)) / 1e6:.1f} M"

    def or_refused(self, command: Any, engine: str, *more: str) -> str:
        """Run in float32; if that is refused, in bfloat16, with a note of the refusal."""
        try:
            return command(engine, "float32", *more)
        except Refused as refusal:
            self.refused.append(f"* **{self.name}**, {engine}: {refusal}")
        try:
            return "bfloat16: " + command(engine, "bfloat16", *more)
        except Refused:
            return "refused"

    def probe(self, engine: str, dtype: str) -> str:
        flags = f"--engine {engine} --rollout-dtype {dtype} --trainer-dtype float32 {SAMPLED}"
        run = self.typed(f"{engine}-{dtype}", "probe", self.model, *flags.split())
        return " / ".join(f"{gap(run, metric):.1e}" for metric in ("abs_d_mean", "abs_d_max"))

    def without(self) -> str:
        """The float32 Hugging Face trace, scored by a model that lacks the part: the gap must
        show it.
        """
        flags = (
            f"--trainer-model {self.changed} --trainer-dtype float32 --noise-responses 0 "
            "--no-plots --quiet --force"
        )
        run = self.typed(
            "changed", "rescore", str(self.folder / f"{self.name}-hf-float32"), *flags.split()
        )
        return f"{gap(run, 'abs_d_mean'):.2g}"

    def diagnose(self) -> str:
        flags = f"--trainer-model {self.model} --no-plots --quiet --force"
        run = self.typed(
            "diagnosis", "diagnose", str(self.folder / f"{self.name}-hf-float32"), *flags.split()
        )
        faults = json.loads((run / "summary.json").read_text())["faults"]
        return ", ".join(faults) or "no fault"

    def train(self, engine: str, dtype: str, kind: str = "all", *more: str) -> str:
        flags = f"--engine {engine} --rollout-dtype {dtype} --reward {self.reward} {STEPS}"
        run = self.typed(
            f"{kind}-{engine}-{dtype}", "train", "--model", self.model, *flags.split(), *more
        )
        syncs = []
        for line in next(run.rglob("metrics.jsonl")).read_text().splitlines():
            record = json.loads(line)
            if "sync" in record:
                syncs.append(record["sync"])
        return f"{syncs.count('proven')} of {len(syncs)}"

    def typed(self, kind: str, *arguments: str) -> Path:
        """The folder of a finished run, from now or earlier."""
        run, log = self.folder / f"{self.name}-{kind}", self.folder / f"{self.name}-{kind}.log"
        done = run / "done"
        if not done.exists():
            shutil.rmtree(run, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            log.unlink(missing_ok=True)
            process = Forked("mismatch_cli", *arguments, "--output", str(run), log=log)
            said = process.ended(within=600)
            # Exit code 1 is a refusal in one sentence, any other is a bug
            if process.returncode not in (0, 1):
                raise RuntimeError(said)
            if process.returncode:
                raise Refused(" ".join(said.partition("mismatch-cli: ")[2].split()) or said[-300:])
            done.touch()
        return run


def gap(run: Path, metric: str) -> float:
    pairs = json.loads((run / "summary.json").read_text())["pairs"]
    return float(next(iter(pairs.values()))["metrics"][metric]["value"])


if __name__ == "__main__":
    main()
