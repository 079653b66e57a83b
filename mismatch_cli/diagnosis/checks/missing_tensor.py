"""A norm, a bias or a head of its own that one side lacks."""

from mismatch_cli.diagnosis.checks._read_again import reading_finding
from mismatch_cli.diagnosis.evidence import Evidence, Finding

NAME, STAGE = "missing-tensor", 4
READS = True
TITLE = "A tensor that one side lacks"
CAUSE = (
    "One side never got the weights of a kind of norm or bias, or has no such module, or ties its "
    "head to the embeddings: another architecture, or names that the sync does not map."
)
CHANGE = (
    "Compare the architectures and the names of the tensors that the sync sends with those that "
    "the engine loads; mismatch-cli bisect compares them one by one."
)
SOURCE = (
    "vLLM and transformers fill what a checkpoint lacks with initial values, and only warn; "
    "planted: norms of queries and keys missing"
)


def check(evidence: Evidence) -> Finding:
    """Reads the responses without each kind of tensor."""
    return reading_finding(NAME, evidence, "tensors", "without each of {} kinds of tensors")
