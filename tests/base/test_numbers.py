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
    near,
    number,
    plus_minus,
    resolved,
    setting_text,
    share,
    sparkline,
    stretches,
    things,
    times,
    two_digits,
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
        (1.0, 0.9993, 1.0007, "1.0000", "[0.9993, 1.0007]"),
        (1.0, 0.9988, 1.0012, "1.000", "[0.999, 1.001]"),
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


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (0.0152, 0.0105, 0.0199, "0.0152 ± 0.0047"),
        (5.9, 0.0, 19.0, "5.9 [0, 19]"),
        (5.0, 1.0, 13.0, "5.0 [1.0, 13]"),
        (12.0, 0.0, 18.0, "12 [0, 18]"),
        (6.5, 0.0, 10.0, "6.5 ± 5.0"),  # the longer side is 1.3 times half of the width
        (4.2e-5, 4.0e-5, 4.4e-5, "4.2e−5 ± 2.0e−6"),
        (3e-4, 2.5e-4, 3.5e-4, "0.00030 ± 5.0e−5"),
        (0.5, 0.5, 0.5, "0.500"),
        (0.5, 0.6, 0.4, "0.500"),
        (0.5, None, 0.6, "0.500"),
        (0.5, 0.4, None, "0.500"),
        (0.5, -inf, 0.6, "0.500"),
        (None, 0.4, 0.6, MISSING),
    ],
)
def test_half_the_width_of_an_interval(value, low, high, text) -> None:
    assert plus_minus(value, low, high) == text


def test_a_value_near_its_ideal_has_the_digits_of_the_distance() -> None:
    shown = [near(value, 1.0) for value in (1.00003, 0.9996, 1.05, 0.88, 1.11, 1.0, 1 + 1e-12)]
    assert shown == ["1.000030", "0.99960", "1.050", "0.880", "1.11", "1.00", "1.000000000"]
    assert (near(None, 1.0), near(nan, 1.0)) == (MISSING, MISSING)


def test_a_range_of_factors_and_factors_to_calculate_with() -> None:
    assert times(3.14, (2.44, 9.96)) == "2.4–10 ×"
    assert times("below resolution", (900.0, 1000.0)) == "900–1,000 ×"
    assert times(2000.0, (900.0, 1001.0)) == "> 1,000 ×"
    assert times(1000.0) == "1,000 ×"
    assert [resolved(x) for x in (None, 3.0, 1000.0, 1001.0, "below resolution")] == [
        None, 3.0, 1000.0, inf, inf,
    ]  # fmt: skip
    assert [two_digits(x) for x in (9.96, 0.0949, 1234.0, None)] == [
        "10",
        "0.095",
        "1,200",
        MISSING,
    ]


def test_a_sparkline_has_a_block_for_each_value() -> None:
    assert sparkline([0.0, 0.5, 1.0, 2.0, -1.0], 0.0, 1.0) == "▁▅██▁"
    assert sparkline([2.0, None, nan, 3.0, inf], 1.0, 3.0) == "▅  █ "
    assert (sparkline([1.0], 1.0, 1.0), sparkline([0.0], 0.0, 0.0)) == ("▅", "▁")


def test_a_setting_is_a_word() -> None:
    assert [setting_text(x) for x in (None, True, False, 0, "", 1.5)] == [
        MISSING, "yes", "no", "0", "", "1.5",
    ]  # fmt: skip
