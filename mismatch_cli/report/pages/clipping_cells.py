"""From the estimates of the `clipstats` JSON to cells of tables: shares in percent, each with its half interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatch_cli import numbers
from mismatch_cli.metrics.update_table import CLIPPING
from mismatch_cli.report.view import Column

Row = Mapping[str, Any]
SIGNS = ("all", "positive", "negative")


def estimate_of(found: Row | float | None) -> tuple[float | None, float | None, float | None]:
    """Value, low and high; a plain number has no interval, and what is absent no value."""
    if not isinstance(found, Mapping):
        found = {"value": found}
    return found["value"], found.get("low"), found.get("high")


def value_of(found: Row | float | None) -> float | None:
    return estimate_of(found)[0]


def plain(found: Row | float | None) -> str:
    """A value with half the width of its interval."""
    return numbers.plus_minus(*estimate_of(found))


def percent(found: Row | float | None) -> str:
    """The same of a share in percent; the sign itself stands in the head of the column."""
    return numbers.plus_minus(*(None if part is None else 100 * part for part in estimate_of(found)))


def share(found: Row | float | None) -> str:
    """A share within a sentence: `0.42 %`."""
    return numbers.share(value_of(found))[0]


def when(sign: str, advantages: bool) -> str:
    """How the tokens of a sign are called: without advantages the question is hypothetical."""
    return ("" if advantages else "if ") + {"positive": "A > 0", "negative": "A < 0"}[sign]


def sign_columns(advantages: bool) -> tuple[Column, ...]:
    """Blocked tokens in percent: all, with A > 0, and with A < 0; without advantages there is no all."""
    everything = (Column("blocked, %", CLIPPING["blocked"]),) if advantages else ()
    return (
        *everything,
        *(Column(f"{when(sign, advantages)}, %", CLIPPING["blocked"], optional=advantages) for sign in SIGNS[1:]),
    )


def sign_cells(blocked: Row, advantages: bool) -> tuple[str, ...]:
    """What belongs into `sign_columns`."""
    return tuple(percent(blocked[sign]) for sign in SIGNS[0 if advantages else 1 :])


def span(row: Row) -> str:
    """`first`–`last`, or one number where they are equal."""
    return f"{row['first']}" if row["first"] == row["last"] else f"{row['first']} – {row['last']}"


def mu_bin(row: Row) -> str:
    return f"{row['mu_low']:g} – {row['mu_high']:g}"


def quoted(token: str) -> str:
    """A token between quotation marks, so that the spaces at its ends show."""
    return f"“{token}”"
