"""A child answers, raises, hangs, dies or is told things: the same protocol in a new Python and in
a fork. What hostile code does to it is in tests/probe/tasks/test_hostile_rewards.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from mismatch_cli.processes.child import DIED, LATE, Child, Reply
from tests.paths import ROOT


def doing(word: str) -> Callable[[Any], Any]:
    """Does what it is asked to."""

    def answer(request: Any) -> Any:
        if request == "raise":
            raise ValueError(word)
        if request == "die":
            os._exit(3)
        if request == "hang":
            time.sleep(600)
        if request == "descriptors":
            return [
                os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
            ]
        return [word, request]

    return answer


@pytest.fixture(params=[False, True], ids=["new", "fork"])
def child(request, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    child = Child(doing, "word", forks=request.param)
    yield child
    child.stop()


def test_it_answers_until_it_dies_and_then_a_new_one_does(child):
    assert child.ask({"a": "\ud800"}, 60) == Reply(["word", {"a": "\ud800"}])
    assert child.ask("raise", 60) == Reply(error="ValueError: word")
    pid = child.pid
    assert child.ask("hang", 0.3) is LATE and child.ask("hang", 60) is LATE
    assert child.given_up == ['"hang"'] and not child.runs
    assert child.ask("die", 60) is DIED
    assert child.ask(1, 60).value == ["word", 1] and child.pid != pid


def test_what_it_is_told_is_answered_in_order_and_it_ends_by_itself(child):
    for message in (1, "raise", 2):
        child.tell(message)
    replies = [child.receive(60) for _ in range(4)]
    assert replies == [
        Reply(),
        Reply(["word", 1]),
        Reply(error="ValueError: word"),
        Reply(["word", 2]),
    ]
    assert child.silence == 0
    assert child.finish(60) == Reply()
    child.tell(3)
    child.tell("die")
    assert child.finish(60) is DIED


def test_it_has_no_descriptor_of_ours(child, tmp_path):
    """A lock, for example, would be held for as long as it runs."""
    with (tmp_path / "lock").open("w"):
        files = child.ask("descriptors", 60).value
    assert os.devnull in files and str(tmp_path / "lock") not in files
