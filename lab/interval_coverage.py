"""How often a 95 % interval covers the truth: simulated traces through the accumulators of every
report.

    python -m lab.interval_coverage [--repetitions 1000] [--sizes 40x4 64x8] [--tails heavy] [--json FILE]

Each prompt has its own scale (log-normal, σ = 0.5: one prompt in forty has 2.7 times the typical
gap), and so has each response (σ = 0.3); d = scale · noise, normal (light) or Student's t with 5
degrees of freedom (heavy). In a mixture the noise is normal and 7 % of the prompts have five times
the scale; traces that drew none of them are drawn again, as no method can know of prompts that it
did not see. The truth is what the same accumulators find in very many prompts. Repetitions without
an interval are counted separately. Misses are split by side: below means that the interval ends
under the truth, so the gap is understated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mismatch_cli.base.json_form import to_json
from mismatch_cli.metrics.clipping.clipping_summary import ClippingSummary, Question
from mismatch_cli.metrics.clipping.masked_slice import Needs
from mismatch_cli.metrics.differences import SummaryEstimates, differences
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.metrics.summary import MismatchSummary
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.rules.batch import TokenBatch

TYPICAL, OF_PROMPTS, OF_RESPONSES, LONGEST = 0.06, 0.5, 0.3, 40
ALGORITHMS = ("grpo-clip-higher", "dppo-binary-tv", "pg-tis")
FACTOR = 1.3  # of the gap of the second trace of a pair
WORSE, SHARE_WORSE = 5.0, 0.07  # the scale and the share of a mixture's other prompts
_TOP_K = 2
# What tells rows of a table apart
_KEYS = (
    "name", "mu_low", "first", "threshold", "cap", "delta", "algorithm", "family", "divergence", "k",
)  # fmt: skip


@dataclass
class Coverage:
    """For one number: repetitions with an interval, and those whose interval ends below or
    begins above the truth.
    """

    truth: float | None = None
    printed: int = 0
    below: int = 0
    above: int = 0
    widths: list[float] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)

    def add(self, estimate: Mapping[str, Any]) -> None:
        if estimate["low"] is None or self.truth is None:
            note = estimate["note"] or "no value"
            self.notes[note] = self.notes.get(note, 0) + 1
            return
        self.printed += 1
        self.below += estimate["high"] < self.truth
        self.above += estimate["low"] > self.truth
        self.widths.append((estimate["high"] - estimate["low"]) / max(abs(self.truth), 1e-300))

    @property
    def covered(self) -> float:
        return 1 - (self.below + self.above) / self.printed

    def row(self) -> dict[str, float]:
        counts = {"below": self.below, "above": self.above, "printed": self.printed}
        return {"covered": self.covered, **counts}


def simulate(
    seeds: tuple[int, int], prompts: int, samples: int, tail: str, factor: float = 1.0
) -> TokenBatch:
    """A trace with top-K columns, rewards, advantages and an entropy; prompts are numbered from a
    random start.

    The first seed makes the prompts, the second everything sampled from them.
    """
    of_prompts, rng = map(np.random.default_rng, seeds)
    first, prompt_P = of_prompts.integers(2**40), of_prompts.normal(size=prompts)
    worse_P = _worse(of_prompts, prompts) if tail == "mixture" else np.zeros(prompts, bool)
    count = prompts * samples
    length_S = rng.integers(LONGEST // 2, LONGEST + 1, count)
    scale_S = TYPICAL * np.exp(
        OF_PROMPTS * np.repeat(prompt_P, samples) + OF_RESPONSES * rng.normal(size=count)
    )
    scale_S *= np.where(np.repeat(worse_P, samples), WORSE, 1.0)
    tokens = _token_columns(rng, np.repeat(scale_S, length_S), tail, factor)
    ease_S = np.repeat(1 / (1 + np.exp(-prompt_P)), samples)
    responses = {
        "offset_S1": np.concatenate([[0], np.cumsum(length_S)]),
        "prompt_id_S": first + np.repeat(np.arange(prompts), samples),
        "sample_index_S": np.tile(np.arange(samples, dtype=np.int32), prompts),
        "step_S": np.zeros(count, np.int32),
        "epoch_S": np.zeros(count, np.int32),
        "minibatch_S": np.zeros(count, np.int32),
        "prompt_length_S": np.full(count, 20),
        "truncated_S": rng.random(count) < 0.1 + 0.2 * ease_S,
        "reward_S": (rng.random(count) < ease_S).astype(np.float32),
    }
    advantage_S = rng.choice([-1.0, -0.5, 0.5, 1.0], count)
    tokens["advantage_T"] = np.repeat(advantage_S, length_S).astype(np.float32)
    # At equal weights the recomputed policy is the trainer's
    for side in ("logp_trainer_T", "topk_logp_trainer_TK"):
        tokens[side.replace("trainer", "recomputed")] = tokens[side]
    absent = dict.fromkeys(column.name for column in fields(TokenBatch))
    return TokenBatch(**(absent | responses | tokens))  # type: ignore[arg-type]


def _token_columns(
    rng: np.random.Generator, scale_T: np.ndarray, tail: str, factor: float
) -> dict[str, np.ndarray]:
    """The sampled tokens under μ and π, whose logits differ by noise of this scale."""
    logits_TV = rng.gumbel(size=(len(scale_T), _TOP_K + 1)) * 1.5
    logq_TV = logits_TV - np.logaddexp.reduce(logits_TV, axis=1, keepdims=True)
    shape = logits_TV.shape
    noise_TV = rng.standard_t(5, size=shape) if tail == "heavy" else rng.normal(size=shape)
    moved_TV = logits_TV + factor * scale_T[:, None] * noise_TV
    logp_TV = moved_TV - np.logaddexp.reduce(moved_TV, axis=1, keepdims=True)
    is_passed_TV = np.exp(logq_TV).cumsum(axis=1) < rng.random((len(scale_T), 1))
    chosen_T = is_passed_TV.sum(axis=1).clip(max=_TOP_K)
    sampled = np.arange(len(scale_T)), chosen_T
    return {
        "response_ids_T": chosen_T.astype(np.int32),
        "loss_mask_T": np.ones(len(scale_T), bool),
        "logp_rollout_T": logq_TV[sampled].astype(np.float32),
        "logp_trainer_T": logp_TV[sampled].astype(np.float32),
        "entropy_trainer_T": -(np.exp(logp_TV) * logp_TV).sum(axis=1).astype(np.float32),
        "topk_ids_TK": np.tile(np.arange(_TOP_K, dtype=np.int32), (len(scale_T), 1)),
        "topk_logp_rollout_TK": logq_TV[:, :_TOP_K].astype(np.float32),
        "topk_logp_trainer_TK": logp_TV[:, :_TOP_K].astype(np.float32),
    }


def _worse(rng: np.random.Generator, prompts: int) -> np.ndarray:
    """Which prompts are the worse ones; drawn again until there is one."""
    while True:
        worse_P = rng.random(prompts) < SHARE_WORSE
        if worse_P.any():
            return worse_P


def pair(
    rng: np.random.Generator, prompts: int, samples: int, tail: str
) -> tuple[TokenBatch, TokenBatch]:
    """Two traces of the same prompts, each with its own responses and noise; the second has the
    larger gap.
    """
    of_prompts, first, second = rng.integers(2**63, size=3).tolist()
    return (
        simulate((of_prompts, first), prompts, samples, tail),
        simulate((of_prompts, second), prompts, samples, tail, FACTOR),
    )


def mismatch(batch: TokenBatch) -> MismatchSummary:
    summary = MismatchSummary(PAIRS["mismatch"])
    summary.update(batch)
    return summary


def clipping(batch: TokenBatch) -> ClippingSummary:
    needs = Needs(advantages=True, recomputed=False, top_k=_TOP_K)
    algorithms = tuple(map(parse_algorithm, ALGORITHMS))
    summary = ClippingSummary(Question(algorithms, needs, theory=True))
    summary.update(batch)
    return summary


def estimates(result: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every value with low, high and note in a result, by its path; rows are named by their
    first entries.
    """
    if isinstance(result, Mapping):
        if {"value", "low", "high"} <= result.keys():
            yield path, result
        for key, value in result.items():
            yield from estimates(value, f"{path}/{key}" if path else key)
    elif isinstance(result, list):
        for number, row in enumerate(result):
            yield from estimates(row, f"{path}[{_name(row, number)}]")


def _name(row: Any, number: int) -> str:
    if not isinstance(row, Mapping):
        return str(number)
    words = []
    for key in _KEYS:
        value = row.get(key, {})
        if isinstance(value, float):
            words.append(f"{value:.3g}")
        elif not isinstance(value, Mapping):
            words.append(str(value))
    return " ".join(words) or str(number)


def numbers(
    first: MismatchSummary, second: MismatchSummary, clips: ClippingSummary
) -> dict[str, Mapping[str, Any]]:
    """Everything that `report`, `compare` and `clipstats` print with an interval."""
    pair = differences(SummaryEstimates(first), SummaryEstimates(second))
    results = {
        "report": first.result(),
        "compare": pair,
        "clipstats": clips.result(blocked_tokens=0),
    }
    return dict(estimates(to_json(results)))


def truth(
    rng: np.random.Generator, samples: int, tail: str, traces: int
) -> dict[str, float | None]:
    """The truth: what the accumulators find in very many prompts."""
    sums: list[Any] = []
    for _ in range(traces):
        one, other = pair(rng, 2000, samples, tail)
        parts = mismatch(one), mismatch(other), clipping(one)
        for whole, part in zip(sums, parts, strict=False):
            # A batch of so many prompts would not fit into memory
            whole.merge(part)
        sums = sums or list(parts)
    return {name: estimate["value"] for name, estimate in numbers(*sums).items()}


def cover(
    prompts: int, samples: int, tail: str, repetitions: int, traces: int, seed: int
) -> dict[str, Coverage]:
    rng = np.random.default_rng([seed, prompts, samples, len(tail)])
    coverages = {name: Coverage(value) for name, value in truth(rng, samples, tail, traces).items()}
    for _ in range(repetitions):
        one, other = pair(rng, prompts, samples, tail)
        for name, estimate in numbers(mismatch(one), mismatch(other), clipping(one)).items():
            coverages.setdefault(name, Coverage()).add(estimate)
    return coverages


def show(title: str, coverages: Mapping[str, Coverage], repetitions: int) -> None:
    print(f"\n{title}\n{'':62s} covered  below  above  printed  width")
    for name, each in coverages.items():
        if each.printed < repetitions / 20:
            continue
        share = 100 / each.printed
        mark = " " if 0.93 <= each.covered <= 0.97 else "*"
        print(
            f"{name:62s} {100 * each.covered:6.1f}{mark} {share * each.below:6.1f} "
            f"{share * each.above:6.1f} {100 * each.printed / repetitions:7.0f}% "
            f"{np.median(each.widths):7.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument(
        "--truth", type=int, default=60, help="traces of 2,000 prompts for the truth"
    )
    parser.add_argument("--sizes", nargs="+", default=["10x4", "30x4", "64x8"])
    parser.add_argument("--tails", nargs="+", default=["light", "heavy", "mixture"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    for tail in options.tails:
        for size in options.sizes:
            prompts, samples = map(int, size.split("x"))
            coverages = cover(
                prompts, samples, tail, options.repetitions, options.truth, options.seed
            )
            show(f"{tail}, {size}", coverages, options.repetitions)
            rows[f"{tail} {size}"] = {
                name: each.row() for name, each in coverages.items() if each.printed
            }
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
