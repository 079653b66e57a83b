"""Stored outputs, and those of another processor, whose last digits may differ."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

STORED = Path(__file__).with_name("stored")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
# A digest of numbers tells only whether all their digits are the same
_DIGEST = re.compile(r"\b[0-9a-f]{12}\b")
_RELATIVE = 1e-4


def stored(name: str) -> str:
    return (STORED / f"{name}.txt").read_text(encoding="utf-8")


def unlike(before: str, now: str) -> Iterator[str]:
    """The lines that differ by more than the last digits of numbers, as of `difflib.ndiff`."""
    lines, others = (_DIGEST.sub("digest", text).splitlines() for text in (before, now))
    if len(lines) == len(others):
        for one, other in zip(lines, others, strict=True):
            if not _lines_are_alike(one, other):
                yield f"- {one}"
                yield f"+ {other}"
        return
    for line in difflib.unified_diff(lines, others, lineterm="", n=0):
        if not line.startswith(("---", "+++", "@@")):
            yield line


def _lines_are_alike(one: str, other: str) -> bool:
    if one == other:
        return True
    # A shorter number leaves room for another blank
    if _NUMBER.sub("#", one).split() != _NUMBER.sub("#", other).split():
        return False
    numbers = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    return all(_numbers_are_alike(*pair) for pair in numbers)


def _numbers_are_alike(one: str, other: str) -> bool:
    """Whole numbers are counts, which are exact."""
    if one == other:
        return True
    if one.isdigit() and other.isdigit():
        return False
    a, b = (float(number.replace(",", "")) for number in (one, other))
    return abs(a - b) <= max(_RELATIVE * abs(a), 1.01 * _last_place(one), 1.01 * _last_place(other))


def _last_place(number: str) -> float:
    """How much the last digit counts: 0.01 of 3.14, 1e-7 of 1.5e-6."""
    mantissa, _, exponent = number.partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - decimals)
