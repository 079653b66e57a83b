"""The tiers and the parts of the suite, each with the CPU time that it may take.

    python -m tests.tiers push      what `make test` and `.ci/run` run: all that is not marked slow
    python -m tests.tiers all       everything, before a release and every night: `make test-all`
    python -m tests.tiers train     one part, both tiers: `make test-train`

Further arguments go to pytest. A tier whose processes take more CPU seconds than it may fails,
although its tests pass: a new slow test takes its time from others, or is marked slow.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from typing import Any

import pytest

from tests.paths import ROOT

# Folders of tests/ by what one works on; "house" also has the files beside these folders.
PARTS = {
    "rules": ("rules",),
    "read": ("trace", "metrics", "processes", "library"),
    "import": ("frameworks",),
    "sample": ("models", "probe", "lab"),
    "train": ("train",),
    "bisect": ("bisect",),
    "watch": ("watch",),
    "judge": ("diagnosis", "studies", "limits"),
    "show": ("report", "golden"),
    "commands": ("app", "fuzz", "docs"),
    "house": ("base",),
}
# CPU seconds of all processes, on a processor with AVX-512: half as much again as measured (590 to
# 700 alone, 810 beside other work; 1,700 for everything)
CPU_SECONDS = {"push": 1100, "all": 3600}
# Without AVX-512 torch and vLLM emulate bfloat16 (measured: 1,640 beside other work)
_WITHOUT_AVX512 = 2.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tiers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=[*CPU_SECONDS, *PARTS])
    parser.add_argument("--workers", type=int, default=2, help="test processes (default: 2)")
    options, for_pytest = parser.parse_known_args(arguments)
    line = [sys.executable, "-m", "pytest", "-n", str(options.workers)]
    line += ["--dist", "loadfile", "--no-loadscope-reorder", "--durations", "20"]
    try:
        code = subprocess.run(
            [*line, *selection(options.name), *for_pytest], cwd=ROOT, env=environment()
        ).returncode
    except KeyboardInterrupt:
        return 130
    used = cpu_seconds_of_children()
    allowed = cpu_seconds_allowed(options.name)
    print(f"{used:.0f} CPU seconds" + (f", of at most {allowed:.0f}" if allowed else ""))
    if code == 0 and allowed and used > allowed:
        print("Too much: the slowest are above; mark one `slow`, or take its time from others.")
        return 1
    return code


def cpu_seconds_allowed(tier: str) -> float | None:
    """What a tier may take on this processor; None for a part."""
    import torch

    allowed = CPU_SECONDS.get(tier)
    if allowed is None or torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return allowed
    return _WITHOUT_AVX512 * allowed


def selection(name: str) -> list[str]:
    """What pytest is given to run a tier or a part."""
    if name == "push":
        return ["-m", "not slow"]
    return [] if name == "all" else paths(name)


def paths(part: str) -> list[str]:
    """Folders and files of a part, from the root of the project."""
    if part == "house":
        beside = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*.py"))
    else:
        beside = []
    return [f"tests/{folder}" for folder in PARTS[part]] + beside


def environment() -> dict[str, str]:
    """Ours, but the bytecode of tests and package is kept: hundreds of processes import them."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def at_night(*values: Any) -> list[Any]:
    """Cases of `parametrize` that only the second tier runs."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def cpu_seconds_of_children() -> float:
    """Of all ended descendants whose parents waited for them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
