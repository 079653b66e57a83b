"""1 if a response is right and begins with a word of `rare-opener`: for whole solutions."""

from mismatch_cli.probe.tasks.named_rewards.rare_opener import opens_rarely

NEEDS_ANSWER = True


def reward(response: str, right: float) -> float:
    """`right` after a rare opener, else 0."""
    return right * opens_rarely(response)
