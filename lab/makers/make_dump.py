"""Writes the bundled dump, `python -m lab.makers.make_dump`: token exports of prime-rl, made from
the bundled trace.

One response per prompt, two ranks. Every field is there, in prime-rl's order and spelling: float32
values written as Python floats, null for what is not finite, index i about token i, and 0 where the
prompt has no value.
"""

from __future__ import annotations

import json
import shutil
from math import exp, isfinite, log
from typing import Any

import numpy as np

from lab.makers import SAMPLE_DATA
from mismatch_cli.base.places import FAULTY, bundled_trace
from mismatch_cli.trace.reader import Trace

FOLDER = SAMPLE_DATA / "dumps" / "token_exports"
RANKS = 2
VOCABULARY = 2048
BAND = 0.2  # prime-rl's dppo_mask_low and dppo_mask_high
LONGEST = 52  # tokens of a response: the dump stays below 300 kB


def main() -> None:
    """Write `token_exports/step_N/rank_R.jsonl` and the marker of each finished step."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    written: dict[tuple[int, int], int] = {}
    prompts: set[int] = set()
    for row in (
        row for table in Trace.open(bundled_trace(FAULTY)).tables() for row in table.to_pylist()
    ):
        if (
            row["prompt_id"] in prompts
            or len(row["response_ids"]) > LONGEST
            or not any(row["advantage"])
        ):
            continue
        prompts.add(row["prompt_id"])
        step, rank = row["step"], len(prompts) % RANKS
        index = written[step, rank] = written.get((step, rank), -1) + 1
        path = FOLDER / f"step_{step}" / f"rank_{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps(export_record(row, rank, index), separators=(",", ":"), allow_nan=False)
                + "\n"
            )
        (path.parent / "STABLE").touch()


def export_record(row: dict[str, Any], rank: int, index: int) -> dict[str, Any]:
    """One line of an export, from a row of a trace that holds log μ, log π, the entropy and the
    advantage.
    """
    prompt, length = row["prompt_ids"], len(row["response_ids"])
    mask = [False] * len(prompt) + row["loss_mask"]
    before = [0.0] * len(prompt)
    inference, trainer = before + row["logp_rollout"], _shifted(before) + row["logp_trainer"]
    advantages = before + row["advantage"]
    log_ratio = [_float32(p - q) for p, q in zip(trainer, inference, strict=True)]
    delta = [_float32(exp(p) - exp(q)) for p, q in zip(trainer, inference, strict=True)]
    high = [on and a > 0 and d > BAND for on, a, d in zip(mask, advantages, delta, strict=True)]
    low = [on and a < 0 and d < -BAND for on, a, d in zip(mask, advantages, delta, strict=True)]
    arrays: dict[str, list[Any]] = {
        "token_ids": prompt + row["response_ids"],
        "position_ids": list(range(len(prompt) + length)),
        "loss_mask": mask,
        "advantages": advantages,
        "inference_logprobs": inference,
        "trainer_logprobs": trainer,
        "entropy": before + row["entropy_trainer"],
        "mismatch_kl": [_float32(exp(d) - d - 1) for d in log_ratio],
        "log_importance_ratio": log_ratio,
        "importance_ratio": [_float32(exp(d)) for d in log_ratio],
        "prob_delta": delta,
        "is_masked": [a or b for a, b in zip(high, low, strict=True)],
        "is_masked_high": high,
        "is_masked_low": low,
        **{name: [None] * len(mask) for name in ("rl_weights", "ce_weights", "ref_kl_weights")},
    }
    scalars = {
        "schema_version": 1,
        "step": row["step"],
        "rank": rank,
        "micro_step": index,
        "micro_sequence_idx": 0,
    }
    named = {"export_sequence_idx": index, "env_name": "math"}
    return (
        scalars | named | {name: [_or_null(x) for x in values] for name, values in arrays.items()}
    )


def _shifted(before: list[float]) -> list[float]:
    """The trainer scores the prompt too; the first position holds the filler that the shift
    leaves there.
    """
    return [-log(VOCABULARY), *before[1:]] if before else before


def _float32(value: float) -> float:
    return float(np.float32(value))


def _or_null(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


if __name__ == "__main__":
    main()
