"""Formats numbers for people: significant digits, intervals to the same decimal, × for factors.
Used by all reports.

Below 1e-4 and from 1e6 a number is scientific (`4.2e−5`); a missing value is a dash. The minus sign
is `−`.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from math import floor, inf, isfinite, log10

MISSING = "—"
FEW = "°"  # after an estimate that a few prompts decide
_DIGITS = 3
_LOPSIDED = 0.3  # e.g. a share near 0 or 1, where value ± half width would leave the valid range
_LARGEST_FACTOR = 1000  # beyond it, the noise is too close to zero to divide by
_SMALLEST_FIXED, _LARGEST_FIXED = 1e-4, 1e6
_MOST_DECIMALS = 6
_BLOCKS = "▁▂▃▄▅▆▇█"


def number(value: float | None, digits: int = _DIGITS) -> str:
    """A value to `digits` significant digits: `0.00421`, `12,300`, `4.21e−5`."""
    if value is None or not isfinite(value):
        return MISSING
    if _is_scientific(value):
        return _scientific(value, digits)
    return _fixed(value, _decimals(value, digits))


def estimate(value: float | None, low: float | None, high: float | None) -> tuple[str, str]:
    """A value and its interval, as `0.00421` and `[0.00402, 0.00440]`; a missing interval is a
    dash.

    Both have as many decimals as the half width of the interval needs, so that `1.0004 [1.0002,
    1.0006]` does not read `1.00 [1.00, 1.00]`.
    """
    if value is None or low is None or high is None or not (isfinite(low) and isfinite(high)):
        return number(value), MISSING
    if _is_scientific(value):
        return number(value), f"[{number(low)}, {number(high)}]"
    decimals = _decimals(value, _DIGITS)
    half_width = (high - low) / 2
    if half_width >= 10**-_MOST_DECIMALS:
        decimals = max(decimals, -floor(log10(half_width)))
    return _fixed(value, decimals), f"[{_fixed(low, decimals)}, {_fixed(high, decimals)}]"


def plus_minus(value: float | None, low: float | None, high: float | None) -> str:
    """A value with half the width of its interval, both to the same decimal, for tables: `0.0152 ±
    0.0047`.

    A lopsided interval shows its ends: `5.9 [0, 19]`.
    """
    if value is None or low is None or high is None or not isfinite(high - low) or high <= low:
        return number(value)
    half_width = (high - low) / 2
    if abs(high - value - half_width) > _LOPSIDED * half_width:
        return f"{number(value, 2)} [{number(low, 2)}, {number(high, 2)}]"
    if _is_scientific(value) or _is_scientific(half_width):
        return f"{number(value, 2)} ± {number(half_width, 2)}"
    decimals = _decimals(half_width, 2)
    return f"{_fixed(value, decimals)} ± {_fixed(half_width, decimals)}"


def near(value: float | None, ideal: float) -> str:
    """A value with three digits of its distance from `ideal`, so that a ratio of 1.00003 does
    not read 1.00.
    """
    if value is None or not isfinite(value) or value == ideal:
        return number(value)
    distance = abs(value - ideal)
    if distance > 0.1:
        return number(value)
    return _fixed(value, min(_MOST_DECIMALS + 3, _decimals(distance, 2)))


def share(
    value: float | None, low: float | None = None, high: float | None = None
) -> tuple[str, str]:
    """A share and its interval in percent, as `0.42 %` and `[0.40, 0.44] %`."""
    text, interval = estimate(_times_100(value), _times_100(low), _times_100(high))
    return _with_unit(text, "%"), _with_unit(interval, "%")


def _times_100(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _with_unit(text: str, unit: str) -> str:
    return text if text == MISSING else f"{text} {unit}"


def times(factor: float | str | None, between: Sequence[float] | None = None) -> str:
    """A factor, as `3.1 ×`, or its range, as `2.4–4.0 ×`; `noise ≈ 0` if the noise is below
    resolution.
    """
    if between is not None and between[1] <= _LARGEST_FACTOR:
        low, high = map(two_digits, between)
        return f"{low}–{high} ×"
    if isinstance(factor, str):
        return "noise ≈ 0"  # the noise is below resolution, the value is not
    if factor is not None and factor > _LARGEST_FACTOR:
        return f"> {_LARGEST_FACTOR:,} ×"
    return _with_unit(two_digits(factor), "×")


def two_digits(value: float | None) -> str:
    """A value to two digits; it is rounded first, or 9.96 would become 10.0."""
    if value is None:
        return MISSING
    return number(float(f"{value:.2g}"), 2)


def resolved(factor: float | str | None) -> float | None:
    """A factor for calculations: infinite where `times` has no number, beyond 1,000 or with a
    noise below resolution.
    """
    if factor is None:
        return None
    if isinstance(factor, str) or factor > _LARGEST_FACTOR:
        return inf
    return factor


def count(value: int | None) -> str:
    """A count: `12,345`."""
    return MISSING if value is None else f"{value:,}"


def things(value: int, noun: str) -> str:
    """A count with its noun, whose plural ends in s: `1 response`, `12,345 responses`."""
    plural = "" if value == 1 else "s"
    return f"{value:,} {noun}{plural}"


_REGULAR = ("begin", "count", "hold", "lack", "score")
_VERBS = {"have": "has", "are": "is", "were": "was"} | {verb: f"{verb}s" for verb in _REGULAR}
_NOUN = re.compile(rf"\b(\w+?)(?:(?<=ch)es|(?<![su])s)\b(?: (that )?({'|'.join(_VERBS)})\b)?")


def counted(value: int, words: str) -> str:
    """A count with words about several things: `2 lines that are odd`, of one thing `1 line that
    is odd`.
    """
    if value == 1:
        words = _NOUN.sub(_singular, words, count=1)
    return f"{value:,} {words}"


def _singular(match: re.Match[str]) -> str:
    noun, that, verb = match.groups()
    if not verb:
        return str(noun)
    return f"{noun} {that or ''}{_VERBS[verb]}"


def sparkline(values: Sequence[float | None], low: float, high: float) -> str:
    """A curve in block characters, one per value between `low` and `high`; a blank for a missing
    one.
    """
    return "".join(_block(value, low, high) for value in values)


def stretches(values: Sequence[float | None], most: int) -> list[float | None]:
    """At most `most` values for a curve: longer ones become means over stretches of nearly equal
    length.
    """
    if len(values) <= most:
        return list(values)
    edges = [stretch * len(values) // most for stretch in range(most + 1)]
    return [_mean(values[first:end]) for first, end in pairwise(edges)]


def _mean(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    if not measured:
        return None
    return sum(measured) / len(measured)


def _block(value: float | None, low: float, high: float) -> str:
    if value is None or not isfinite(value):
        return " "
    # Without a range, a value is at half height, unless it is 0.
    height = 0.5 if value else 0.0
    if high > low:
        height = min(1.0, max(0.0, (value - low) / (high - low)))
    return _BLOCKS[round(height * (len(_BLOCKS) - 1))]


def _is_scientific(value: float) -> bool:
    return value != 0 and not _SMALLEST_FIXED <= abs(value) < _LARGEST_FIXED


def _decimals(value: float, digits: int) -> int:
    if value == 0:
        return 0
    return max(0, digits - 1 - floor(log10(abs(value))))


def _fixed(value: float, decimals: int) -> str:
    text = f"{value:,.{decimals}f}"
    is_zero = not text.strip("-0.")
    if is_zero:
        text = text.removeprefix("-")
    return _minus(text)


def _scientific(value: float, digits: int) -> str:
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return _minus(f"{mantissa}e{int(exponent)}")


def _minus(text: str) -> str:
    return text.replace("-", "−")


def setting_text(value: object) -> str:
    """A setting as text; a dash where a manifest lacks it."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
