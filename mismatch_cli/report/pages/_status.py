"""The status of limits in signs and words, for the screens of a trace and of a quoted number."""

from mismatch_cli.limits.assess import ABOVE, BETWEEN, MIXED, LimitRow
from mismatch_cli.limits.judge import EXCEEDED, HEALTHY, HOLDS, UNDECIDED, UNJUDGED
from mismatch_cli.report.outline import Status

STATUS_WORDS: dict[str, tuple[str, Status]] = {
    HEALTHY: ("HEALTHY", "good"),
    UNDECIDED: ("UNDECIDED", "mixed"),
    MIXED: ("ABOVE SOME LIMITS", "mixed"),
    ABOVE: ("ABOVE EVERY LIMIT", "bad"),
    BETWEEN: ("BETWEEN HEALTHY AND BROKEN", "mixed"),
    "": ("NO LIMIT APPLIES", ""),
}
_SIGNS: dict[str, tuple[str, Status]] = {
    HOLDS: ("✔", "good"),
    EXCEEDED: ("✘", "bad"),
    UNDECIDED: ("?", "mixed"),
    UNJUDGED: ("–", ""),
}
_NOT_BROKEN: tuple[str, Status] = ("!", "mixed")


def sign(limit: LimitRow) -> str:
    """`✔`, `✘`, `?`, or `!` for what is not healthy, without being broken for certain."""
    return _sign_and_colour(limit)[0]


def colour(limit: LimitRow) -> Status:
    """The status that sets the colour of a number beside its limit."""
    return _sign_and_colour(limit)[1]


def word(limit: LimitRow) -> str:
    """The judge's word; of two levels, which one is exceeded."""
    if limit.level == HEALTHY:
        return "not healthy"
    if limit.standing == UNJUDGED:
        return "not judged"
    return limit.standing


def _sign_and_colour(limit: LimitRow) -> tuple[str, Status]:
    # The whole interval is beyond the healthy level, and not all of it beyond the broken one.
    if limit.level == HEALTHY:
        return _NOT_BROKEN
    return _SIGNS[limit.standing]
