"""What an imported trace says of its dump: where it is from, what its π is, what was left out and what looks odd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FINISH_UNKNOWN = "the dump does not say why responses ended"


def imported_fact(about: Mapping[str, Any]) -> str:
    """A line for the head of a report; empty for a trace that was recorded here."""
    imported = about.get("imported")
    if not imported:
        return ""
    files = imported["file_count"]
    fact = f"{imported['title']} · {files:,} {'file' if files == 1 else 'files'}"
    return f"{fact} · π: {pi_of(imported)}" if "holds" in imported else fact  # `rescore` replaces π


def pi_of(imported: Mapping[str, Any]) -> str:
    """What the dump's π is, and which weights it counts as."""
    scored, newer = imported["rows_with_trainer"], imported["rows_with_newer_trainer"]
    if not scored:
        return "none in this dump"
    counted = (
        "newer weights than those" if newer == scored else "the weights" if not newer else "the weights, or newer,"
    )
    return f"{imported['holds']}; taken as of {counted} that sampled"


def notes_of(imported: Mapping[str, Any] | None) -> tuple[str, ...]:
    """A sentence per reason for which something was left out or looks odd."""
    if not imported:
        return ()
    first = imported["left_out_first"]
    left_out = (
        f"Left out on import: {count:,} {reason}" + (f" (first: {first[reason]})." if reason in first else ".")
        for reason, count in imported["left_out"].items()
    )
    return (*left_out, *(f"{count:,} {what}." for what, count in imported["noted"].items()))


def without_unknown(result: dict[str, Any], imported: Mapping[str, Any] | None) -> dict[str, Any]:
    """The summary of a pair without what the dump does not know: how many responses were truncated."""
    if imported and imported.get("rows_with_unknown_finish"):
        empty = dict.fromkeys(result["metrics"]["truncated_share"])
        result["metrics"]["truncated_share"] = empty | {"note": FINISH_UNKNOWN}
    return result
