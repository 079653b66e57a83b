"""Pairs of log-probabilities without token ids: what needs none has the same numbers as with them,
and the rest says so in one sentence.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch_cli.app.cli import run
from mismatch_cli.base.places import bundled
from mismatch_cli.diagnosis.sample import WITHOUT_IDS, WITHOUT_PROMPTS
from mismatch_cli.studies.diagnosis import analyse_diagnosis
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.studies.tokens import token_tables
from mismatch_cli.trace.reader import Trace
from tests.frameworks.importing.layouts import imported, real_rows, write_lines

NAMES = ("logp_rollout", "logp_trainer", "loss_mask", "advantage", "reward", "prompt_id")
IDS = ("prompt_ids", "response_ids")


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """The same responses with ids and without."""
    folder = tmp_path_factory.mktemp("traces")
    for name, columns in (("with", (*IDS, *NAMES)), ("without", NAMES)):
        records = [{column: row[column] for column in columns} for row in real_rows(32)]
        imported(write_lines(folder / f"{name}.jsonl", records), into=folder / name)
    return [Trace.open(folder / name) for name in ("with", "without")]


def test_every_metric_is_the_same(traces):
    with_ids, pairs = (analyse_mismatch([trace], worst=5) for trace in traces)
    assert not traces[1].has_ids and "response_ids" not in traces[1].columns()
    metrics = [study.result.main.metrics for study in (with_ids, pairs)]
    assert metrics[0] == metrics[1]
    worst = pairs.result.worst.abs_d
    assert worst and all(token.token_id is None for token in worst)
    assert worst == [replace(token, token_id=None) for token in with_ids.result.worst.abs_d]
    assert pairs.explored_responses == 0 and with_ids.explored_responses == 32


def test_tokens_are_exported_without_their_text(traces):
    with_ids, pairs = (next(iter(token_tables([trace]))) for trace in traces)
    for name in ("token_id", "token"):
        assert pairs.column(name).null_count == len(pairs)
    assert np.array_equal(pairs.column("d"), with_ids.column("d"))


def test_checks_that_need_ids_are_not_made(traces):
    findings = {each.check: each for each in analyse_diagnosis([traces[1]]).diagnosis.findings}
    untested = {name for name, each in findings.items() if each.reason == WITHOUT_IDS}
    assert untested == {"biased-token", "forced-tokens", "repeated-responses"}
    assert findings["context-parallel"].reason == WITHOUT_PROMPTS
    assert sum(each.status != "untested" for each in findings.values()) > 10


@pytest.mark.parametrize(
    "line",
    [
        ["rescore", "RUN", "--trainer-model", "MODEL"],
        ["compare", "RUN", "RUN"],
        ["diagnose", "RUN", "--trainer-model", "MODEL"],
    ],
)
def test_what_needs_ids_says_so(line, traces, tmp_path, capsys):
    places = {"RUN": str(traces[1].folder), "MODEL": str(bundled("model"))}
    typed = [places.get(word, word) for word in line]
    assert run([*typed, "--output", str(tmp_path / "out"), "-q"]) == 1
    said = capsys.readouterr().err
    assert "has no prompt_ids and no response_ids, only log-probabilities" in said
