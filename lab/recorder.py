"""The cost of recording for a run: seconds on its thread, compared with a plain numpy copy of the
same columns.

    python -m lab.recorder [--responses 512] [--tokens 1000] [--rounds 20] [--every 1] [--check]

Each round is a step: every column of its responses is copied with `numpy.copy`, then passed to a
recorder, response by response (`add`) or as padded matrices (`add_padded`, compared with a copy of
the matrices); the recorder writes during the rest of the step (`flush`, timed separately). Ratios
are within a round; medians and ranges. With `--check` a median above 5 gives exit code 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mismatch_cli import Recorder

_TARGET = 5.0
_PROMPT = 200


def padded(step: int, count: int, tokens: int) -> dict[str, Any]:
    """Matrices of responses that fill half to all of their rows."""
    rng = np.random.default_rng(step)
    logp_ST = -rng.exponential(1.0, (count, tokens)).astype(np.float32)
    return {
        "prompt_id": np.arange(count) // 8,
        "sample_index": np.arange(count) % 8,
        "prompt_ids": rng.integers(0, 1000, (count, _PROMPT)),
        "response_ids": rng.integers(0, 1000, (count, tokens)),
        "prompt_mask": np.ones((count, _PROMPT), bool),
        "response_mask": np.arange(tokens) < rng.integers(tokens // 2, tokens + 1, count)[:, None],
        "logp_rollout": logp_ST,
        "logp_trainer": logp_ST - np.float32(0.01),
        "advantage": np.full((count, tokens), 0.5, np.float32),
        "reward": np.ones(count),
    }


def apart(matrices: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the matrices, one response each, without the masks."""
    names = [name for name in matrices if name not in ("prompt_mask", "response_mask")]
    rows = zip(*(matrices[name] for name in names), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def copy(rows: list[dict[str, Any]]) -> list[np.ndarray]:
    """Copies of a step's columns, which live until it ends, as in every recording."""
    copies: list[np.ndarray] = []
    for row in rows:
        copies += map(np.copy, row.values())
    return copies


def hand_over(rows: list[dict[str, Any]], step: int, recorded: Callable[..., None]) -> None:
    for row in rows:
        recorded(step=step, **row)


def seconds(work: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    result = work(*arguments)
    took = time.perf_counter() - began
    del result
    return took


def race(options: argparse.Namespace, form: str) -> float:
    """Print and return the median ratio of recording to copying."""
    copies, handovers, written = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(f"{folder}/run", every=options.every)
        for step in range(options.rounds):
            matrices = padded(step, options.responses, options.tokens)
            rows = apart(matrices) if form == "add" else [matrices]
            copies.append(seconds(copy, rows))
            handovers.append(seconds(hand_over, rows, step, getattr(recorder, form)))
            written.append(seconds(recorder.flush))
        recorder.close()
        responses = recorder.counts["written"] + recorder.counts["not sampled"]
        assert responses == options.rounds * options.responses, recorder.counts
    ratios = [mine / plain for mine, plain in zip(handovers, copies, strict=True)]
    mine = statistics.median(handovers) / options.responses * 1e6
    plain = statistics.median(copies) / options.responses * 1e6
    times = f"{statistics.median(ratios):.2f} times ({min(ratios):.2f}–{max(ratios):.2f})"
    disk = f"on disk after {statistics.median(written):.2f} s"
    print(f"{form:<11}{mine:7.1f} µs a response, a copy {plain:.1f}: {times}; {disk}")
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument(
        "--check", action="store_true", help=f"exit code 1 above {_TARGET:g} times a copy"
    )
    options = parser.parse_args()
    print(
        f"steps of {options.responses} responses of {options.tokens} tokens, medians of "
        f"{options.rounds}"
    )
    slowest = max([race(options, form) for form in ("add", "add_padded")])
    if options.check and slowest > _TARGET:
        sys.exit(1)


if __name__ == "__main__":
    main()
