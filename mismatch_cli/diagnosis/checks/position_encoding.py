"""Positions that the two sides turn into angles differently, shown by reading the responses again."""

from __future__ import annotations

from mismatch_cli.diagnosis.checks._reading import reading_finding
from mismatch_cli.diagnosis.evidence import Evidence, Finding

NAME, STAGE = "position-encoding", 4
TITLE = "Another position encoding"
CAUSE = "One side has another RoPE base or scaling (linear, NTK, YaRN) than the model's configuration says."
CHANGE = (
    "Compare rope_theta and rope_scaling (rope_parameters) as both sides resolved them; pass the same --hf-overrides "
    "to the engine, or take them out on both sides."
)
SOURCE = "prime-rl PR 2802 (YaRN's attention factor in vLLM: 0.030 against 0.0015), vLLM 27722, vLLM PR 43419"


def check(evidence: Evidence) -> Finding:
    """The model at hand with other bases and scalings: does one of them give the numbers of the side that differs?"""
    return reading_finding(NAME, evidence, "positions", "base or scaling of RoPE")
