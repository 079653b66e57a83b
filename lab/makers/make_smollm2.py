"""Records the bundled traces of a real model, SmolLM2-135M-Instruct: `make real-model`, then
`python -m lab.makers.make_smollm2`; an hour on two cores without bfloat16.

traces/smollm2 is `probe` on questions.jsonl: vLLM and transformers in bfloat16 at equal weights.
traces/smollm2-training is `train` on short_questions.jsonl, its steps joined into one trace: eight
updates a step, so that trust regions have something to block.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.makers import SAMPLE_DATA
from mismatch_cli.trace.columns import TOPK_COLUMNS
from mismatch_cli.trace.manifest import read_manifest, shard_entries, shards_in, write_manifest
from mismatch_cli.trace.reader import open_shard
from mismatch_cli.trace.writer import shard_path, write_shard

HERE = Path(__file__).resolve().parent
QUESTIONS = HERE / "smollm2"
NAME = "SmolLM2-135M-Instruct"  # as the manifests call the model

PROBE = [
    NAME,
    *["--prompts", "questions.jsonl", "--samples-per-prompt", "2", "--max-tokens", "160"],
    *["--top-logprobs", "20", "--noise-responses", "60"],
]
TRAIN = [
    *["--model", NAME, "--threads", "1"],
    *["--dataset", "short_questions.jsonl", "--reward", "mentions_answer.py:mentions_answer"],
    *["--algorithm", "dppo-topk-tv", "--recompute", "--trace-every", "1", "--seed", "1"],
    *["--steps", "2", "--prompts-per-step", "16", "--samples-per-prompt", "8"],
    *["--minibatches", "4", "--epochs", "2", "--learning-rate", "1e-5", "--max-grad-norm", "1"],
    *["--max-tokens", "40", "--eval-every", "0", "--eval-samples", "1", "--checkpoint-every", "99"],
]


def run(command: str, arguments: list[str], folder: Path) -> Path:
    """A run folder in `folder`, by the command as a user types it there."""
    output = folder / f"run-{command}"
    line = [sys.executable, "-m", "mismatch_cli", command, *arguments]
    subprocess.run([*line, "--no-plots", "--output", output], cwd=folder, check=True)
    return output


def join_steps(steps: list[Path], target: Path) -> None:
    """One trace of several: the shards of all, the manifest and the vocabulary of the first.

    The top-K columns are left out: with 20 ranks of three policies they are ten times the rest.
    """
    shutil.copytree(steps[0], target)
    rows = {}
    shards = [shard for step in steps for shard in shards_in(step)]
    for index, shard in enumerate(shards):
        path = shard_path(target, index)
        table = open_shard(shard).read()
        write_shard(path, table.drop_columns(TOPK_COLUMNS))
        rows[path.name] = table.num_rows
    write_manifest(target, read_manifest(target) | shard_entries(rows))


def name_the_model(trace: Path, folder: Path) -> None:
    """Leave the folder out of what the manifest says, so that models and files have their names."""
    manifest = json.dumps(read_manifest(trace)).replace(f"{folder}/", "")
    write_manifest(trace, json.loads(manifest))


def main() -> None:
    """Records both under a temporary name, and replaces the bundled ones at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SAMPLE_DATA.parent / ".real-model")
    parser.add_argument("--output", type=Path, default=SAMPLE_DATA / "traces")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        shutil.copytree(QUESTIONS, folder, dirs_exist_ok=True)
        shutil.copytree(options.model, folder / NAME)
        probed = run("probe", PROBE, folder) / "trace"
        trained = run("train", TRAIN, folder) / "traces"
        steps = sorted(trained.iterdir(), key=lambda step: int(step.name.removeprefix("step-")))
        join_steps(steps, folder / "joined")
        for name, made in {"smollm2": probed, "smollm2-training": folder / "joined"}.items():
            name_the_model(made, folder)
            shutil.rmtree(options.output / name, ignore_errors=True)
            shutil.copytree(made, options.output / name)


if __name__ == "__main__":
    main()
