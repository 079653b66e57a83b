"""A small sample of every kind of broken input, the same in each run; `lab/fuzz.py` draws
ten thousand.
"""

from __future__ import annotations

import os
import pickle

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz import hostile, properties
from tests.fuzz.world import CANARY, call, copy

pytestmark = pytest.mark.slow

CASES = {
    "arguments": 60,
    "prompt files": 25,
    "manifests": 15,
    "shards": 20,
    "dumps": 25,
    "settings": 20,
    "masks": 20,
}
CASES |= {"rewards": 4, "chat templates": 4, "server answers": 40, "bombs": 1}
KINDS = properties.KINDS | hostile.KINDS


@pytest.mark.parametrize("name", list(KINDS))
def test_no_input_ends_in_a_traceback_or_loses_anything(name):
    kind = KINDS[name]

    @settings(
        max_examples=CASES[name],
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(kind.cases)
    def holds(case):
        kind.check(case)

    holds()


def test_the_canary_sings():
    """The fuzzer's payload works: unpickling it creates the file that must never exist after a
    case.
    """
    with copy() as folder:
        pickle.loads(pickle.dumps(properties.Payload())).close()
        assert (folder / CANARY).is_file()


def test_losses_are_noticed():
    with copy() as folder:
        (folder / "new").write_text("x")
        outcome = call(folder, "report", "run", "--output", "new")
        assert outcome.code == 1 and outcome.before == outcome.after
        os.unlink("new")
        assert call(folder, "report", "run", "--output", "new", "--quiet").code == 0
