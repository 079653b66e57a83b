"""A looped test fails if one of its cases does, and names it."""

from __future__ import annotations

import inspect

import pytest

from tests.looped import looped


def test_every_case_runs_and_every_failure_is_named():
    calls: list[tuple[int, str]] = []

    @looped("number", [1, 2, 3])
    @looped(("word", "length"), [("a", 1), ("bb", 2)])
    def checks(number: int, word: str, length: int) -> None:
        calls.append((number, word))
        assert (number, length) != (2, 2), "two and two"

    with pytest.raises(
        AssertionError, match=r"(?s)1 of 3 .*number=2.*1 of 2 .*word='bb'.*two and two"
    ):
        checks()
    assert len(calls) == 6


def test_only_fixtures_are_left_to_pytest():
    @looped("case", [1])
    def checks(case: int, tmp_path: object) -> None:
        assert case and tmp_path

    assert list(inspect.signature(checks).parameters) == ["tmp_path"]
    checks(tmp_path="here")


def test_without_a_case_nothing_is_shown():
    @looped("case", [])
    def checks(case: int) -> None: ...

    with pytest.raises(AssertionError, match="no case"):
        checks()
