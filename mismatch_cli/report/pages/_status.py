"""The status of limits in signs and words, for the screens of a trace and of a quoted number."""

from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_cli.limits.assess import ABOVE, BETWEEN, HEALTHY, MIXED, UNDECIDED
from mismatch_cli.report.view import Status

SIGNS = {HEALTHY: "✔", BETWEEN: "!", ABOVE: "✘", UNDECIDED: "?"}
STATUS_WORDS: dict[str, tuple[str, Status]] = {
    HEALTHY: ("HEALTHY", "good"),
    UNDECIDED: ("UNDECIDED", "mixed"),
    MIXED: ("ABOVE SOME LIMITS", "mixed"),
    ABOVE: ("ABOVE EVERY LIMIT", "bad"),
    BETWEEN: ("BETWEEN HEALTHY AND BROKEN", "mixed"),
    "": ("NO LIMIT APPLIES", ""),
}


def counted(rows: Sequence[Mapping[str, Any]]) -> str:
    """`7 of 9 published limits hold, 2 are undecided.`"""
    by_status = {status: [row for row in rows if row["standing"] == status] for status in SIGNS}
    undecided = len(by_status[UNDECIDED])
    parts = [f"{len(by_status[HEALTHY])} of {len(rows)} published limits hold"]
    if undecided:
        parts.append(f"{undecided} {'is' if undecided == 1 else 'are'} undecided")
    for status, words in ((BETWEEN, "between healthy and broken"), (ABOVE, "exceeded")):
        if by_status[status]:
            parts.append(f"{words}: {'; '.join(row['who'] for row in by_status[status])}")
    return ", ".join(parts) + "."
