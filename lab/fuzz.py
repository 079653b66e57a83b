"""The properties of tests/fuzz on many more cases than CI has time for: counts by kind of input and
outcome.

    python -m lab.fuzz [--cases 10000] [--only dumps] [--seed 0]

No traceback, no hang, nothing executed, nothing lost, no control characters on the terminal, no
markup from the data in a page; imported responses and those left out for a reason add up to all.
Failures are counted, and one case is shown for each place in the code.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
sys.path.insert(0, str(Path(__file__).parents[1]))

from hypothesis import HealthCheck, Phase, given, seed, settings

from mismatch_cli.models.torch_settings import prepare_imports

prepare_imports()

from tests.fuzz import hostile, properties  # noqa: E402 - their imports need the line before
from tests.fuzz.world import HangError  # noqa: E402

_ALIKE, _SHOWN = 90, 400  # characters of a failure that identify it, and of a case
SHARES = {
    "arguments": 0.26, "prompt files": 0.12, "manifests": 0.09, "shards": 0.13, "dumps": 0.13,
    "settings": 0.08,
    "masks": 0.05, "rewards": 0.02, "chat templates": 0.03, "server answers": 0.085, "bombs": 0.005,
}  # fmt: skip
KINDS = properties.KINDS | hostile.KINDS


def many(
    name: str, kind: properties.Kind, cases: int, first: int
) -> tuple[Counter[str], dict[str, str]]:
    """Outcomes of a number of cases, and one example of each failure."""
    counts: Counter[str] = Counter()
    failures: dict[str, str] = {}

    @seed(first)
    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(kind.cases)
    def one(case: Any) -> None:
        try:
            outcome = kind.check(case)
        except (Exception, HangError) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__} in {where.name}: {error}"
            outcome = "FAILED"
            failures.setdefault(what[:_ALIKE], f"{what[:600]}\n    {str(case)[:_SHOWN]}")
        counts[outcome] += 1
        if counts.total() % 200 == 0:
            print(f"{name}: {counts.total()}", file=sys.stderr, flush=True)

    one()
    return counts, failures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    total = failed = 0
    for name, kind in KINDS.items():
        if options.only in (None, name):
            share = 1.0 if options.only else SHARES[name]
            counts, failures = many(name, kind, round(options.cases * share), options.seed)
            total += counts.total()
            failed += counts["FAILED"]
            outcomes = " · ".join(f"{what} {n}" for what, n in counts.most_common())
            print(f"{name}: {counts.total()}: {outcomes}", flush=True)
            for example in failures.values():
                print(f"  {example}", flush=True)
    print(f"{total} cases, {failed} failures")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
