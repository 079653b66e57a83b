"""Regenerates the bundled data: `python -m lab.makers.make_model` makes the tokenizer, the model
and the problems.

At the end it measures the stored model and prints the figures of README.md.

One CPU thread and a fixed seed: on the same machine and library versions the weights are identical
bit for bit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table

from lab.makers import SAMPLE_DATA
from lab.makers.measure import load, respond, standard_error
from lab.makers.tokenizer import train_tokenizer
from lab.makers.train_model import Recipe, train
from lab.makers.word_problems import problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PROBLEMS = 512
PROBLEM_SEED = 1_000_003
SAMPLES = 4
REPORT_EVERY = 100

console = Console(stderr=True)


def write_problems(path: Path) -> list[dict[str, str]]:
    """Writes the held-out problems, each text only once."""
    unique = {
        p.text: str(p.answer)
        for p in islice(problems(PROBLEM_SEED, for_training=False), 2 * PROBLEMS)
    }
    rows = [
        {"problem": text, "answer": answer} for text, answer in islice(unique.items(), PROBLEMS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def train_with_progress(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Qwen3ForCausalLM:
    """Trains; shows a bar on a terminal, plain lines elsewhere."""
    columns = (*Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=recipe.steps, loss=float("nan"))
        recent: list[float] = []

        def on_step(step: int, loss: float) -> None:
            recent.append(loss)
            bar.update(task, advance=1, loss=loss)
            if not console.is_terminal and (step + 1) % REPORT_EVERY == 0:
                console.print(
                    f"step {step + 1}/{recipe.steps}  loss {sum(recent) / len(recent):.3f}"
                )
                recent.clear()

        return train(tokenizer, recipe, on_step)


def measure(folder: Path, rows: list[dict[str, str]], dtype: torch.dtype) -> dict[str, str]:
    """The figures of the stored model, computed in `dtype`."""
    model, tokenizer = load(folder, dtype)
    greedy = respond(model, tokenizer, rows, samples=1, seed=0, greedy=True)
    sampled = respond(model, tokenizer, rows, samples=SAMPLES, seed=0)
    error = standard_error(sampled.accuracy_G)
    mixed = sum(0 < a < 1 for a in sampled.accuracy_G) / len(rows)
    n = len(sampled.logp_T)
    figures = {
        "greedy accuracy": f"{greedy.accuracy:.3f} ({len(rows)} problems)",
        "sampled accuracy, T=1": f"{sampled.accuracy:.3f} ± {error:.3f} ({len(rows)} problems x {SAMPLES})",
        f"problems with 0 < accuracy < 1 in {SAMPLES}": f"{mixed:.3f}",
        "response tokens, mean and longest": f"{n / len(sampled.lengths_S):.1f}, {max(sampled.lengths_S)}",
        "responses without EOS in 128 tokens": f"{sampled.unfinished} of {len(sampled.lengths_S)}",
        "sampled tokens with p < 0.01": f"{sampled.share_between(0.0, 1e-2):.2%} of {n}",
    }
    for k in range(1, 5):
        share = sampled.share_between(10.0 ** -(k + 1), 10.0**-k)
        figures[f"  p in [1e-{k + 1}, 1e-{k})"] = f"{share:.3%} ({round(share * n)})"
    return figures


def show(figures: dict[str, dict[str, str]]) -> None:
    """Prints the figures, one column per compute dtype."""
    table = Table("measured on the stored weights", *figures)
    for name in next(iter(figures.values())):
        table.add_row(name, *(column[name] for column in figures.values()))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> None:
    """Makes, saves and measures."""
    # Not at the top: sample_data must be imported first, see there
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output",
        type=Path,
        default=SAMPLE_DATA,
        help="for model/ and problems.jsonl (default: sample_data)",
    )
    folder = parser.parse_args().output
    torch.set_num_threads(1)
    # A single file has no progress to show
    transformers.utils.logging.disable_progress_bar()
    start = time.perf_counter()
    recipe = Recipe()
    tokenizer = train_tokenizer(recipe.seed)
    model = train_with_progress(tokenizer, recipe)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model", save_jinja_files=False)
    rows = write_problems(folder / "problems.jsonl")
    made = time.perf_counter() - start
    show(
        {
            name: measure(folder / "model", rows, getattr(torch, name))
            for name in ("float32", "bfloat16")
        }
    )
    total = time.perf_counter() - start
    console.print(
        f"{model.num_parameters():,} parameters; made in {made:.0f} s, measured in "
        f"{total - made:.0f} s"
    )
    console.print(f"wrote {folder / 'model'} and {folder / 'problems.jsonl'}")


if __name__ == "__main__":
    main()
