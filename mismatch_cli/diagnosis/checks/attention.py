"""Attention that leaves out what the model asks for, on one side: a soft cap of its logits, or sinks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mismatch_cli.attention import SAFE, warning
from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.model import Hypothesis

NAME, STAGE = "attention", 4
EXACT = True  # the manifest tells
TITLE = "Attention without what the model asks for"
CAUSE = "An implementation of attention drops, without a word, a soft cap of its logits or its sinks."
CHANGE = f"Score and train with --attn {SAFE}, or flex_attention on a GPU; mismatch-cli rescore mends a recorded trace."
SOURCE = "transformers: sdpa_attention.py knows no softcap and no s_aux; miles PR 1500"
_MEASURE = "sides that leave it out"


def check(evidence: Evidence) -> Finding:
    """What the manifest says of each side; with the trainer's model at hand, what the other attention changes.

    Without a model nothing can be put right: every log-probability of that side is of another function.
    """
    about = evidence.about
    rollout = about.get("rollout", {})
    trainer = about.get("recomputed" if evidence.pair.name == "mismatch" else "trainer") or about.get("trainer", {})
    if not trainer.get("attn_implementation"):
        return untested(NAME, "needs a manifest that names the trainer's attention")
    dropped = [side.get("attention_leaves_out") for side in (rollout, trainer)]
    rows = (("left out by the rollout", dropped[0] or "nothing"), ("by the trainer", dropped[1] or "nothing"))
    if dropped[0] == dropped[1]:
        return Finding(NAME, "clear", 0.0, _MEASURE, evidence=rows)
    sentence = " ".join(filter(None, map(warning, (rollout, trainer))))
    used = SAFE if dropped[1] else str(rollout["attention_backend"])
    return Finding(NAME, "found", 1.0, _MEASURE, sentence, rows, left_N=_left(evidence, used))


def _left(evidence: Evidence, implementation: str) -> np.ndarray:
    """The gap where the trainer's model reads the responses with an implementation of attention, nats."""
    sample = evidence.sample
    if evidence.model is None:
        return np.full(len(sample.kept), np.nan)

    @contextmanager
    def changed(model: Any) -> Iterator[None]:
        before = model.config._attn_implementation
        model.set_attn_implementation(implementation)
        try:
            yield
        finally:
            model.set_attn_implementation(before)

    logp_T = evidence.model.logp_T(Hypothesis(f"{implementation} attention", changed=changed))
    return logp_T[sample.kept] - sample.logq_T[sample.kept]
