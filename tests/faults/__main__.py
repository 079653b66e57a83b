"""Plant faults and print those that the push tier does not notice; `python -m tests.faults`."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from tests import faults as faults_package
from tests.faults import reach
from tests.faults.operators import Fault, all_faults, package_digest
from tests.faults.trials import Copy, Verdict, run_trials
from tests.paths import ROOT

RECORDED = ROOT / "build" / "faults"
DIGEST = RECORDED / "package"  # whose lines were recorded
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
app = typer.Typer(add_completion=False, help=faults_package.__doc__)


@app.command()
def record(paths: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Note which tests of the push tier run which lines: all of them, or again those of PATHS."""
    RECORDED.mkdir(parents=True, exist_ok=True)
    for stale in RECORDED.iterdir() if not paths else ():
        stale.unlink()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Copy(Path(folder) / "checkout")
        line = [sys.executable, "-m", "pytest", "-q", "-p", "tests.faults.reach"]
        line += ["-m", "not slow", *(paths or ["-n", "2", "--dist", "loadfile"])]
        environment = {**os.environ, "PYTHONPATH": str(copy.folder), reach.FOLDER: folder}
        subprocess.run(line, cwd=copy.folder, env=environment, check=False)
        part = len(list(RECORDED.glob("*.json")))
        for path in [*Path(folder).glob("*.db"), *Path(folder).glob("*.json")]:
            shutil.move(path, RECORDED / f"{part:04}-{path.name}")
    DIGEST.write_text(package_digest(), encoding="utf-8")
    print(f"{len(reach.Reach.gathered(RECORDED).seconds)} tests")


@app.command()
def plant(
    seed: Annotated[int, typer.Option(help="Which faults are drawn.")] = 1,
    number: Annotated[int, typer.Option(help="How many.")] = 200,
    only: Annotated[list[str] | None, typer.Option(help="These, by name.")] = None,
    seconds: Annotated[float, typer.Option(help="Of tests against one fault.")] = 60.0,
    at_a_time: Annotated[int, typer.Option(help="Processes.")] = 2,
) -> None:
    """Plant faults, each against the tests that run its line; print the survivors.

    Started again with the same seed, it continues where it was.
    """
    # The recorded lines have their numbers in the package as it was then
    if not DIGEST.is_file() or DIGEST.read_text(encoding="utf-8") != package_digest():
        raise typer.BadParameter("the package has changed: first `python -m tests.faults record`")
    equivalent = equivalent_faults()
    reached = reach.Reach.gathered(RECORDED)
    faults = named(only) if only else drawn(seed, number)
    recording = RECORDED / f"seed-{seed}.jsonl"
    verdicts = [] if only else recorded_verdicts(recording)
    judged = {verdict.name for verdict in verdicts}
    planned = []
    for fault in faults:
        if fault.name not in judged:
            tests = reached.of(fault, seconds)
            planned.append((fault, tests, sum(reached.seconds[test] for test in tests)))
    for verdict in run_trials(planned, at_a_time):
        verdicts.append(verdict)
        if not only:
            with recording.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
        said = f"{len(verdicts)}/{len(faults)} {verdict.outcome} {verdict.seconds:.0f} s"
        print(f"{said} {verdict.name} {verdict.by}", flush=True)
    summarise(verdicts, equivalent)


def recorded_verdicts(path: Path) -> list[Verdict]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [Verdict(**json.loads(line)) for line in lines]


@app.command()
def show(names: list[str]) -> None:
    """What the named faults change."""
    for fault in named(names):
        print(fault.shown())


def drawn(seed: int, number: int) -> list[Fault]:
    return random.Random(seed).sample(all_faults(), number)


def named(names: list[str]) -> list[Fault]:
    by_name = {fault.name: fault for fault in all_faults()}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise typer.BadParameter(f"no such fault: {', '.join(unknown)}")
    return [by_name[name] for name in names]


def equivalent_faults() -> set[str]:
    """The names of those whose changes `equivalent.toml` lists."""
    listed = set()
    for changes_of in tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).values():
        for path, changes in changes_of.items():
            listed |= {(path, change) for change in changes}
    faults = {fault.name: (fault.path, fault.change()) for fault in all_faults()}
    gone = sorted(listed.difference(faults.values()))
    if gone:
        changes = "\n".join(": ".join(change) for change in gone)
        raise typer.BadParameter(f"equivalent.toml lists what no line says any more:\n{changes}")
    return {name for name, change in faults.items() if change in listed}


def summarise(verdicts: list[Verdict], equivalent: set[str]) -> None:
    """The rates by operator and by room, and every survivor."""
    counted = pd.DataFrame(verdict for verdict in verdicts if verdict.name not in equivalent)
    counted["noticed"] = counted["outcome"] != "survived"
    parts = {"operator": counted["name"].str.split(":").str[2]}
    parts["room"] = counted["name"].str.split("/").str[0]
    for title, part in parts.items():
        rates = counted.groupby(part.rename(title))["noticed"].agg(["sum", "count"])
        print(f"\n{rates.sort_values('count', ascending=False).to_string()}")
    survivors = counted[~counted["noticed"]].set_index("name")["tests"]
    print("\nsurvivors")
    for fault in named(sorted(survivors.index)):
        print(f"  {fault.name} ({survivors[fault.name]} tests)\n    {fault.shown()}")
    left_out = len(verdicts) - len(counted)
    share = counted["noticed"].mean()
    print(f"\n{share:.1%} of {len(counted)} noticed; {left_out} equivalent left out")


if __name__ == "__main__":
    app()
