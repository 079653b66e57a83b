"""What recording costs the run: seconds on its own thread, beside a plain numpy copy of the same columns.

    python benchmarks/recorder.py [--responses 512] [--tokens 1000] [--rounds 20] [--check]

Each round is a step: every column of its responses is copied with `numpy.copy`, then the same is handed to a recorder,
which has the rest of the step to write (`flush`, timed apart). Ratios are within a round; medians and ranges. With
`--check` a median above 5 is exit code 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np

from mismatch_cli.record import Recorder

_TARGET = 5.0
_LISTS = ("response_ids", "logp_rollout", "logp_trainer", "advantage")


def responses(step: int, count: int, tokens: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(step)
    rows = []
    for number in range(count):
        logq_T = -rng.exponential(1.0, tokens).astype(np.float32)
        rows.append(
            {
                "step": step, "prompt_id": number // 8, "sample_index": number % 8,
                "prompt_ids": rng.integers(0, 1000, 200), "response_ids": rng.integers(0, 1000, tokens),
                "logp_rollout": logq_T, "logp_trainer": logq_T - 0.01,
                "advantage": np.full(tokens, 0.5, np.float32), "reward": 1.0,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--check", action="store_true", help=f"exit code 1 above {_TARGET:g} times a copy")
    options = parser.parse_args()
    copies, adds, ratios, written = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(f"{folder}/run")
        for step in range(options.rounds):
            rows = responses(step, options.responses, options.tokens)
            began = time.perf_counter()
            for row in rows:
                for value in row.values():
                    np.copy(value)
            copies.append(time.perf_counter() - began)
            began = time.perf_counter()
            for row in rows:
                recorder.add(**row)
            adds.append(time.perf_counter() - began)
            recorder.flush()
            written.append(time.perf_counter() - began)
            ratios.append(adds[-1] / copies[-1])
        recorder.close()
    per, span = 1e6 / options.responses, f"{min(ratios):.2f}–{max(ratios):.2f}"
    print(f"steps of {options.responses} responses of {options.tokens} tokens, medians of {options.rounds}")
    print(f"numpy copy  {statistics.median(copies) * per:8.1f} µs a response")
    print(f"add         {statistics.median(adds) * per:8.1f} µs, {statistics.median(ratios):.2f} times a copy ({span})")
    print(f"on disk after {statistics.median(written):.2f} s")
    if options.check and statistics.median(ratios) > _TARGET:
        sys.exit(1)


if __name__ == "__main__":
    main()
