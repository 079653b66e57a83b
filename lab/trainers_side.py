"""Faults of the trainer's model, each planted by reading the responses again with the fault.

`diagnose` gets the trainer's model (with its adapter, if it has one), as with `--trainer-model`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lab.faults import Fault, trainer
from lab.pool import Pool, gather_tables
from lab.variants import model_at_hand, scoring_model
from mismatch_cli.diagnosis import other_weights
from mismatch_cli.diagnosis.model import AS_RECORDED, Hypothesis
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.models.scoring.requests import ScoreRequest
from tests.lora import save_adapter

_TOKEN_BUDGET = 16384
_UNLIMITED = 10**9  # tokens that may be read
_ADAPTER_SPREAD = 0.01  # of its B, whose gap is about that of bfloat16


def read_again(pool: Pool, hypothesis: Hypothesis) -> np.ndarray:
    """log π of the pool's tokens under a hypothesis, float32, in the order of the pool."""
    evidence = gather_tables([pool.table()], PAIRS["mismatch"], pool.sampling, pool.about)
    model = model_at_hand(pool, evidence.sample)
    model.budget = _UNLIMITED
    logp_T = np.empty(len(pool.response_T), dtype=np.float32)
    logp_T[pool.sample_order_T] = model.logp_T(hypothesis)
    return logp_T


def _record(pool: Pool, side: str, logp_T: np.ndarray) -> None:
    """Replace a side's numbers, and drop those of other tokens, which were not read again."""
    pool.tokens[f"logp_{side}"] = logp_T
    pool.tokens.pop(f"entropy_{side}", None)
    pool.ranks.pop(f"topk_logp_{side}", None)


def leaking_packs(pool: Pool, size: float, _: np.random.Generator) -> None:
    """`size` responses share a row, and each sees those before it."""
    packs = Hypothesis("packs", before=lambda place: place % int(size))
    _record(pool, "trainer", read_again(pool, packs))


def missing_norm(pool: Pool, index: float, _: np.random.Generator) -> None:
    """One kind of norm as if it had never been loaded, or left out.

    The last norm is left alone: of the bundled model it is a constant, so its loss is a
    temperature.
    """
    model = scoring_model(pool).model
    readings = [
        reading
        for reading in other_weights.missing_tensors(model)
        if not reading.name.startswith("norm ")
    ]
    _record(pool, "trainer", read_again(pool, readings[int(index)]))


def adapter_at_scale(pool: Pool, scale: float, _: np.random.Generator) -> None:
    """The trainer has an adapter, which the engine applies at another scale."""
    base_T = pool.tokens["logp_trainer"].copy()
    pool.adapter = _adapter(pool.about["trainer"]["model"])
    _record(pool, "trainer", read_again(pool, AS_RECORDED))
    readings = other_weights.adapter_scales(scoring_model(pool).model)
    at = other_weights.SCALES.index(scale)
    moved_T = pool.tokens["logp_rollout"] + read_again(pool, readings[at]) - base_T
    _record(pool, "rollout", np.minimum(moved_T, 0))


@cache
def _adapter(model: str) -> str:
    """The folder of a random adapter of a model."""
    folder = Path(tempfile.mkdtemp(prefix="adapter-"))
    return save_adapter(model, folder, size=_ADAPTER_SPREAD)


def labels_rolled_in_parts(pool: Pool, parts: float, _: np.random.Generator) -> None:
    """Labels are rolled after the sequence is cut into `parts`.

    The last position of each part then predicts the first token of its own part.
    """
    requests, places = [], []
    for response, prompt in enumerate(pool.rows["prompt_ids"]):
        first = int(pool.offset_S1[response])
        own_ids = pool.tokens["response_ids"][first : pool.offset_S1[response + 1]].tolist()
        ids = [*prompt, *own_ids]
        part = -(-len(ids) // int(parts))  # tokens of each, the last part padded
        for cut in range(part, len(ids), part):
            if cut >= len(prompt):
                requests.append(ScoreRequest(ids[:cut], [ids[cut - part]]))
                places.append(first + cut - len(prompt))
    scores = scoring_model(pool).score(requests, token_budget=_TOKEN_BUDGET)
    logp_T = pool.tokens["logp_trainer"].copy()
    logp_T[places] = np.concatenate([score.logp_T for score in scores])
    _record(pool, "trainer", logp_T)


Plant = Callable[[Pool, Any, np.random.Generator], None]


def _at_hand(
    name: str, check: str, severities: tuple[float, ...], unit: str, plant: Plant
) -> Fault:
    return Fault(f"{name}, model at hand", check, severities, unit, plant, at_hand=True)


_DROPOUT, _DROPOUT_VARIANT = trainer("dropout")
FAULTS = (
    _at_hand("packs that leak", "packed-responses", (2, 4, 8), "responses", leaking_packs),
    _at_hand("a norm that is missing", "missing-tensor", (0, 1, 2), "(which)", missing_norm),
    _at_hand("adapter at another scale", "adapter-scale", (0, 0.5, 2), "times", adapter_at_scale),
    _at_hand("rolled labels", "context-parallel", (2, 4, 8), "parts", labels_rolled_in_parts),
    Fault(
        "dropout, model at hand",
        "not-repeatable",
        (0.02, 0.05, 0.1),
        "",
        _DROPOUT,
        _DROPOUT_VARIANT,
        at_hand=True,
    ),
)
