"""`mismatch-cli train`'s own loop as a racer of `lab/race.py`: the other side of
`trl_grpo.py`.

The first turn includes loading, so the driver leaves it out. Every step is recorded as in any run
(a line of metrics.jsonl, flushed to disk); checkpoints, traces and evaluations are off, as on the
other side.
"""

from __future__ import annotations

import ready  # noqa: F401

# isort: split
import argparse
import tempfile
from pathlib import Path
from typing import Any

from lab.turns import Turn
from mismatch_cli.base.options import by_key
from mismatch_cli.train.loop import train
from mismatch_cli.train.train_config import TrainConfig, load_config


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="settings of `train`, by field name",
    )
    options = parser.parse_args()
    turn = Turn()
    over = not turn.wait()

    def on_step(record: dict[str, Any]) -> None:
        nonlocal over
        samples = config.prompts_per_step * config.sampler.samples_per_prompt
        phases = {name: seconds for name, seconds in record["seconds"].items() if seconds > 0.0005}
        turn.done(
            samples=samples,
            tokens=round(record["length"] * samples),
            reward=record["reward"],
            phases=phases,
        )
        over = not turn.wait()

    known = by_key(TrainConfig)
    pairs = (item.split("=", 1) for item in options.set)
    changes = {name: known[name].type(value) for name, value in pairs}
    never = {"steps": 100_000, "checkpoint_every": 100_000, "trace_every": 0, "eval_every": 0}
    config = load_config("miniature", never | {"algorithm": "grpo-clip-higher"} | changes)
    if over:
        return
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder), on_step, stop=lambda: over)


if __name__ == "__main__":
    main()
