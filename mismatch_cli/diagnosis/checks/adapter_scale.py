"""A LoRA adapter that one side applies at another scale, or leaves out."""

from mismatch_cli.diagnosis.checks._read_again import reading_finding
from mismatch_cli.diagnosis.evidence import Evidence, Finding

NAME, STAGE = "adapter-scale", 4
READS = True
TITLE = "An adapter at another scale"
CAUSE = (
    "One side does not apply the adapter, applies it with another alpha, or adds it twice: not "
    "merged before the sync, alpha over rank computed differently, or counted once per rank."
)
CHANGE = (
    "Check that the engine lists the adapter and its alpha; or merge it into the weights before "
    "the sync, and compare the norms of the merged tensors on both sides."
)
SOURCE = (
    "miles PR 3232 (the adapter of shared experts counted once per tensor-parallel rank), SkyRL "
    "1392, slime 1202"
)


def check(evidence: Evidence) -> Finding:
    """Reads the responses without the adapter, and with half and twice of it."""
    return reading_finding(NAME, evidence, "adapter", "with the adapter at {} other scales")
