"""Attention that lacks a logit soft cap or sinks of the model, on one side."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.model import Hypothesis
from mismatch_cli.diagnosis.power import clear
from mismatch_cli.models.attention import SAFE, attention_warning

NAME, STAGE = "attention", 4
EXACT = True  # the manifest says so
TITLE = "Attention without what the model asks for"
CAUSE = "An attention implementation silently ignores the model's logit soft cap or its sinks."
CHANGE = (
    f"Score and train with attn = {SAFE}, or flex_attention on a GPU; mismatch-cli rescore fixes "
    "a recorded trace."
)
SOURCE = "transformers: sdpa_attention.py knows no softcap and no s_aux; miles PR 1500"
_MEASURE = "sides that leave it out"


def check(evidence: Evidence) -> Finding:
    """Reads the manifest's entry for each side; with the trainer's model, also what the right
    attention changes.

    Without a model nothing can be repaired: every log-probability of that side comes from another
    function.
    """
    about = evidence.about
    rollout, trainer = about.get("rollout", {}), about.get("trainer", {})
    # At the sampling weights, the trainer's numbers may be those that it recomputed
    if evidence.pair.name == "mismatch":
        trainer = about.get("recomputed") or trainer
    if not trainer.get("attn_implementation"):
        return untested(NAME, "needs a manifest that names the trainer's attention implementation")
    by_rollout, by_trainer = (side.get("attention_leaves_out") for side in (rollout, trainer))
    rows = (
        ("left out by the rollout", by_rollout or "nothing"),
        ("by the trainer", by_trainer or "nothing"),
    )
    if by_rollout == by_trainer:
        return clear(NAME, 0.0, _MEASURE, "it on a side whose manifest names it", rows)
    sentence = " ".join(filter(None, map(attention_warning, (rollout, trainer))))
    implementation = SAFE if by_trainer else str(rollout["attention_backend"])
    left_N = _left_with(evidence, implementation)
    return Finding(NAME, "found", 1.0, _MEASURE, sentence, rows, left_N=left_N)


def _left_with(evidence: Evidence, implementation: str) -> np.ndarray:
    """The gap when the trainer's model reads the responses with this attention implementation,
    nats; NaN without a model.
    """
    sample = evidence.sample
    if evidence.model is None:
        return np.full(sample.num_counted, np.nan)

    @contextmanager
    def changed(model: Any) -> Iterator[None]:
        before = model.config._attn_implementation
        model.set_attn_implementation(implementation)
        try:
            yield
        finally:
            model.set_attn_implementation(before)

    logp_T = evidence.model.logp_T(Hypothesis(f"{implementation} attention", changed=changed))
    return logp_T[sample.index_N] - sample.logq_N
