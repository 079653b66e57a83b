"""The race: `train` and its scorer against TRL's, the scorer against a plain script's, `probe`
against one by hand.

    python -m lab.race train   --trl-python trl-venv/bin/python [--rounds 5] [--threads 1] [--racers own trl …]
    python -m lab.race train   --trl-python trl-venv/bin/python --threads 2 --racers own-real trl-real
    python -m lab.race scoring --trl-python trl-venv/bin/python [--rounds 3] [--large]
    python -m lab.race probe   [--rounds 2] [--sizes 64x4 256x4 1024x8]

TRL has its own environment (rivals/requirements.txt). All racers of a comparison start first, then
each does one step in turn, round after round: A B A B. The first round warms up and is left out.
Figures are medians over rounds with the smallest and the largest; ratios are within a round. Target
of `train`: 1.5 times TRL's samples per second.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lab.turns import Died, Racer

RIVALS, ROOT = Path(__file__).parent / "rivals", Path(__file__).parents[1]
TARGET = 2.5
# On the real model of `make real-model`, which does not end its answers within 64 tokens: both
# sample as many.
REAL_MODEL = str(ROOT / ".real-model")
REAL_OWN = [
    f"model={REAL_MODEL}",
    "prompts_per_step=8",
    "samples_per_prompt=4",
    "max_tokens=64",
    "learning_rate=1e-6",
]
REAL_TRL = [
    "--model",
    REAL_MODEL,
    "--prompts",
    "8",
    "--samples",
    "4",
    "--max-tokens",
    "64",
    "--micro-batch",
    "16",
]
REAL_TRL += ["--learning-rate", "1e-6"]
Side = tuple[str, str, list[str]]  # whose Python, script, arguments
TRAIN: dict[str, Side] = {
    "own": ("own", "own_train.py", []),
    "own-float32": ("own", "own_train.py", ["--set", "rollout_dtype=float32"]),
    "own-8192": ("own", "own_train.py", ["--set", "token_budget=8192"]),
    "own-bfloat16": ("own", "own_train.py", ["--set", "trainer_dtype=bfloat16"]),
    "own-hf": ("own", "own_train.py", ["--set", "rollout_dtype=float32", "engine=hf"]),
    "trl": ("trl", "trl_grpo.py", []),
    "trl-32": ("trl", "trl_grpo.py", ["--micro-batch", "32"]),
    "trl-bfloat16": ("trl", "trl_grpo.py", ["--bf16"]),
    "trl-continuous": ("trl", "trl_grpo.py", ["--sampler", "continuous-batching"]),
    # Crashes on a CPU at its first weight sync
    "trl-vllm": ("trl", "trl_grpo.py", ["--sampler", "vllm"]),
    "trl-vllm-mended": ("trl", "trl_grpo.py", ["--sampler", "vllm-mended"]),
    "own-real": ("own", "own_train.py", ["--set", *REAL_OWN]),
    "own-real-float32": ("own", "own_train.py", ["--set", *REAL_OWN, "rollout_dtype=float32"]),
    "own-real-lora": (
        "own",
        "own_train.py",
        ["--set", *REAL_OWN, "lora=yes", "lora_rank=16", "lora_alpha=32"],
    ),
    "trl-real": ("trl", "trl_grpo.py", REAL_TRL),
    "trl-real-lora": ("trl", "trl_grpo.py", [*REAL_TRL, "--lora"]),
}
SCORING: dict[str, Side] = {
    "own": ("own", "own_scoring.py", []),
    "trl": ("trl", "trl_scoring.py", []),
    "plain": ("own", "plain_scoring.py", []),
}

Round = dict[str, dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "scoring", "probe"])
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--racers", nargs="+", help="racers; the first is compared with the others")
    parser.add_argument(
        "--large", action="store_true", help="scoring: two layers with a vocabulary of 151,936"
    )
    parser.add_argument(
        "--sizes", nargs="+", default=["64x4", "256x4", "1024x8"], help="probe: prompts x responses"
    )
    parser.add_argument(
        "--model", default=str(ROOT / "sample_data/model"), help="probe: a model folder"
    )
    parser.add_argument(
        "--arguments", nargs=argparse.REMAINDER, default=[], help="probe: arguments for both sides"
    )
    options = parser.parse_args()
    lines = {"train": train, "scoring": scoring, "probe": probe}[options.what](options)
    for line in lines:
        print(line, flush=True)


def train(options: argparse.Namespace) -> Iterator[str]:
    names = options.racers or ["own", "trl"]
    rounds = race({name: command(options, *TRAIN[name]) for name in names}, options)
    responses = rounds[-1][names[0]]["samples"]
    yield (
        f"train: {options.threads} thread(s), {len(rounds)} rounds, {responses} responses, 2 "
        "updates"
    )
    yield from table(rounds)
    yield from ratios(rounds)
    yield f"target: {TARGET}"


def scoring(options: argparse.Namespace) -> Iterator[str]:
    names = options.racers or list(SCORING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, responses = (large_case if options.large else bundled_case)(folder)
        more = ["--model", model, "--responses", str(responses)]
        commands = {racer: command(options, *SCORING[racer]) + more for racer in names}
        rounds = race(commands, options)
    yield (
        f"scoring: {options.threads} thread(s), {len(rounds)} rounds, "
        f"{'large' if options.large else 'bundled'} model"
    )
    yield from table(rounds)
    names = list(rounds[0])
    means = [rounds[-1][racer]["mean_logp"] for racer in names]
    yield f"mean log π: {', '.join(f'{n} {m:.6f}' for n, m in zip(names, means, strict=True))}"
    yield from ratios(rounds)


def ratios(rounds: Sequence[Round]) -> Iterator[str]:
    """The first racer compared with each other, round by round; load distorts CPU time least."""
    first, *others = rounds[0]
    for name in others:
        wall, cpu = (
            [each[first][rate] / each[name][rate] for each in rounds]
            for rate in ("rate", "cpu_rate")
        )
        yield (
            f"{first} / {name}: {spread(wall)} times the samples per second, {spread(cpu)} times "
            "those per CPU second"
        )


def command(
    options: argparse.Namespace, side: str, script: str, arguments: Sequence[str]
) -> list[str]:
    return [
        options.trl_python if side == "trl" else sys.executable,
        str(RIVALS / script),
        *arguments,
    ]


def race(commands: Mapping[str, Sequence[str]], options: argparse.Namespace) -> list[Round]:
    """One step of each racer in turn, without the first round."""
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    racers = {name: Racer(arguments, environment) for name, arguments in commands.items()}
    rounds: list[Round] = []
    try:
        for number in range(options.rounds + 1):
            rounds.append({})
            for name, racer in list(racers.items()):
                try:
                    rounds[-1][name] = step(name, racer, number)
                except Died as died:
                    print(
                        f"{name} died in round {number} ({died}): left out",
                        file=sys.stderr,
                        flush=True,
                    )
                    racers.pop(name).stop()
    finally:
        for racer in racers.values():
            racer.stop()
    return [{name: each[name] for name in racers} for each in rounds[1:]]


def step(name: str, racer: Racer, number: int) -> dict[str, Any]:
    found = racer.step()
    print(f"round {number} {name}: {json.dumps(found)}", file=sys.stderr, flush=True)
    return found | {
        "rate": found["samples"] / found["seconds"],
        "cpu_rate": found["samples"] / found["cpu"],
    }


def table(rounds: Sequence[Round]) -> Iterator[str]:
    heads = f"{'samples/s (range)':>24}{'tokens/s':>10}{'samples/CPU s':>24}"
    yield f"{'':<16}{heads}{'length':>8}{'reward':>8}{'peak MB':>9}"
    for name in rounds[0]:
        own = [each[name] for each in rounds]
        length = sum(x["tokens"] for x in own) / sum(x["samples"] for x in own)
        reward = statistics.mean(x["reward"] for x in own) if "reward" in own[0] else float("nan")
        peak = max(x.get("peak_mb", float("nan")) for x in own)
        yield (
            f"{name:<16}{spread([x['rate'] for x in own]):>24}"
            f"{statistics.median(x['tokens'] / x['seconds'] for x in own):>10.0f}"
            f"{spread([x['cpu_rate'] for x in own]):>24}{length:>8.1f}{reward:>8.3f}{peak:>9.0f}"
        )


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def bundled_case(folder: Path) -> tuple[str, Path]:
    """The responses of the bundled traces, repeated four times: 1,152."""
    sys.path.insert(0, str(ROOT))
    import pyarrow.parquet as pq

    from mismatch_cli.base.places import bundled

    rows: list[list[list[int]]] = []
    for shard in sorted(bundled("traces").glob("*/shard-*.parquet")):
        read = pq.read_table(shard, columns=["prompt_ids", "response_ids"])
        rows += [
            list(pair)
            for pair in zip(*(column.to_pylist() for column in read.columns), strict=True)
        ]
    path = folder / "responses.json"
    path.write_text(json.dumps(rows * 4))
    return str(bundled("model")), path


def large_case(folder: Path) -> tuple[str, Path]:
    """Two layers of Qwen3 with random weights, and 32 random responses of 16 to 256 tokens to
    prompts of 32 to 96.
    """
    sys.path.insert(0, str(ROOT))
    from mismatch_cli.models.torch_settings import prepare_imports

    prepare_imports()
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "vocab_size": 151_936,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads)).save_pretrained(folder / "model")
    lengths = [torch.randint(low, high, (32,)).tolist() for low, high in ((32, 97), (16, 257))]
    rows = [
        [torch.randint(3, 2000, (n,)).tolist() for n in pair] for pair in zip(*lengths, strict=True)
    ]
    path = folder / "responses.json"
    path.write_text(json.dumps(rows))
    return str(folder / "model"), path


def probe(options: argparse.Namespace) -> Iterator[str]:
    """Whole processes: from the start to the first number on stdout, and to the end, without the
    first round.

    Modules come compiled from a folder of the race, as on any machine that has imported them
    before.
    """
    compiled = tempfile.mkdtemp()
    heads = f"{'to the number, s':>24}{'to the end, s':>24}{'CPU s':>24}{'peak MB':>9}"
    yield f"{'':<10}{'racer':<16}{heads}   mean |π − μ|"
    for size in options.sizes:
        prompts, samples = size.split("x")
        more = ["--num-prompts", prompts, "--samples-per-prompt", samples, *options.arguments]
        found: dict[str, list[Whole]] = {}
        for number in range(options.rounds + 1):
            for name in options.racers or ["own", "by-hand"]:
                whole = timed(name, more, options, compiled)
                if number:
                    found.setdefault(name, []).append(whole)
        for name, runs in found.items():
            columns = (spread([run.first for run in runs]), spread([run.last for run in runs]))
            cpu = spread([run.cpu for run in runs])
            peak = max(run.peak_mb for run in runs)
            yield (
                f"{size:<10}{name:<16}{columns[0]:>24}{columns[1]:>24}{cpu:>24}{peak:>9.0f}   "
                f"{runs[-1].number}"
            )
        first_name, *others = found
        for name in others:
            pairs = list(zip(found[first_name], found[name], strict=True))
            to_number, to_end, cpu_ratio = (
                spread([getattr(b, what) / getattr(a, what) for a, b in pairs])
                for what in ("first", "last", "cpu")
            )
            against = f"{to_number} to the number, {to_end} to the end, {cpu_ratio} in CPU time"
            yield f"{size:<10}{first_name} is ahead of {name} by {against}"
    shutil.rmtree(compiled)


class Whole(NamedTuple):
    """A whole process: seconds to its number and to its end, CPU seconds with children, peak
    memory, the number.
    """

    first: float
    last: float
    cpu: float
    peak_mb: float
    number: str


def timed(name: str, more: Sequence[str], options: argparse.Namespace, compiled: str) -> Whole:
    environment = os.environ | {
        "OMP_NUM_THREADS": str(options.threads),
        "PYTHONPYCACHEPREFIX": compiled,
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    folder = tempfile.mkdtemp()
    problems = str(ROOT / "sample_data/problems.jsonl")
    if name == "own":
        start = [
            sys.executable,
            "-m",
            "mismatch_cli",
            "probe",
            options.model,
            "--prompts",
            problems,
        ]
        start += ["--quiet", "--force", "--output", folder]
    else:
        start = [sys.executable, str(RIVALS / "hand_probe.py"), options.model, problems]
        start += ["--corrected"] if name == "corrected" else []
    began = time.perf_counter()
    with subprocess.Popen(
        [*start, *more], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        lines = [process.stdout.readline()]
        while lines[-1] and not re.search(r"mean \|", lines[-1]):
            lines.append(process.stdout.readline())
        first = time.perf_counter() - began
        lines += process.stdout.readlines()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    last = time.perf_counter() - began
    shutil.rmtree(folder)
    if process.returncode:
        raise SystemExit(f"{name} ended with exit code {process.returncode}.")
    pattern = r"mean \|π − μ\|\s+(\S+)|mean \|pi - mu\| (\S+)"
    number = next(
        (match[1] or match[2] for line in lines if (match := re.search(pattern, line))), "?"
    )
    whole = Whole(first, last, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, number)
    print(f"{name} {' '.join(more)}: {whole}", file=sys.stderr, flush=True)
    return whole


if __name__ == "__main__":
    main()
