"""How well `mismatch-cli bisect` finds planted causes: `python -m lab.bisection --folder F`.

A row is a cause on a model: what is named first, its share, and how often it is named first in 100
resamples of the prompts over the recorded legs (which run no model). Further tables: float32 on
both sides, where nothing may be named; two causes at once, whose shares are compared with those on
many more prompts; and the time of the search compared with that of the probe that made its trace.
`--plants` prints how large a gap each cause makes instead.

(Not called bisect.py: programs in this folder would import it instead of Python's own `bisect`.)
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from mismatch_cli.models.torch_settings import prepare_imports

prepare_imports()
from mismatch_cli.app.cli import run as cli  # noqa: E402
from mismatch_cli.bisect.ranking import rank  # noqa: E402
from mismatch_cli.bisect.studies.bisection import BisectionAnalysis  # noqa: E402
from mismatch_cli.trace.reader import Trace  # noqa: E402
from tests.bisect.planted import BUNDLED, MODELS, PLANTS, Bed, Plant, Planted, Typed  # noqa: E402
from tests.warm import Forked  # noqa: E402

RESAMPLES, HEALTHY_SEEDS = 100, 5
LIMIT = 0.95  # of the resamples
NOTHING = "nothing"


def main() -> None:
    options = command_line().parse_args()
    # This checkout in every child
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    folder = options.folder.resolve()
    beds = [Bed(folder, name, typed) for name in options.models.split(",")]
    chosen = [plant for plant in PLANTS if options.only in plant.name]
    if options.plants:
        show(plants_table(beds, chosen))
        return
    parts = {"causes": lambda: causes_table(beds, chosen), "healthy": lambda: healthy_table(folder)}
    parts |= {"pairs": lambda: pairs_table(folder), "time": lambda: times_table(folder)}
    # A table is computed while it is printed, a name without a table ends here
    for table in [parts[name]() for name in options.parts.split(",")]:
        show(table)


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="models and runs; finished runs are not repeated"
    )
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--only", default="", help="causes whose name contains this")
    parser.add_argument(
        "--plants", action="store_true", help="print the gap of each cause, without `bisect`"
    )
    parser.add_argument(
        "--parts",
        default="causes,healthy,pairs,time",
        help="parts of the benchmark, comma-separated",
    )
    return parser


def show(table: Iterator[str]) -> None:
    for line in table:
        print(line, flush=True)
    print(flush=True)


def typed(line: list[str]) -> None:
    """Run a command in a fork of a process that has imported vLLM; keeps its seconds next to its
    folder.
    """
    run = Path(line[line.index("--output") + 1])
    shutil.rmtree(run, ignore_errors=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    process = Forked("mismatch_cli", *line)
    said = process.ended(within=1800)
    if process.returncode:
        raise RuntimeError(f"mismatch-cli {' '.join(line)}: {said[-2000:]}")
    run.with_suffix(".seconds").write_text(f"{time.perf_counter() - began:.1f}")


def typed_here(line: list[str]) -> None:
    """Run a command in this process, in which a part of vLLM was replaced."""
    run = Path(line[line.index("--output") + 1])
    shutil.rmtree(run, ignore_errors=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    began, said = time.perf_counter(), io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(said):
        code = cli(line)
    if code:
        raise RuntimeError(f"mismatch-cli {' '.join(line)}: {said.getvalue()[-2000:]}")
    run.with_suffix(".seconds").write_text(f"{time.perf_counter() - began:.1f}")


@dataclass(frozen=True)
class Bisected:
    """A finished search, from now or earlier."""

    folder: Path

    @classmethod
    def of(cls, planted: Planted, by: Typed = typed) -> Bisected:
        run = planted.run
        folder = run.parents[2] / "bisected" / run.parent.name / run.name
        if not (folder / "summary.json").exists():
            flags = [*planted.flags, "--no-plots", "--quiet", "--output", str(folder)]
            by(["bisect", str(run), *flags])
        return cls(folder)

    @property
    def summary(self) -> dict[str, Any]:
        """What `--json` prints."""
        return dict(json.loads((self.folder / "summary.json").read_text()))

    @property
    def seconds(self) -> float:
        return float(self.folder.with_suffix(".seconds").read_text())

    def first_of_resamples(self, rounds: int = RESAMPLES) -> list[dict[str, Any] | None]:
        """The first cause in each resample of the prompts, with replacement, over the recorded
        legs.
        """
        held = BisectionAnalysis.read(self.folder)
        prompts, prompt_S = np.unique(held.measured.tokens.prompt_id_S, return_inverse=True)
        rng = np.random.default_rng(0)
        first_causes: list[dict[str, Any] | None] = []
        for _ in range(rounds):
            # Prompts are drawn, not responses: the responses to one prompt are alike
            count_P = rng.multinomial(len(prompts), np.full(len(prompts), 1 / len(prompts)))
            weight_S = count_P[prompt_S].astype(float)
            causes = rank(held.measured, held.search, weight_S, details=False).causes
            if causes:
                first = causes[0].experiment
                first_causes.append({"setting": first.setting, "parts": first.parts})
            else:
                first_causes.append(None)
        return first_causes


def causes_table(beds: Sequence[Bed], plants: Sequence[Plant]) -> Iterator[str]:
    """One row for each cause on each model."""
    head = (
        "cause",
        "model",
        "named first",
        "share",
        "left unexplained",
        "right of 100",
        "instead",
        "s",
        "probe s",
    )
    yield f"{_row(*head)}\n|{'---|' * len(head)}"
    right = cells = 0
    for plant in plants:
        for bed in beds:
            if bed.name in plant.models:
                texts, is_right = _cause(plant, bed)
                right += is_right
                cells += 1
                yield _row(plant.name, bed.name, *texts)
    yield f"\n{right} of {cells}: named first, and in at least {LIMIT:.0%} of the resamples."


def _cause(plant: Plant, bed: Bed) -> tuple[tuple[str, ...], bool]:
    """The texts of a row, and whether the cause was named first, in enough resamples too."""
    try:
        planted, bisected = _bisected(plant, bed)
    except RuntimeError as error:
        return (f"refused: {' '.join(str(error).split())[-300:]}",), False
    summary = bisected.summary
    others: Counter[str] = Counter()
    hits = 0
    for cause in bisected.first_of_resamples():
        if cause is not None and plant.is_named_by(cause):
            hits += 1
        else:
            others[_name(cause)] += 1
    share, named, first = "", False, None
    if summary["causes"]:
        first = summary["causes"][0]
        share, named = _percent(first["share"]), plant.is_named_by(first)
    said = f"`{_name(first)}`" if named else f"**no**: `{_name(first)}`"
    instead = ", ".join(f"{name} {count}" for name, count in others.most_common())
    probe = planted.run.with_suffix(".seconds")
    seconds = (f"{bisected.seconds:.0f}", probe.read_text() if probe.exists() else "")
    left = _percent(summary["unexplained"])
    is_right = named and hits >= LIMIT * RESAMPLES
    return (said, share, left, str(hits), instead, *seconds), is_right


def _bisected(plant: Plant, bed: Bed) -> tuple[Planted, Bisected]:
    if plant.here is None:
        planted = plant.make(bed)
        return planted, Bisected.of(planted)
    with plant.here():
        planted = plant.make(bed.by(typed_here))
        return planted, Bisected.of(planted, typed_here)


def _name(cause: dict[str, Any] | None) -> str:
    return NOTHING if cause is None else str(cause["setting"])


def _percent(estimate: dict[str, Any]) -> str:
    if estimate["value"] is None:
        return ""
    value = f"{100 * estimate['value']:.1f} %"
    if estimate["low"] is None:
        return value
    return f"{value} ({100 * estimate['low']:.1f} to {100 * (estimate['high'] or 0):.1f})"


def healthy_table(folder: Path) -> Iterator[str]:
    """float32 against float32, on different prompts each time: nothing may be named."""
    yield "| float32 on both sides | gap | causes | resamples with a cause |\n|---|---|---|---|"
    for seed in range(HEALTHY_SEEDS):
        flags = f"{_SHUFFLED} --num-prompts 32 --seed {seed}"
        bed = Bed(folder, BUNDLED, typed, flags, f"healthy-{seed}")
        bisected = Bisected.of(Planted(bed.clean()))
        drawn = RESAMPLES - bisected.first_of_resamples().count(None)
        named = ", ".join(map(_name, bisected.summary["causes"])) or NOTHING
        yield _row(f"seed {seed}", f"{gap(bed.clean()):.1e}", named, f"{drawn} of {RESAMPLES}")


_SHUFFLED = "--shuffle --samples-per-prompt 2 --max-tokens 48 --top-logprobs 0"


def pairs_table(folder: Path) -> Iterator[str]:
    from lab.bisection_pairs import pairs_rows

    yield from pairs_rows(folder, typed, Bisected)


def times_table(folder: Path) -> Iterator[str]:
    """The time of `bisect` compared with the probe of the bundled model that made its trace."""
    bed = Bed(folder, BUNDLED, typed, "", "timed")
    planted = Planted(bed.probed("default", dtype="bfloat16"))
    bisected = Bisected.of(planted)
    probe = float(planted.run.with_suffix(".seconds").read_text())
    yield "| stage | seconds | × the probe |\n|---|---|---|"
    yield _row("probe, as it is without flags, in bfloat16", f"{probe:.1f}", "1")
    summary = bisected.summary
    for stage in summary["stages"]:
        name = f"{stage['stage']} {stage['name']}"
        if stage["status"] != "done":
            name += f" ({stage['status']})"
        yield _row(name, f"{stage['seconds']:.1f}", f"{stage['seconds'] / probe:.1f}")
    yield _row(
        "`bisect`", f"{bisected.seconds:.1f}", f"**{bisected.seconds / probe:.1f}**, target 10"
    )
    for leg in summary["legs"]:
        yield _row(f"leg: {leg['what']}", f"{leg['seconds']:.1f}", f"{leg['responses']} responses")


def plants_table(beds: Sequence[Bed], plants: Sequence[Plant]) -> Iterator[str]:
    """The gap of each cause on each model, and in brackets how many times the clean gap."""
    yield (
        f"| mean \\|Δlog p\\|, nats | {' | '.join(bed.name for bed in beds)} |\n"
        f"|---|{'---|' * len(beds)}"
    )
    for dtype in dict.fromkeys(plant.dtype for plant in plants):
        yield _row(f"nothing planted, {dtype}", *(f"{gap(bed.clean(dtype)):.1e}" for bed in beds))
    # A cause may be planted in another way on another model
    cells: dict[str, dict[str, Plant]] = {}
    for plant in plants:
        cells.setdefault(plant.name, {}).update(dict.fromkeys(plant.models, plant))
    for name, of_model in cells.items():
        yield _row(name, *(_against_clean(of_model.get(bed.name), bed) for bed in beds))


def _against_clean(plant: Plant | None, bed: Bed) -> str:
    if plant is None:
        return ""
    try:
        made = gap(_planted(plant, bed).run)
    except RuntimeError as error:
        return f"refused: {' '.join(str(error).split())[-160:]}"
    return f"{made:.1e} ({made / gap(bed.clean(plant.dtype)):.2g} ×)"


def _planted(plant: Plant, bed: Bed) -> Planted:
    if plant.here is None:
        return plant.make(bed)
    with plant.here():
        return plant.make(bed.by(typed_here))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def gap(run: Path) -> float:
    """Mean |Δlog p|, nats."""
    batches = list(Trace.open(run).batches())
    d_T = np.concatenate([batch.logp_trainer_T - batch.logp_rollout_T for batch in batches])
    return float(np.abs(d_T).mean())


if __name__ == "__main__":
    main()
