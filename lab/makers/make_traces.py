"""Records the bundled traces of the dense model with vLLM: `python -m lab.makers.make_traces`
writes traces/float32 and traces/bfloat16.

The first is the control: everything in float32 at equal weights. The second is what most people
run, bfloat16 on both sides at equal weights, on enough tokens to show how the ratio fans out at
small μ (arXiv 2602.04879, figure 2). traces/fp8-kv is not made again: sample_data/README.md says
how it was recorded.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from lab.makers import SAMPLE_DATA
from mismatch_cli.app.progress import TerminalProgress
from mismatch_cli.base.options import replace_settings, values_by_key
from mismatch_cli.probe.config import ProbeConfig
from mismatch_cli.probe.record import record

MODEL = "sample_data/model"

CONTROL = ProbeConfig.of(
    {
        "model": MODEL,
        "prompts": "sample_data/problems.jsonl",
        "num_prompts": 24,
        "max_tokens": 128,
        "trainer_dtype": "float32",
        "samples_per_prompt": 4,
        "top_logprobs": 20,
        "rollout_dtype": "float32",
    }
)
PRECISION = replace_settings(
    CONTROL,
    num_prompts=128,
    trainer_dtype="bfloat16",
    samples_per_prompt=2,
    top_logprobs=8,
    rollout_dtype="bfloat16",
)


def flags_of(config: ProbeConfig) -> dict[str, Any]:
    """The flags that `probe --like` takes over: all non-default ones, without the bundled paths,
    which it finds.
    """
    usual, bundled = values_by_key(ProbeConfig()), ("model", "prompts")
    return {
        key: value
        for key, value in values_by_key(config).items()
        if key not in bundled and value != usual[key]
    }


def main() -> None:
    """Records both traces under temporary names, and replaces the bundled ones at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output",
        type=Path,
        default=SAMPLE_DATA / "traces",
        help="for the traces (default: traces/ here)",
    )
    output = parser.parse_args().output.resolve()
    os.chdir(
        SAMPLE_DATA.parent
    )  # the manifests name the model and the problems by their paths from here
    progress = TerminalProgress(quiet=False)
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary)
        record(CONTROL, run, {"flags": flags_of(CONTROL)}, progress)
        record(PRECISION, run / "precision", {"flags": flags_of(PRECISION)}, progress)
        made = {
            "float32": run / "trace",
            "bfloat16": run / "precision" / "trace",
        }
        for name, recorded in made.items():
            shutil.rmtree(output / name, ignore_errors=True)
            shutil.copytree(recorded, output / name)


if __name__ == "__main__":
    main()
