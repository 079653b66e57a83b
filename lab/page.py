"""The cost of a complete page compared with its numbers: CPU time of both, and the size of the
page.

    python -m lab.page [--rounds 5] [--check]

Each round runs the command with `--json` (the numbers: no page, no pictures), without pictures, and
with its default output, each in its own process and an empty folder. User and system time with
children, medians over rounds, and ratios to the numbers of the same round. Bytecode is compiled
before the first round, as it is after a program's first run. With `--check` a ratio above its
target gives exit code 1.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path

from lab.startup import seconds

_TARGETS = {"clipstats": 3.0, "report": 2.0}
_WAYS = {"numbers": ("--json",), "page without pictures": ("--no-plots",), "page": ()}
_CHECKOUT = Path(__file__).resolve().parents[1]


def measure(
    rounds: int,
) -> tuple[dict[tuple[str, str], list[float]], dict[str, tuple[int, int, int]]]:
    """CPU seconds of each way of each command; bytes of its page, of the pictures in it, and of
    files.
    """
    times: dict[tuple[str, str], list[float]] = {
        (name, way): [] for name in _TARGETS for way in _WAYS
    }
    sizes = {}
    with tempfile.TemporaryDirectory() as temporary:
        compiled = {"PYTHONPYCACHEPREFIX": f"{temporary}/compiled", "PYTHONPATH": str(_CHECKOUT)}
        environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
        }
        for number in range(rounds + 1):
            for (name, way), taken in times.items():
                folder = Path(tempfile.mkdtemp(dir=temporary))
                command = [sys.executable, "-m", "mismatch_cli", name, "--quiet", *_WAYS[way]]
                cost = seconds(command, environment | compiled, folder)
                if number:  # the first one compiles
                    taken.append(cost)
                if way == "page":
                    sizes[name] = _sizes(folder / name)
    return times, sizes


def _sizes(folder: Path) -> tuple[int, int, int]:
    page = (folder / "report.html").read_text(encoding="utf-8")
    pictures = sum(map(len, re.findall(r"data:image/svg\+xml;base64,[\w+/=]+", page)))
    return (
        len(page.encode()),
        pictures,
        sum(path.stat().st_size for path in (folder / "plots").iterdir()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--check", action="store_true", help="exit code 1 if a page costs more than its target"
    )
    options = parser.parse_args()
    times, sizes = measure(options.rounds)
    print(f"{'':<36}{'CPU s':>8}{'ratio':>8}{'range':>14}{'target':>8}")
    missed = False
    for (name, way), taken in times.items():
        ratios = [
            cost / numbers for cost, numbers in zip(taken, times[name, "numbers"], strict=True)
        ]
        target = f"{_TARGETS[name]:.1f}" if way == "page" else ""
        above = way == "page" and statistics.median(ratios) > _TARGETS[name]
        missed |= above
        spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
        print(
            f"{f'{name}, {way}':<36}{statistics.median(taken):>8.2f}{statistics.median(ratios):>8.2f}{spread:>14}"
            f"{target:>8}{' missed' if above else ''}"
        )
    for name, (page, pictures, files) in sizes.items():
        print(
            f"{name}: page {page / 1e6:.2f} MB, of it pictures {pictures / 1e6:.2f} MB; files "
            f"{files / 1e6:.2f} MB"
        )
    sys.exit(options.check and missed)


if __name__ == "__main__":
    main()
