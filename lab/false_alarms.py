"""Whether the weight sync ever ends a run that is right: 20 steps at each rate, every sync checked.

    python -m lab.false_alarms --folder /tmp/alarms [--model .real-model] [--steps 20]

`train` with real vLLM on sums of two numbers, 8 × 4 responses of at most 64 tokens and two updates
a step: every learning rate, all weights and LoRA, an engine in bfloat16 and in float32. A finished
combination is not run again.
"""

import argparse
import collections
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RATES = ("1e-6", "1e-5", "1e-4")
TRAINED = {"all weights": [], "lora": ["--lora", "--lora-rank", "16", "--lora-alpha", "32"]}
DTYPES = ("bfloat16", "float32")
SHAPE = (
    "--prompts-per-step 8 --samples-per-prompt 4 --max-tokens 64 --minibatches 2 --eval-every 0 "
    "--eval-samples 1 --no-plots"
)
# A run checks some of its syncs; here it checks all of them.
ALWAYS = "from mismatch_cli.train import run; run.steps_between_checks = lambda *_: 1; "
MAIN = "from mismatch_cli.app.cli import main; main()"
REWARD = """import re


def last_number(response, answer):
    numbers = re.findall(r"\\d+", response)
    return float(bool(numbers) and numbers[-1] == str(answer))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", default=".real-model")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with (options.folder / "sums.jsonl").open("w") as file:
        for i in range(16):
            row = {"problem": f"What is {7 + i} + {3 * i + 5}?", "answer": str(12 + 4 * i)}
            file.write(f"{json.dumps(row)}\n")
    (options.folder / "reward.py").write_text(REWARD)
    for dtype, trained, rate in itertools.product(DTYPES, TRAINED, RATES):
        folder = options.folder / f"{dtype}-{trained.replace(' ', '-')}-{rate}"
        code = 0
        if len(steps(folder)) != options.steps:
            code = train(options, folder, dtype, TRAINED[trained], rate)
        print(
            f"{dtype} | {trained} | {rate} | exit {code} | {' | '.join(summary(steps(folder)))}",
            flush=True,
        )


def train(
    options: argparse.Namespace, folder: Path, dtype: str, adapter: list[str], rate: str
) -> int:
    """One run, from its beginning; its exit code."""
    shutil.rmtree(folder, ignore_errors=True)
    reward = f"{options.folder / 'reward.py'}:last_number"
    paths = ["--model", options.model, "--dataset", options.folder / "sums.jsonl"]
    paths += ["--reward", reward, "--output", folder]
    varied = ["--rollout-dtype", dtype, "--learning-rate", rate, "--steps", options.steps]
    settings = [*map(str, paths), *map(str, varied), *SHAPE.split(), *adapter]
    command = [sys.executable, "-c", ALWAYS + MAIN, "train", *settings]
    with folder.with_suffix(".log").open("w") as log:
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode


def steps(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def summary(records: list[dict[str, Any]]) -> Iterator[str]:
    """Steps, answers of the sync, and what rounding swallowed at the last step."""
    yield f"{len(records)} steps"
    answers = collections.Counter(record["sync"] for record in records)
    yield ", ".join(f"{count} {answer}" for answer, count in answers.items())
    rounding = records[-1].get("rounding") if records else None
    if rounding:
        yield f"changed {rounding['weights_changed']:.2%}, lag {rounding['abs_dp_mean']:.2g}"


if __name__ == "__main__":
    main()
