"""How well `mismatch-cli diagnose` finds faults: `python benchmarks/detection.py --folder F` prints fault × severity.

Healthy traces are recorded with vLLM in several precisions (once, into the folder). A trial takes some prompts of one,
plants a fault, and counts as found only if the first cause that is named is that fault. Healthy trials count false
alarms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from faults import FAULTS, Fault, Pool, in_steps, planted
from variants import add_variants

from mismatch_cli.diagnosis.evidence import Evidence, gather_tables
from mismatch_cli.diagnosis.run import Diagnosis, diagnose
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.trace.reader import Trace

_COMMON = "--num-prompts 512 --samples-per-prompt 4 --max-tokens 128 --top-logprobs 8 --noise-responses 0"
POOLS = {
    "f32": "--rollout-dtype float32 --trainer-dtype float32",
    "bf16": "--rollout-dtype bfloat16 --trainer-dtype bfloat16",
    "fp8": "--rollout-dtype bfloat16 --trainer-dtype bfloat16 --kv-cache-dtype fp8",
    "mixed": "--rollout-dtype bfloat16 --trainer-dtype float32",
    "hot07": "--rollout-dtype bfloat16 --trainer-dtype bfloat16 --temperature 0.7",
    "topp": "--rollout-dtype bfloat16 --trainer-dtype bfloat16 --top-p 0.9",
}
BROKEN_POOLS = ("f32", "bf16", "fp8")  # into which faults are planted
TOP_P = (0.99, 0.95, 0.9, 0.8)
RESPONSES = 1024  # of a pool, that trials draw from
UNEXPLAINED = "unexplained-gap"
PROMPTS = 32  # of a trial, with all their samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where pools are recorded and kept")
    parser.add_argument("--trials", type=int, default=102, help="for each fault and severity")
    parser.add_argument("--healthy", type=int, default=600, help="healthy trials, over all pools")
    parser.add_argument("--only", default="", help="faults whose name holds this")
    parser.add_argument("--json", type=Path, help="where the counts go, too")
    options = parser.parse_args()
    pools = {name: load_pool(options.folder, name, flags) for name, flags in POOLS.items()}
    rows = [] if options.only else [healthy_row(name, pools[name], options.healthy // len(POOLS)) for name in POOLS]
    print(
        "| fault | first cause | severity | found first | of | named instead |\n|---|---|---|---|---|---|", flush=True
    )
    for fault in FAULTS:
        if options.only in fault.name:
            rows += [fault_row(fault, severity, pools, options.trials) for severity in fault.severities]
    rows += [top_p_row(options.folder, top_p, options.trials) for top_p in TOP_P if options.only in "top-p"]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def load_pool(folder: Path, name: str, flags: str, variants: bool | None = None) -> Pool:
    run = folder / name
    if not (run / "summary.json").exists():
        command = f"probe {_COMMON} {flags} --force --quiet --json --output {run}"
        subprocess.run([sys.executable, "-m", "mismatch_cli", *command.split()], check=True, stdout=subprocess.DEVNULL)
    trace = Trace.open(run)
    import pyarrow as pa

    pool = Pool.of(pa.concat_tables(trace.tables()), RESPONSES)
    pool.about = trace.manifest
    pool.sampling = trace.manifest["config"]["sampling"]
    if name in BROKEN_POOLS if variants is None else variants:
        add_variants(pool, trace, folder / f"{name}-variants")
    return pool


def judged(pool: Pool, sampling: dict[str, Any], earlier_T: np.ndarray | None = None) -> Diagnosis:
    evidence: Evidence = gather_tables([pool.table()], PAIRS["mismatch"], sampling, pool.about)
    if earlier_T is not None:
        evidence = replace(evidence, earlier_logp_T=_in_sample_order(pool, earlier_T))
    return diagnose(evidence)


def _in_sample_order(pool: Pool, values_T: np.ndarray) -> np.ndarray:
    """The sample is ordered by step, prompt and sample."""
    rows = pool.rows
    order = np.lexsort([rows["sample_index"], rows["prompt_id"], rows["step"]])
    return np.concatenate([values_T[pool.offset_S1[s] : pool.offset_S1[s + 1]] for s in order])


def draw(pool: Pool, rng: np.random.Generator) -> np.ndarray:
    prompts = rng.choice(np.unique(pool.rows["prompt_id"]), PROMPTS, replace=False)
    return np.flatnonzero(np.isin(pool.rows["prompt_id"], prompts))


def first_cause(diagnosis: Diagnosis) -> str:
    """The name of the first cause; where there is none, whether the gap is called unexplained."""
    if diagnosis.first_cause is not None:
        return diagnosis.first_cause.check
    return UNEXPLAINED if UNEXPLAINED in [fault.check for fault in diagnosis.faults] else "nothing"


def healthy_row(name: str, pool: Pool, trials: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    alarms: Counter[str] = Counter()
    for _ in range(trials):
        healthy = pool.take(draw(pool, rng))
        in_steps(healthy, rng)
        found = judged(healthy, pool.sampling).found
        # the lattice and the head are true of these precisions: no alarm
        true = {"f32": set(), "mixed": {"logit-lattice", "lm-head"}}.get(name, {"logit-lattice"})
        alarms[next((f.check for f in found if f.check not in true), "nothing")] += 1
    wrong = trials - alarms["nothing"]
    print(f"healthy {name}: {wrong} false alarms in {trials} trials {dict(alarms)}", flush=True)
    return {"fault": f"healthy, {name}", "alarms": wrong, "of": trials, "named": dict(alarms)}


def fault_row(fault: Fault, severity: float, pools: dict[str, Pool], trials: int) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    named: Counter[str] = Counter()
    by_pool: dict[str, Counter[str]] = {name: Counter() for name in BROKEN_POOLS}
    for trial in range(trials):
        name = BROKEN_POOLS[trial % len(BROKEN_POOLS)]
        index_S = draw(pools[name], rng)
        broken = planted(pools[name], fault, severity, index_S, rng)
        earlier_T = pools[name].take(index_S).tokens["logp_trainer"] if fault.check == "stale-weights" else None
        cause = first_cause(judged(broken, pools[name].sampling, earlier_T))
        named[cause] += 1
        by_pool[name][cause] += 1
    return _row(fault.name, fault.check, f"{severity:g} {fault.unit}".strip(), named, trials, by_pool)


def top_p_row(folder: Path, top_p: float, trials: int) -> dict[str, Any]:
    """Sampled with top-p by vLLM, scored without it: real on both sides."""
    flags = f"--rollout-dtype bfloat16 --trainer-dtype bfloat16 --top-p {top_p:g}"
    pool = load_pool(folder, f"cut{top_p:g}", flags, variants=False)
    cache = folder / f"cut{top_p:g}-whole"
    add_variants(pool, Trace.open(folder / f"cut{top_p:g}"), cache, ["temperature1"])
    pool.use("temperature1")
    rng, named = np.random.default_rng(3), Counter[str]()
    for _ in range(trials):
        named[first_cause(judged(pool.take(draw(pool, rng)), {}))] += 1
    return _row("top-p in the engine only", "truncated-support", f"top_p {top_p:g}", named, trials, {})


def _row(
    name: str, check: str, severity: str, named: Counter[str], trials: int, by_pool: dict[str, Counter[str]]
) -> dict[str, Any]:
    found = named.pop(check, 0)
    others = ", ".join(f"{other} {count}" for other, count in named.most_common())
    print(f"| {name} | `{check}` | {severity} | {found} | {trials} | {others} |", flush=True)
    row = {"fault": name, "check": check, "severity": severity, "found": found, "of": trials, "named": dict(named)}
    return row | {"found_in": {pool: counts[check] for pool, counts in by_pool.items()}}


if __name__ == "__main__":
    main()
