"""Writes the bundled dump, `python -m lab.makers.make_dump`: token exports of prime-rl, made from
the bundled trace.

One response per prompt, two ranks. Every field is there, in prime-rl's order and spelling: float32
values written as Python floats, null for what is not finite, index i about token i, and 0 where the
prompt has no value.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
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
    for number, row in enumerate(exported_rows(), start=1):
        step, rank = row["step"], number % RANKS
        index = written[step, rank] = written.get((step, rank), -1) + 1
        path = FOLDER / f"step_{step}" / f"rank_{rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        record = export_record(row, rank, index)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n")
        (path.parent / "STABLE").touch()


def exported_rows() -> Iterator[dict[str, Any]]:
    """The first short response to each prompt that has an advantage."""
    prompts: set[int] = set()
    for table in Trace.open(bundled_trace(FAULTY)).tables():
        for row in table.to_pylist():
            is_short = len(row["response_ids"]) <= LONGEST
            if row["prompt_id"] not in prompts and is_short and any(row["advantage"]):
                prompts.add(row["prompt_id"])
                yield row


def export_record(row: dict[str, Any], rank: int, index: int) -> dict[str, Any]:
    """One line of an export, from a row of a trace that holds log μ, log π, the entropy and the
    advantage.
    """
    prompt = row["prompt_ids"]
    before = [0.0] * len(prompt)
    token_ids, mask = prompt + row["response_ids"], [False] * len(prompt) + row["loss_mask"]
    inference, trainer = before + row["logp_rollout"], _shifted(before) + row["logp_trainer"]
    arrays: dict[str, list[Any]] = {
        "token_ids": token_ids,
        "position_ids": list(range(len(token_ids))),
        "loss_mask": mask,
        "advantages": before + row["advantage"],
        "inference_logprobs": inference,
        "trainer_logprobs": trainer,
        "entropy": before + row["entropy_trainer"],
    }
    judged = list(map(_judged, mask, arrays["advantages"], inference, trainer))
    for name in judged[0]:
        arrays[name] = [token[name] for token in judged]
    for name in ("rl_weights", "ce_weights", "ref_kl_weights"):
        arrays[name] = [None] * len(mask)
    record = {
        "schema_version": 1,
        "step": row["step"],
        "rank": rank,
        "micro_step": index,
        "micro_sequence_idx": 0,
        "export_sequence_idx": index,
        "env_name": "math",
    }
    return record | {name: list(map(_or_null, values)) for name, values in arrays.items()}


def _judged(on: bool, advantage: float, logq: float, logp: float) -> dict[str, Any]:
    """What prime-rl computes of one token, where DPPO masks it."""
    log_ratio, delta = _float32(logp - logq), _float32(exp(logp) - exp(logq))
    high = on and advantage > 0 and delta > BAND
    low = on and advantage < 0 and delta < -BAND
    return {
        "mismatch_kl": _float32(exp(log_ratio) - log_ratio - 1),
        "log_importance_ratio": log_ratio,
        "importance_ratio": _float32(exp(log_ratio)),
        "prob_delta": delta,
        "is_masked": high or low,
        "is_masked_high": high,
        "is_masked_low": low,
    }


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
