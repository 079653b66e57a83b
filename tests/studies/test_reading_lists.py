"""The columns that studies read are all that their accumulators look at: with every column of a
trace the answers are the same.
"""

from __future__ import annotations

import pytest

from mismatch_cli.base.places import bundled_trace
from mismatch_cli.frameworks import dialects
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.studies.clipping import analyse_clipping
from mismatch_cli.studies.comparison import analyse_comparison
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.trace.reader import Trace

ALGORITHMS = ("ppo", "dppo-binary-tv", "dppo-topk-tv")


def answers() -> dict[str, object]:
    gap, routes, other = (Trace.open(bundled_trace(name)) for name in ("fp8-kv", "moe", "bfloat16"))
    return {
        "report": analyse_mismatch([gap]).to_json(),
        "routes": analyse_mismatch([routes]).to_json(),
        "clipstats": analyse_clipping([gap], [TABLE[name] for name in ALGORITHMS]).to_json(),
        "compare": analyse_comparison([gap, other]).to_json(),
        "dialects": dialects.readings([gap], dialects.names()),
    }


def test_every_column_gives_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped: list[set[str]] = []
    row_groups = Trace.row_groups

    def of_all(self, columns=None, shards=None):
        skipped.append(self.columns() - set(columns or self.columns()))
        return row_groups(self, None, shards)

    expected = answers()
    monkeypatch.setattr(Trace, "row_groups", of_all)
    own_answer = answers()
    for name, answer in expected.items():
        assert own_answer[name] == answer, name
    assert sum(map(bool, skipped)) > 5  # columns were left out before
