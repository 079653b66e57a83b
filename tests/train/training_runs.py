"""Synthetic training runs with the keys that the loop records: they rise, some collapse, some
never block.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mismatch_cli.limits.limit_sets import CheckRow
from mismatch_cli.studies.watch_state import Alarm, SetLimit, WatchState
from mismatch_cli.train.studies.runs import TrainingRun
from mismatch_cli.train.studies.training import TrainingAnalysis
from mismatch_cli.train.train_config import load_config

CONFIG = {
    "model": "/somewhere/sample_data/model", "dataset": "/somewhere/sample_data/problems.jsonl",
    "engine": "vllm",
    "trainer_dtype": "float32", "rollout_dtype": "bfloat16", "kv_cache_dtype": "auto",
    "prompts_per_step": 16,
    "samples_per_prompt": 8, "temperature": 1.0, "max_tokens": 128, "attn": "", "recompute": False,
}  # fmt: skip
EIGHT = (
    "dppo-binary-tv", "dppo-binary-tv-recompute", "grpo-clip-higher", "relax-high", "relax-low",
    "relax-both",
    "pg-is", "pg-tis",
)  # fmt: skip
NEVER_BLOCK = ("pg-is", "pg-tis")
COLLAPSE = ("pg-tis", "relax-low")


def make_record(step: int, steps: int, algorithm: str, rng: np.random.Generator) -> dict[str, Any]:
    done = step / max(steps, 60)
    fallen = max(0.0, done - 0.45) if algorithm in COLLAPSE else 0.0
    reward = float(
        np.clip(0.42 + 0.52 * (1 - np.exp(-4 * done)) - 1.4 * fallen + rng.normal(0, 0.035), 0, 1)
    )
    gap = 0.0021 * (1 + 0.4 * done + 8 * fallen) * rng.lognormal(0, 0.08)
    bad = max(0.0, rng.normal(6e-4, 2e-4) * (1 + 30 * fallen))
    blocks = algorithm not in NEVER_BLOCK and rng.random() > 0.05
    seconds = {"sample": 2.1, "grade": 0.05, "update": 2.6, "sync": 0.2}
    # A run that does not recompute still names the phase
    seconds["recompute"] = 0.9 if algorithm.endswith("-recompute") else 0
    return {
        "step": step,
        "updates": 2 * step,
        "reward": reward,
        "eval_accuracy": reward + 0.02 if step % 20 == 0 or step == steps else None,
        "mismatch": {
            "abs_dp_mean": gap,
            "dp_max": float(min(1, 40 * gap * rng.lognormal(0, 0.3))),
            "dp_min": -float(min(1, 55 * gap * rng.lognormal(0, 0.3))),
            "k1": gap**2,
            "k3": gap**2,
        },
        "current": {
            "abs_dp_mean": 2 * gap,
            "dp_max": 0.3,
            "dp_min": -0.4,
            "k1": gap,
            "k3": 1.1 * gap,
            "ratio_p01": 1 - 40 * gap,
            "ratio_p50": 1.0,
            "ratio_p99": 1 + 35 * gap,
        },
        "entropy": float(0.7 * np.exp(-3 * done) + (0.02 if algorithm == "relax-low" else 0.15)),
        "mu_blocked": rng.normal(0.35, 0.05) if blocks else None,
        "mu_kept": 0.93,
        "entropy_blocked": rng.normal(1.4, 0.1) if blocks else None,
        "entropy_kept": 0.2,
        "blocked": 0.0007 if blocks else 0.0,
        "blocked_positive": 0.0002,
        "blocked_negative": 0.0015,
        "bad_over_tokens": bad / 2,
        "bad_over_negative": bad,
        "grad_norm": rng.lognormal(-1, 0.3),
        "length": 44 + 10 * done,
        "truncated": 0.02,
        "back_offs": 0,
        "sync": "proven" if rng.random() < 0.9 else "undecidable",
        "seconds": {key: value * rng.lognormal(0, 0.1) for key, value in seconds.items()}
        | {"record": 0.03},
    }


def make_run(
    algorithm: str = "dppo-binary-tv", seed: int = 0, steps: int = 60, **config: Any
) -> TrainingRun:
    rng = np.random.default_rng([seed, steps, *algorithm.encode("utf-8", "replace")])
    records = [make_record(step, steps, algorithm, rng) for step in range(1, steps + 1)]
    settings = CONFIG | {"algorithm": algorithm, "seed": seed, "steps": steps} | config
    return TrainingRun(f"{algorithm}-seed-{seed}", algorithm, seed, records, settings)


def run_of(
    rewards: Sequence[float | None],
    name: str = "x",
    seed: int = 0,
    config: dict[str, Any] | None = None,
    first: int = 1,
    **more: Any,
) -> TrainingRun:
    """A run with these rewards, and `more` at every step."""
    steps = enumerate(rewards, start=first)
    records = [{"step": step, "reward": reward} | more for step, reward in steps]
    return TrainingRun(f"{name}-seed-{seed}", name, seed, records, config or {})


def ending(ends: dict[str, tuple[float, ...]], steps: int = 5, **config: Any) -> list[TrainingRun]:
    """Runs with a constant reward, one for each seed."""
    runs = []
    for name, values in ends.items():
        for seed, end in enumerate(values):
            runs.append(run_of([end] * steps, name, seed, config))
    return runs


def saved(folder: Path, run: TrainingRun) -> Path:
    """The run in a folder of its name."""
    own = folder / run.name
    own.mkdir(parents=True)
    with (own / "metrics.jsonl").open("w") as file:
        for record in run.records:
            file.write(f"{json.dumps(record)}\n")
    settings = {"algorithm": run.algorithm, "seed": run.seed, "steps": run.steps} | run.config
    with (own / "config.toml").open("w") as file:
        for key, value in settings.items():
            file.write(f"{key} = {json.dumps(value)}\n")
    return own


def with_bounds(run: TrainingRun, binary: float = 0.5, top_k: float = 0.9) -> TrainingRun:
    """The run with bounds that see these shares of the full TV, as `train` records them."""

    records = []
    for record in run.records:
        full = 2 * record["mismatch"]["abs_dp_mean"]
        bounds = {"tv_full": full, "tv_binary": binary * full, "tv_topk": top_k * full}
        records.append(record | {"bounds": bounds | {"tokens": 400}})
    return replace(run, records=records)


def of_paper(algorithm: str, steps: int = 60, **config: Any) -> TrainingRun:
    """A run with the settings that `train --preset paper` records."""
    settings = tomllib.loads(load_config("paper", {"algorithm": algorithm}).to_toml())
    run = make_run(algorithm, steps=steps)
    return replace(run, config={**settings, "steps": steps, **config})


def evaluated(run: TrainingRun, sets: Sequence[str]) -> TrainingRun:
    """The run, evaluated every ten steps on `sets`, each harder than the one before."""

    records = [record | {"eval_accuracy": None} for record in run.records]
    for record in records if sets else ():
        if record["step"] == 1 or record["step"] % 10 == 0:
            accuracies = {name: 0.5 * record["reward"] - 0.05 * i for i, name in enumerate(sets)}
            record |= {"eval": accuracies, "eval_accuracy": float(np.mean([*accuracies.values()]))}
    return replace(run, records=records)


def eight_algorithms() -> list[TrainingRun]:
    """Eight algorithms with three seeds each; some runs are shorter."""
    return [make_run(name, seed, 45 if seed == 2 else 60) for name in EIGHT for seed in range(3)]


def limit(metric: str, bound: str, threshold: float, pair: str = "") -> SetLimit:
    return SetLimit(metric, bound, threshold, pair, limits="mine")


def watched(*limits: SetLimit, alarms: tuple[tuple[int, int], ...] = ()) -> TrainingAnalysis:
    """A watched run; the alarms are those of the first limit, with their first and last steps."""
    first = limits[0]
    check = CheckRow(
        limits=first.limits, metric=first.metric, pair="mismatch", value=1.0, low=None, high=None,
        bound=first.bound, threshold=first.threshold, decide=first.decide, reference=None,
        allowed=None, holds=False, status="exceeded", reason="", power=None, source="", why="",
    )  # fmt: skip
    rows = [Alarm(since, check, last=last, told=since) for since, last in alarms]
    return TrainingAnalysis.of([make_run(steps=20)], WatchState(limits, rows, ()))
