"""What `mismatch-cli bisect` finds of causes that were planted: `python benchmarks/bisection.py --folder F`.

`--plants` prints how large a gap each cause makes beside the clean gap of the same model. (This file is not called
bisect.py: a program in this folder would import it in place of Python's own `bisect`.)
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from mismatch_cli.torch_settings import prepare_imports

prepare_imports()
from mismatch_cli.trace.reader import Trace  # noqa: E402
from tests.bisect.planted import MODELS, PLANTS, Bed, Plant  # noqa: E402
from tests.warm import Forked  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="models and runs; finished runs are not repeated")
    parser.add_argument("--models", default=",".join(MODELS), help="with commas between")
    parser.add_argument("--only", default="", help="causes whose name holds this")
    parser.add_argument("--plants", action="store_true", help="how large a gap each cause makes, without `bisect`")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}  # this checkout in every child
    folder = options.folder.resolve()
    beds = [Bed(folder, name, typed) for name in options.models.split(",")]
    chosen = [plant for plant in PLANTS if options.only in plant.name]
    for line in plants_table(beds, chosen):
        print(line, flush=True)


def typed(line: list[str]) -> None:
    """In a process of its own, forked from one that has imported vLLM."""
    run = Path(line[line.index("--output") + 1])
    shutil.rmtree(run, ignore_errors=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    process = Forked("mismatch_cli", *line)
    said = process.ended(within=900)
    if process.returncode:
        raise RuntimeError(f"mismatch-cli {' '.join(line)}: {said[-2000:]}")


def plants_table(beds: list[Bed], plants: list[Plant]) -> Iterator[str]:
    """The gap of each cause on each model, and in brackets how many times the clean gap that is."""
    yield f"| cause | {' | '.join(bed.name for bed in beds)} |\n|---|{'---|' * len(beds)}"
    for dtype in dict.fromkeys(plant.dtype for plant in plants):
        yield _row(f"nothing, {dtype}", [f"{_gap(bed.clean(dtype)):.2e}" for bed in beds])
    for plant in plants:
        cells = [_against_clean(plant, bed) if bed.name in plant.models else "" for bed in beds]
        yield _row(plant.name, cells)


def _against_clean(plant: Plant, bed: Bed) -> str:
    try:
        gap = _gap(plant.make(bed).run)
    except RuntimeError as error:
        return f"refused: {' '.join(str(error).split())[-160:]}"
    return f"{gap:.2e} ({gap / _gap(bed.clean(plant.dtype)):.2g} ×)"


def _row(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _gap(run: Path) -> float:
    """Mean |Δlog p|, nats."""
    batches = list(Trace.open(run).batches())
    d_T = np.concatenate([batch.logp_trainer_T - batch.logp_rollout_T for batch in batches])
    return float(np.abs(d_T).mean())


if __name__ == "__main__":
    main()
