"""Responses packed into one row that see those before them."""

from mismatch_cli.diagnosis.checks._read_again import reading_finding
from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested

NAME, STAGE = "packed-responses", 4
READS = True
TITLE = "Packed responses that see each other"
CAUSE = (
    "Several responses share one row, and attention (or the state of a recurrent layer) is not "
    "reset between them: only the first of each pack is right."
)
CHANGE = (
    "Pass the bounds of the sequences (cu_seqlens, or position ids that restart) to every layer; "
    "or switch packing off: sequence_packing false, use_remove_padding false."
)
SOURCE = "NeMo RL PR 2529 (Mamba's state was not reset between packed samples)"


def check(evidence: Evidence) -> Finding:
    """Reads the responses after those before them in the trace."""
    if evidence.counts.responses > evidence.sample.num_responses and evidence.model is not None:
        return untested(NAME, "the sample lacks some of the responses before its own")
    return reading_finding(NAME, evidence, "neighbours", "after their neighbours in {} ways")
