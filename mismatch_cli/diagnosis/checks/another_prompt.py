"""A prompt that differs by a few tokens between the sides, found by reading the responses again."""

from mismatch_cli.diagnosis.checks._read_again import reading_finding
from mismatch_cli.diagnosis.evidence import Evidence, Finding

NAME, STAGE = "another-prompt", 4
READS = True
TITLE = "Another prompt on one side"
CAUSE = (
    "One side read the prompt with a token more or less: a second BOS, a chat template that adds "
    "or drops one, or a cut generation prompt; or one side expands the placeholder of an image, and "
    "the other does not."
)
CHANGE = (
    "Pass the same token ids to both sides (vLLM: prompt_token_ids), and never tokenise the text "
    "again."
)
SOURCE = (
    "TRL 3853 (vLLM adds a second BOS), vLLM 27486, NeMo RL PR 2360 (compact and expanded image "
    "placeholders: 0.0276 against 0.0090)"
)


def check(evidence: Evidence) -> Finding:
    """Reads the responses after prompts that lack a token at either end, have one twice, start
    with BOS, or have another number of placeholders in a run.
    """
    return reading_finding(NAME, evidence, "prompt", "after {} other prompts")
