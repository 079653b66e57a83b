"""A prompt that differs by a few tokens between the sides, found by reading the responses again."""

from mismatch_cli.diagnosis.checks.position_encoding import reading_finding
from mismatch_cli.diagnosis.evidence import Evidence, Finding

NAME, STAGE = "another-prompt", 4
TITLE = "Another prompt on one side"
CAUSE = (
    "One side read the prompt with a token more or less: a second BOS, a chat template that adds "
    "or drops one, or a cut generation prompt."
)
CHANGE = (
    "Pass the same token ids to both sides (vLLM: prompt_token_ids), and never tokenise the text "
    "again."
)
SOURCE = "TRL 3853 (vLLM adds a second BOS), vLLM 27486"


def check(evidence: Evidence) -> Finding:
    """Reads the responses after prompts that lack a token at either end, have one twice, or
    start with BOS.
    """
    return reading_finding(NAME, evidence, "prompt", "prompt")
