"""Trains a tiny mixture of experts and records it twice: `python -m lab.makers.make_moe --model
DIR` writes DIR, traces/moe and traces/moe-replayed.

The model is trained like the bundled dense one, on the same problems; it is not bundled. The
Hugging Face engine samples in bfloat16 and records the experts of every token; the trainer scores
in float32 with its own experts, and then with the engine's (R3).
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch

from lab.makers import SAMPLE_DATA
from lab.makers.make_model import train_with_progress
from lab.makers.make_traces import flags_of
from lab.makers.tokenizer import train_tokenizer
from lab.makers.train_model import Recipe
from mismatch_cli.app.progress import TerminalProgress
from mismatch_cli.probe.config import ProbeConfig, RescoreConfig
from mismatch_cli.probe.record import record
from mismatch_cli.probe.rescore import rescore

RECIPE = Recipe(steps=800, experts=8)
NAME = "tiny-moe"  # of the model in the manifests
RESPONSES = 192
PROBE = {
    "model": NAME,
    "prompts": "problems.jsonl",
    "num_prompts": RESPONSES // 2,
    "samples_per_prompt": 2,
    "max_tokens": 128,
    "engine": "hf",
    "rollout_dtype": "bfloat16",
    "trainer_dtype": "float32",
    "top_logprobs": 4,
    "keep_routes": RESPONSES,
}


def train_model(folder: Path) -> None:
    """Trains the model, in a quarter of an hour on one thread."""
    torch.set_num_threads(1)
    tokenizer = train_tokenizer(RECIPE.seed)
    train_with_progress(tokenizer, RECIPE).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)


def main() -> None:
    """Records under temporary names, and replaces the bundled traces at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, required=True, help="folder for the model; an existing one is used"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=SAMPLE_DATA / "traces",
        help="for the traces (default: traces/ here)",
    )
    arguments = parser.parse_args()
    model, output = arguments.model.resolve(), arguments.output.resolve()
    if not model.exists():
        train_model(model)
    progress = TerminalProgress(quiet=False)
    with tempfile.TemporaryDirectory() as temporary:
        # The manifests name model and problems by their paths from here
        os.chdir(temporary)
        Path(NAME).symlink_to(model)
        shutil.copy(SAMPLE_DATA / "problems.jsonl", ".")
        probe = ProbeConfig.of(PROBE)
        record(probe, Path("moe"), {"flags": flags_of(probe) | {"model": NAME}}, progress)
        flags = {
            "trace": "moe",
            "trainer_model": NAME,
            "trainer_dtype": "float32",
            "replay_routes": True,
        }
        named = {"command": "rescore", "flags": flags}
        rescore(RescoreConfig.of(flags), Path("moe-replayed"), named, progress)
        for name in ("moe", "moe-replayed"):
            shutil.rmtree(output / name, ignore_errors=True)
            shutil.copytree(Path(name) / "trace", output / name)


if __name__ == "__main__":
    main()
