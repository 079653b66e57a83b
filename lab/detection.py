"""How well `mismatch-cli diagnose` finds faults: `python -m lab.detection --folder F` prints
fault × severity.

Healthy traces are recorded with vLLM in several precisions (once, into the folder). A trial takes
some prompts of one, plants a fault, and counts as right if that fault is named as the first cause,
or if the gap is called unexplained and that fault is among the suspects. Any cause other than the
planted one is false. Healthy trials, large and tiny, count false alarms. Every second trial has
only the sampled tokens' log-probabilities, like many dumps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lab import faults as faults_of_numbers
from lab import trainers_side
from lab.faults import Fault, in_steps, planted
from lab.pool import Pool, gather_tables
from lab.variants import add_variants, model_at_hand
from mismatch_cli.diagnosis.diagnose import FLOOR_STAGE, Findings, diagnose, module
from mismatch_cli.diagnosis.evidence import Evidence
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.trace.reader import Trace

_COMMON = (
    "--num-prompts 512 --samples-per-prompt 4 --max-tokens 128 --top-logprobs 8 --noise-responses 0"
)
POOLS = {
    "f32": "--rollout-dtype float32 --trainer-dtype float32",
    "bf16": "--rollout-dtype bfloat16 --trainer-dtype bfloat16",
    "fp8": "--rollout-dtype bfloat16 --trainer-dtype bfloat16 --kv-cache-dtype fp8",
    "mixed": "--rollout-dtype bfloat16 --trainer-dtype float32",
    "peaked": "--rollout-dtype bfloat16 --trainer-dtype bfloat16 --temperature 0.1",
    "hot07": "--rollout-dtype bfloat16 --trainer-dtype bfloat16 --temperature 0.7",
    "topp": "--rollout-dtype bfloat16 --trainer-dtype bfloat16 --top-p 0.9",
}
BROKEN_POOLS = ("f32", "bf16", "fp8")  # pools to plant faults into
FAULTS = (*faults_of_numbers.FAULTS, *trainers_side.FAULTS)
TOP_P = (0.99, 0.95, 0.9, 0.8)
RESPONSES = 1024  # of a pool, from which trials draw
UNEXPLAINED, IN_THE_SET = "unexplained-gap", "in the set of an unexplained gap"
TRUE_OF = {"mixed": ("lm-head",)}  # a head in bfloat16 on one side is true of this pool
# Two names of one fault
ALIKE = {"position-drift": {"position-encoding"}, "position-encoding": {"position-drift"}}
_NOT_THE_MODELS = {"not-reproduced"}  # which is true whatever made such numbers
FOLLOWS = {
    # The planted number does contradict the top-K column
    "end-of-sequence": {"columns-at-odds"},
    "attended-padding": _NOT_THE_MODELS,
    "missing-tensor": _NOT_THE_MODELS,
    "packed-responses": _NOT_THE_MODELS,
    "position-encoding": _NOT_THE_MODELS,
}
OF_TOP_K = ("columns-at-odds",)  # checks that are about the top-K columns
# Of a fault for which the model reads the responses again, under hundreds of hypotheses
TRIALS_AT_HAND = 12
LARGE = 3.0  # times the healthy gap: a fault that must get its name
PROMPTS = 32  # per trial, with all their samples


def main() -> None:
    options = command_line().parse_args()
    faults = [fault for fault in FAULTS if options.only in fault.name]
    variants = set().union(*(fault.variants for fault in faults))
    pools = {}
    for name in options.pools:
        used = variants if name in BROKEN_POOLS else ()
        pools[name] = load_pool(options.folder, name, POOLS[name], used)
    rows: list[dict[str, Any]] = []
    if options.only in ("", "healthy"):
        rows += healthy_rows(pools, options.healthy // (2 * len(pools)))
    broken_pools = {name: pool for name, pool in pools.items() if name in BROKEN_POOLS}
    rows += fault_rows(faults, broken_pools, options.trials)
    if options.only in "top-p in the engine only":
        for top_p in TOP_P:
            rows.append(top_p_row(options.folder, top_p, options.trials))
    print(two_numbers(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def two_numbers(rows: Sequence[dict[str, Any]]) -> str:
    """How often a wrong cause comes first, and how often a large gap gets its name."""
    planted_rows = [row for row in rows if "right" in row]
    trials = sum(row["of"] for row in planted_rows)
    wrong = sum(row["wrong"] for row in planted_rows)
    large = sum(row["large"] for row in planted_rows)
    named = sum(row["large_named"] for row in planted_rows)
    return (
        f"\nA wrong first cause: {wrong} of {trials} ({wrong / max(trials, 1):.1%}). Gaps above "
        f"{LARGE:g} times the healthy one: {named} of {large} named ({named / max(large, 1):.1%})."
    )


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="where pools are recorded and kept"
    )
    parser.add_argument("--trials", type=int, default=102, help="for each fault and severity")
    parser.add_argument(
        "--healthy", type=int, default=600, help="healthy trials over all pools, half of them tiny"
    )
    parser.add_argument(
        "--only", default="", help="healthy ones, or faults whose name contains this"
    )
    parser.add_argument("--pools", nargs="*", default=list(POOLS), choices=POOLS, help="these")
    parser.add_argument("--json", type=Path, help="also write the counts here")
    return parser


def healthy_rows(pools: dict[str, Pool], trials: int) -> Iterator[dict[str, Any]]:
    """The table of false alarms: every pool, in whole trials and in tiny ones."""
    print(
        "| healthy | setting | false causes | unexplained | of | named |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for tiny in (False, True):
        for name, pool in pools.items():
            yield healthy_row(name, pool, trials, tiny)


def fault_rows(
    faults: Sequence[Fault], pools: dict[str, Pool], trials: int
) -> Iterator[dict[str, Any]]:
    """The table of faults; stale weights a second time, without the earlier checkpoint."""
    head = (
        "| fault | first cause | severity | right | of | instead, or in the set | others beside "
        "| which |"
    )
    print(f"{head}\n|---|---|---|---|---|---|---|---|", flush=True)
    for fault in faults:
        number = min(trials, TRIALS_AT_HAND) if fault.at_hand else trials
        for severity in fault.severities:
            yield fault_row(fault, severity, pools, number)
    for fault in faults:
        if fault.check == "stale-weights":
            alone = replace(fault, name=f"{fault.name}, without the earlier checkpoint")
            for severity in fault.severities:
                yield fault_row(alone, severity, pools, trials, earlier=False)


def load_pool(folder: Path, name: str, flags: str, variants: Iterable[str]) -> Pool:
    """A pool of healthy responses, recorded now unless it is kept, with some variants."""
    run = folder / name
    if not (run / "summary.json").exists():
        command = f"probe {_COMMON} {flags} --force --quiet --json --output {run}"
        subprocess.run(
            [sys.executable, "-m", "mismatch_cli", *command.split()],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    trace = Trace.open(run)
    import pyarrow as pa

    pool = Pool.of(pa.concat_tables(trace.tables()), RESPONSES)
    pool.about = trace.manifest
    pool.sampling = trace.manifest["config"]["sampling"]
    add_variants(pool, trace, folder / f"{name}-variants", variants)
    return pool


def judged(
    pool: Pool, sampling: dict[str, Any], earlier_T: np.ndarray | None = None, at_hand: bool = False
) -> Findings:
    evidence: Evidence = gather_tables([pool.table()], PAIRS["mismatch"], sampling, pool.about)
    if earlier_T is not None:
        evidence = replace(evidence, earlier_logp_T=earlier_T[pool.sample_order_T])
    if at_hand:
        evidence = replace(evidence, model=model_at_hand(pool, evidence.sample))
    return diagnose(evidence)


def mean_gap(pool: Pool) -> float:
    """The mean |log π − log μ| of the tokens that have both, nats."""
    gap_T = pool.tokens["logp_trainer"] - pool.tokens["logp_rollout"]
    return float(np.abs(gap_T[np.isfinite(gap_T)]).mean())


def draw(pool: Pool, rng: np.random.Generator, prompts: int = PROMPTS) -> np.ndarray:
    """The responses of some prompts."""
    chosen = rng.choice(np.unique(pool.rows["prompt_id"]), prompts, replace=False)
    return np.flatnonzero(np.isin(pool.rows["prompt_id"], chosen))


@dataclass
class Tally:
    """The results of trials: the first cause, and causes other than the planted one."""

    named: Counter[str] = field(default_factory=Counter)
    beside: Counter[str] = field(default_factory=Counter)
    cells: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    trials: int = 0
    wrong: int = 0  # first causes that are neither the planted one nor true of the pool
    large: int = 0  # gaps above LARGE times the healthy one
    large_named: int = 0

    def add(
        self,
        check: str,
        diagnosis: Findings,
        cell: str,
        true: Collection[str] = (),
        times_healthy: float = np.nan,
    ) -> None:
        """Add one trial; `true`: checks that apply to the pool itself."""
        answer = _answer(diagnosis, check)
        self.trials += 1
        is_right = answer in (check, IN_THE_SET)
        if times_healthy > LARGE:
            self.large += 1
            self.large_named += is_right
        self.named[answer] += 1
        self.cells[cell][answer] += 1
        right = {check, *true, *ALIKE.get(check, ()), *FOLLOWS.get(check, ())}
        self.wrong += answer not in {*right, IN_THE_SET, UNEXPLAINED, "nothing"}
        causes = {finding.check for finding in diagnosis.found}
        false = [cause for cause in causes - right if module(cause).STAGE < FLOOR_STAGE]
        self.beside.update(false)
        self.beside["any"] += bool(false)

    def right(self, check: str) -> int:
        return self.named[check] + self.named[IN_THE_SET]


def _answer(diagnosis: Findings, check: str) -> str:
    """The first cause; if there is none, whether the gap is unexplained and the fault a suspect."""
    names = {check, *ALIKE.get(check, ())}
    if diagnosis.first_cause is not None:
        return check if diagnosis.first_cause.check in names else diagnosis.first_cause.check
    if all(fault.check != UNEXPLAINED for fault in diagnosis.faults):
        return "nothing"
    is_in_the_set = any(suspect.check in names for suspect in diagnosis.suspects)
    return IN_THE_SET if is_in_the_set else UNEXPLAINED


def sampled_alone(pool: Pool) -> None:
    """Leave only the log-probabilities of the sampled tokens, like many dumps."""
    pool.ranks.clear()
    pool.tokens.pop("entropy_trainer", None)


def healthy_row(name: str, pool: Pool, trials: int, tiny: bool) -> dict[str, Any]:
    """Trials on healthy traces: 32 prompts, or 5 to 20 prompts with all or only some of their
    responses.
    """
    rng, tally = np.random.default_rng(1), Tally()
    for trial in range(trials):
        prompts = int(rng.integers(5, 21)) if tiny else PROMPTS
        index_S = draw(pool, rng, prompts)
        if tiny:
            index_S = index_S[:: rng.integers(1, 5)]
        healthy = pool.take(index_S)
        in_steps(healthy, rng)
        cell = "top-K"
        if trial % 2:
            cell = "plain"
            sampled_alone(healthy)
        tally.add("nothing", judged(healthy, pool.sampling), cell, TRUE_OF.get(name, ()))
    wrong = tally.beside.pop("any", 0)
    unexplained = tally.named[UNEXPLAINED] + tally.named[IN_THE_SET]
    size = "tiny" if tiny else "whole"
    print(
        f"| {size} | {name} | {wrong} | {unexplained} | {trials} | {_counts(tally.beside)} |",
        flush=True,
    )
    row = {
        "fault": f"healthy, {name}, {size}",
        "alarms": wrong,
        "unexplained": unexplained,
        "of": trials,
    }
    return row | {"named": dict(tally.beside)}


def fault_row(
    fault: Fault, severity: float, pools: dict[str, Pool], trials: int, earlier: bool = True
) -> dict[str, Any]:
    """Trials of one fault at one severity; `earlier`: give the earlier checkpoint if the check
    needs it.
    """
    rng, tally = np.random.default_rng(2), Tally()
    for trial in range(trials):
        # Every pool in turn, with the top-K columns in one round and without them in the next
        name, plain = list(pools)[trial % len(pools)], bool(trial // len(pools) % 2)
        index_S = draw(pools[name], rng)
        healthy = pools[name].take(index_S)
        broken = planted(pools[name], fault, severity, index_S, rng)
        if plain and fault.check not in OF_TOP_K and not fault.top_k:
            sampled_alone(broken)
        earlier_T = None
        if earlier and fault.check == "stale-weights":
            earlier_T = healthy.tokens["logp_trainer"]
        diagnosis = judged(broken, pools[name].sampling, earlier_T, fault.at_hand)
        cell = f"{name}, plain" if plain else f"{name}, top-K"
        times = mean_gap(broken) / mean_gap(healthy)
        tally.add(fault.check, diagnosis, cell, TRUE_OF.get(name, ()), times)
    return _row(fault.name, fault.check, f"{severity:g} {fault.unit}".strip(), tally)


def top_p_row(folder: Path, top_p: float, trials: int) -> dict[str, Any]:
    """Trials sampled with top-p by vLLM and scored without it: real on both sides."""
    flags = f"--rollout-dtype bfloat16 --trainer-dtype bfloat16 --top-p {top_p:g}"
    pool = load_pool(folder, f"cut{top_p:g}", flags, ())
    cache = folder / f"cut{top_p:g}-whole"
    add_variants(pool, Trace.open(folder / f"cut{top_p:g}"), cache, ["temperature1"])
    pool.use("temperature1")
    rng, tally = np.random.default_rng(3), Tally()
    for trial in range(trials):
        drawn, cell = pool.take(draw(pool, rng)), "top-K"
        if trial % 2:
            cell = "plain"
            sampled_alone(drawn)
        tally.add("truncated-support", judged(drawn, {}), cell)
    return _row("top-p in the engine only", "truncated-support", f"top_p {top_p:g}", tally)


def _row(name: str, check: str, severity: str, tally: Tally) -> dict[str, Any]:
    right, beside = tally.right(check), tally.beside.pop("any", 0)
    others = {cause: count for cause, count in tally.named.most_common() if cause != check}
    print(
        f"| {name} | `{check}` | {severity} | {right} | {tally.trials} | {_counts(others)} | "
        f"{beside} | {_counts(tally.beside)} |",
        flush=True,
    )
    return {
        "fault": name,
        "check": check,
        "severity": severity,
        "right": right,
        "of": tally.trials,
        "named": others,
        "beside": beside,
        "wrong": tally.wrong,
        "large": tally.large,
        "large_named": tally.large_named,
        "false": dict(tally.beside),
        "right_in": {
            cell: counts[check] + counts[IN_THE_SET] for cell, counts in tally.cells.items()
        },
    }


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in Counter(counts).most_common() if count)


if __name__ == "__main__":
    main()
