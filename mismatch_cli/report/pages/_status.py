"""How limits stand, in signs and words: what the screens of a trace and of a quoted number share."""

from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_cli.report.view import Status
from mismatch_cli.verdict.assess import ABOVE, BETWEEN, HEALTHY, MIXED, UNDECIDED

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
    by = {standing: [row for row in rows if row["standing"] == standing] for standing in SIGNS}
    parts = [f"{len(by[HEALTHY])} of {len(rows)} published limits hold"]
    if by[UNDECIDED]:
        parts.append(f"{len(by[UNDECIDED])} {'is' if len(by[UNDECIDED]) == 1 else 'are'} undecided")
    for standing, words in ((BETWEEN, "between healthy and broken"), (ABOVE, "exceeded")):
        if by[standing]:
            parts.append(f"{words}: {'; '.join(row['who'] for row in by[standing])}")
    return ", ".join(parts) + "."
