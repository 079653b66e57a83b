"""Chooses the bundled training problems: `python -m lab.makers.make_perfectible` rewrites
perfectible.jsonl.

It runs `mismatch-cli curate`, with `confirm`, on the bundled model and problems: 40 samples choose, 40
others confirm. The first of the remaining problems are bundled.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from lab.makers import SAMPLE_DATA
from mismatch_cli.app.progress import TerminalProgress
from mismatch_cli.probe.config import CurateConfig
from mismatch_cli.probe.curate import PROBLEMS_FILE, curate

PROBLEMS = 200
CONFIG = CurateConfig.of(
    {
        "max_tokens": 128,
        "samples_per_prompt": 40,
        "held_out_samples": 40,
        "rollout_dtype": "bfloat16",
        "threads": 1,
    }
)


def main() -> None:
    """Curates into a temporary folder, and keeps the first problems."""
    progress = TerminalProgress(quiet=False)
    with tempfile.TemporaryDirectory() as folder:
        curation = curate(CONFIG, Path(folder), {}, progress, confirm=True)
        lines = (Path(folder) / PROBLEMS_FILE).read_text(encoding="utf-8").splitlines()[:PROBLEMS]
    (SAMPLE_DATA / PROBLEMS_FILE).write_text(
        "".join(f"{line}\n" for line in lines), encoding="utf-8"
    )
    counts = len(curation.accuracy), len(curation.kept), len(curation.confirmed)
    progress.say("{} problems, {} kept, {} confirmed; {} bundled".format(*counts, len(lines)))
    for name in ("accuracy", "held_out_accuracy"):
        mean = sum(json.loads(line)[name] for line in lines) / len(lines)
        progress.say(f"mean {name.replace('_', ' ')} of the bundled: {mean:.3f}")


if __name__ == "__main__":
    main()
