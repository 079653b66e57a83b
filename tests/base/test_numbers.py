"""Numbers as text, compared with what a person would write."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch_cli.base.numbers import (
    MISSING,
    count,
    counted,
    estimate,
    number,
    share,
    stretches,
    things,
    times,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.00421, "0.00421"),
        (0.1, "0.100"),
        (1.0, "1.00"),
        (12.345, "12.3"),
        (-1.0049, "−1.00"),
        (12345.6, "12,346"),
        (9.9999e-5, "1.00e−4"),
        (1e-4, "0.000100"),
        (-4.2e-9, "−4.20e−9"),
        (2.5e7, "2.50e7"),
        (None, MISSING),
        (nan, MISSING),
        (inf, MISSING),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "low", "high", "text", "interval"),
    [
        (0.00421, 0.00402, 0.0044, "0.00421", "[0.00402, 0.00440]"),
        (1.0004, 1.0002, 1.0006, "1.0004", "[1.0002, 1.0006]"),
        (1.0, 1.0, 1.0, "1.00", "[1.00, 1.00]"),
        (0.001, -0.0004, 0.0024, "0.00100", "[−0.00040, 0.00240]"),
        (0.5, -1e-9, 1.0, "0.500", "[0.000, 1.000]"),
        (4.2e-6, 4.0e-6, 4.4e-6, "4.20e−6", "[4.00e−6, 4.40e−6]"),
        (1234.5, 1200.0, 1270.0, "1,234", "[1,200, 1,270]"),
        (0.5, None, None, "0.500", MISSING),
        (None, 1.0, 2.0, MISSING, MISSING),
        (0.5, nan, 1.0, "0.500", MISSING),
    ],
)
def test_estimate(value: float, low: float, high: float, text: str, interval: str) -> None:
    assert estimate(value, low, high) == (text, interval)


def test_share_is_in_percent() -> None:
    assert share(0.0042, 0.004, 0.0044) == ("0.420 %", "[0.400, 0.440] %")
    assert share(0.0) == ("0 %", MISSING)
    assert share(None) == (MISSING, MISSING)


def test_times_and_count() -> None:
    assert [times(x) for x in (3.14, 29.4, 1037.2, "below resolution", None)] == [
        "3.1 ×",
        "29 ×",
        "> 1,000 ×",
        "noise ≈ 0",
        MISSING,
    ]
    assert (count(1234567), count(None)) == ("1,234,567", MISSING)


@given(st.floats(min_value=-1e300, max_value=1e300))
def test_a_number_reads_back_as_itself(value: float) -> None:
    text = number(value)
    assert float(text.replace("−", "-").replace(",", "")) == pytest.approx(value, rel=0.006)
    assert "-" not in text


def test_one_is_singular():
    assert [things(n, "response") for n in (0, 1, 1234)] == [
        "0 responses",
        "1 response",
        "1,234 responses",
    ]


def test_a_long_curve_becomes_means_of_stretches() -> None:
    assert stretches([1, None, 3], 3) == [1, None, 3]
    assert stretches([1, 3, None, None, 5, None], 3) == [2, None, 5]
    assert len(stretches(list(range(100)), 7)) == 7


@pytest.mark.parametrize(
    ("words", "one"),
    [
        ("truncated last lines", "truncated last line"),
        ("unknown columns (this, rows)", "unknown column (this, rows)"),
        ("batches without token ids", "batch without token ids"),
        (
            "responses whose logp_rollout does not have one value",
            "response whose logp_rollout does not have one value",
        ),
        ("responses have a reward that is odd", "response has a reward that is odd"),
        ("lines that hold more than one sample", "line that holds more than one sample"),
        ("rows of a loss", "row of a loss"),
    ],
)
def test_one_thing_is_singular(words, one):
    assert (
        counted(1, words) == f"1 {one}"
        and counted(1200, words) == f"1,200 {words}"
        and counted(0, words)[0] == "0"
    )
