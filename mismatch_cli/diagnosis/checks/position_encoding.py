"""Positions that the two sides encode differently, found by reading the responses again."""

from mismatch_cli.diagnosis.checks._read_again import reading_finding
from mismatch_cli.diagnosis.evidence import Evidence, Finding

NAME, STAGE = "position-encoding", 4
READS = True
TITLE = "Another position encoding"
CAUSE = (
    "One side does not use the RoPE base or scaling (linear, NTK, YaRN) of the model's "
    "configuration."
)
CHANGE = (
    "Compare rope_theta and rope_scaling (rope_parameters) as resolved on both sides; pass the "
    "same --hf-overrides to the engine, or remove them on both sides."
)
SOURCE = (
    "prime-rl PR 2802 (YaRN's attention factor in vLLM: 0.030 against 0.0015), vLLM 27722, vLLM "
    "PR 43419"
)


def check(evidence: Evidence) -> Finding:
    """Read the responses with other RoPE bases and scalings: does one reproduce the side that
    differs?
    """
    return reading_finding(NAME, evidence, "positions", "with {} other bases or scalings of RoPE")
