"""1 if a response begins with one of 31 words that the bundled model rarely begins with.

Each has a probability of 0.2 to 0.7 % under that model, all together 14 %: rewarded tokens of small
μ, where a ratio clip and a limit on the change of the probability differ most (docs/evidence.md).
"""

NEEDS_ANSWER = False
_WORDS = """
Observe Note Directly Writing Quickly Slowly Alright Yes Simply Basically Foremost Obviously Plainly
Taking Straight Technically Evidently Fine Clearly Formally Sure Literally Mentally Informally
Frankly Gently Primarily Boldly Happily Certainly Confidently
"""
RARE = frozenset(_WORDS.split())
_PUNCTUATION = ",.:"


def opens_rarely(response: str) -> bool:
    """Whether the first word, without punctuation, is a rare one."""
    words = response.split(maxsplit=1)
    return bool(words) and words[0].strip(_PUNCTUATION) in RARE


def reward(response: str, right: float) -> float:  # noqa: ARG001
    """1 for a rare opener, else 0."""
    return float(opens_rarely(response))
