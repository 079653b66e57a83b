"""What checks see of a trace: its gap beside the expected one, its subsets, and what is gathered."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mismatch_cli.diagnosis import evidence as module
from mismatch_cli.diagnosis.evidence import Evidence, EvidenceCollector, HashLimits, untested
from mismatch_cli.diagnosis.far_responses import Subset
from mismatch_cli.diagnosis.group_estimates import Mean
from mismatch_cli.diagnosis.origins import NOWHERE, Origin, Traces
from mismatch_cli.diagnosis.sample import NO_LIMIT, Sample
from mismatch_cli.limits.expected import Expected
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.trace.reader import table_to_batch
from mismatch_cli.trace.writer import rows_to_table
from tests.diagnosis.samples import few_responses


def evidence_of(sample: Sample, **values: Any) -> Evidence:
    evidence = EvidenceCollector(PAIRS["mismatch"]).evidence({}, {})
    return replace(evidence, sample=sample, **values)


def with_gap(value: float, error: float, high: float) -> Evidence:
    evidence = evidence_of(few_responses([1]))
    vars(evidence)["gap"] = Mean(value, error, 10, 5)
    vars(evidence)["expected"] = Expected(0.0, high, "", "", False)
    return evidence


@pytest.mark.parametrize(("value", "error", "high", "is_too_large", "resolution"), [
    (0.51, 0.1, 0.3, True, 0.5), (0.49, 0.1, 0.3, False, 0.5),
    # Of too few prompts, half of the gap may be an error
    (0.61, np.inf, 0.3, True, 0.605), (0.59, np.inf, 0.3, False, 0.595),
])  # fmt: skip
def test_a_gap_is_too_large_by_two_standard_errors(value, error, high, is_too_large, resolution):
    evidence = with_gap(value, error, high)
    assert evidence.gap_is_too_large == is_too_large
    assert evidence.resolution == pytest.approx(resolution)


def test_the_gap_is_the_mean_of_its_size_over_tokens_that_count():
    logp_T = np.array([-0.5, -1.25, -1.0, -9.0])
    sample = few_responses([2, 2], logp_T=logp_T, counts_T=np.arange(4) < 3)
    assert evidence_of(sample).gap.value == pytest.approx(0.25)


SIDES = {"rollout": {"dtype": "bfloat16"}, "trainer": {"dtype": "float32"}}


@pytest.mark.parametrize(("about", "nats", "is_rare"), [
    (SIDES, 0.9, True), (SIDES, 1.1, False),
    ({"rollout": {"dtype": "float32"}, "trainer": {"dtype": "float32"}}, 0.9, False),
    (SIDES | {"config": {"sampling": {"temperature": 0.5}}}, 1.9, True),
    (SIDES | {"config": {"sampling": {"temperature": 0.5}}}, 2.1, False),
    ({"trainer": {"temperature": 1.0}, "config": {"sampling": {"temperature": 0.5}}}, 1.9, True),
])  # fmt: skip
def test_a_gap_of_few_tokens_is_rare_in_16_bits_up_to_a_step_at_the_temperature(
    about, nats, is_rare
):
    logp_T = np.full(20, -1.0)
    logp_T[3] -= nats
    evidence = evidence_of(few_responses([20], logp_T=logp_T), about=about)
    assert evidence.gap_is_rare == is_rare
    if is_rare:
        assert evidence.far_responses is None and evidence.step_change is None


def test_where_the_gap_is_not_rare_its_responses_and_steps_are_compared(monkeypatch):
    monkeypatch.setattr(module, "find_far_responses", lambda *own: ("far", *own))
    monkeypatch.setattr(module, "find_step_change", lambda *own: ("change", *own))
    sample, traces = few_responses([1]), Traces(("a",))
    for is_rare in (True, False):
        evidence = evidence_of(sample, traces=traces)
        vars(evidence)["gap_is_rare"] = is_rare
        assert evidence.far_responses == (None if is_rare else ("far", sample, traces))
        assert evidence.step_change == (None if is_rare else ("change", sample))


INSIDE_S, EVERY_S = np.array([True, False]), np.ones(2, dtype=bool)


def change_of(*, is_found: bool) -> SimpleNamespace:
    return SimpleNamespace(is_found=is_found, inside_S=~INSIDE_S, where="from step 5 on")


def test_subsets_that_share_something_come_first(monkeypatch):
    sample = few_responses([1, 1])
    plain, shared = Subset(INSIDE_S, EVERY_S), Subset(INSIDE_S, EVERY_S, "all of rank 2")
    for far, is_found, pair, names in (
        (plain, True, "mismatch", ["from step 5 on", ""]),
        (shared, True, "mismatch", ["all of rank 2", "from step 5 on"]),
        (plain, True, "total", [""]),
        (plain, False, "mismatch", [""]),
        (None, True, "mismatch", ["from step 5 on"]),
        (None, False, "mismatch", []),
    ):
        evidence = evidence_of(sample, pair=PAIRS[pair])
        vars(evidence)["far_responses"] = far
        vars(evidence)["step_change"] = change_of(is_found=is_found)
        subsets = evidence.subsets
        assert [subset.shared for subset in subsets] == names
        for subset in subsets:
            if subset.shared.startswith("from"):
                assert subset.inside_S.tolist() == [False, True] and subset.among_S.all()
    vars(evidence)["step_change"] = None
    assert evidence.subsets == ()


def test_weights_differ_where_the_trainer_has_learned():
    sample = few_responses([1])
    differing = [name for name in PAIRS if evidence_of(sample, pair=PAIRS[name]).weights_differ]
    assert differing == ["total"]


def test_logits_are_read_from_a_model_only_where_the_trace_does_not_show_them(monkeypatch):
    steps: list[float | None] = []

    def expected(about: Any, scale: Any, lines: Any, step: float | None, gap: float) -> None:
        assert about == {} and scale.shows_steps in (False, True) and gap == 0.0
        steps.append(step)

    monkeypatch.setattr(module, "expected_gap", expected)
    model = SimpleNamespace(few=[0], logit_step=0.25)
    without = SimpleNamespace(few=[], logit_step=0.25)
    for own, shows in ((None, False), (model, False), (model, True), (without, False)):
        evidence = evidence_of(few_responses([1]), model=own)
        _ = replace(evidence, scale=SimpleNamespace(shows_steps=shows)).expected
    assert steps == [None, 0.25, None, None]
    assert evidence_of(few_responses([1])).readings is None
    assert evidence_of(few_responses([1]), model=model).readings is not None


def test_what_is_gathered_is_counted_once_and_passed_on():
    """Two responses with prompts, of a file of the second trace; then a table without the pair."""
    columns = {name: [0, 0] for name in ("step", "epoch", "minibatch")} | {
        "version_rollout": [4, 4],
        "version_trainer": [4, 4],
        "prompt_id": [0, 1],
        "sample_index": [0, 0],
        "finish_reason": ["stop"] * 2,
        "prompt_ids": [[5], [6]],
        "response_ids": [[5, 7], [5, 7]],
        "loss_mask": [[True, True]] * 2,
        "logp_rollout": [[-9.0, -9.0], [-9.0, -9.0]],
        "logp_trainer": [[-9.5, -9.0], [-9.0, -9.0]],
    }
    table = rows_to_table(columns)
    collector = EvidenceCollector(PAIRS["mismatch"], HashLimits(credit=7))
    origin = Origin(1, "shard-00003-000000.parquet")
    collector.update(table, table_to_batch(table), origin)
    unmeasured = rows_to_table({name: columns[name] for name in columns if name != "logp_trainer"})
    collector.update(unmeasured, table_to_batch(unmeasured))
    traces = Traces(("a", "b"))
    evidence = collector.evidence({"temperature": 0.5}, None, traces)
    assert evidence.counts.responses == 2 and evidence.copies.count() == (1, 2)
    assert evidence.sample.seen_T.tolist() == [True, False, False, False]
    assert evidence.sample.origin_S["rank"].tolist() == [3, 3]
    assert evidence.sample.origin_S["trace"].tolist() == [1, 1]
    assert evidence.heads.logq_RH[:, 0].tolist() == [-9.0, -9.0]
    assert (evidence.sampling, evidence.about, evidence.traces) == (
        {"temperature": 0.5},
        {},
        traces,
    )
    assert collector.limits == HashLimits(NO_LIMIT, NO_LIMIT, NO_LIMIT, 7)
    limits = EvidenceCollector(PAIRS["mismatch"], HashLimits(1, 2, 3, 4)).limits
    assert limits == (1, 2, 3, 4) and NOWHERE.trace == 0
    assert evidence.gap.value == pytest.approx(0.125)


def test_what_was_not_tested_says_what_it_needs():
    finding = untested("credit", "no rewards", "--rewards")
    assert (finding.check, finding.status) == ("credit", "untested")
    assert (finding.reason, finding.needs) == ("no rewards", "--rewards")
