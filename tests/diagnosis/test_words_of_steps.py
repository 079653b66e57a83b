"""What is said of steps whose gap differs."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import step_change
from mismatch_cli.diagnosis.far_responses import Subset
from tests.diagnosis.samples import SampleColumns


def change_of(**fields: object) -> SimpleNamespace:
    plain = {
        "where": "from step 6 on", "others": "before", "times": 2.5, "between": (2.0, 3.1), "z": 9.0,
        "z_needed": 4.0, "middle": 5, "smallest": 1.3, "smallest_once": 1.9, "is_found": True,
        "inside_S": np.array([False, False, True, True]),
    }  # fmt: skip
    return SimpleNamespace(**plain | fields)


def evidence_of(change=None, far=None, settings=None, **origins: object) -> SimpleNamespace:
    sample = SampleColumns(
        d_N=np.array([0.1, 0.2, 0.5, -1.0]),
        response_T=np.arange(4),
        index_N=np.arange(4),
        origin_S={"trace": np.array([0, 0, 1, 1])} | origins,
    )
    return SimpleNamespace(
        sample=sample,
        weights_differ=False,
        step_change=change,
        far_responses=far,
        traces=SimpleNamespace(settings=settings or {}),
    )


def test_steps_that_differ_are_named_with_what_is_on_record_there():
    """The lag of the rollout's version, the epoch, and what the manifests say; a value that some
    of these steps share with the others is not named.
    """
    evidence = evidence_of(
        change_of(),
        settings={"engine": ("0.9", "0.10"), "same": (1, 1), "dtype": (None, "fp8")},
        epoch=np.array([0, 0, 1, 1]),
        version_rollout=np.array([3, 4, 5, 6]),
        version_trainer=np.array([3, 4, 7, 8]),
        mixed=np.array([0, 1, 1, 1]),
    )
    finding = step_change.check(evidence)
    assert (finding.check, finding.status, finding.effect) == ("step-change", "found", 2.5)
    assert finding.measure == "times the gap of the other steps"
    lag = "version_trainer − version_rollout"
    assert finding.sentence == (
        "From step 6 on, the gap is 2.5 times that before (2 to 3.1). On record there: "
        f"{lag} 2 instead of 0; epoch 1 instead of 0; engine 0.10 instead of 0.9."
    )
    assert finding.evidence == (
        ("where the steps differ most", "from step 6 on"),
        ("95 % interval of the factor", "2 to 3.1"),
        ("z", 9.0),
        ("z needed for so many steps", 4.0),
        ("found from step 5 on, if times", 1.3),
        ("found in one step, if times", 1.9),
        (lag, "2 instead of 0"),
        ("epoch", "1 instead of 0"),
        ("engine", "0.10 instead of 0.9"),
        ("dtype", "fp8 instead of None"),
    )
    assert finding.left_N == pytest.approx([0.1, 0.2, 0.2, -0.4])


def test_without_a_difference_the_manifest_is_said_to_record_none():
    """Here every value of the first steps is among those of the last, or there are several."""
    evidence = evidence_of(
        change_of(), epoch=np.array([0, 0, 0, 1]), settings={"engine": ("0.9", "0.9")}
    )
    sentence = step_change.check(evidence).sentence
    assert sentence.endswith("(2 to 3.1). The manifest records no change there.")
    evidence.sample.origin_S["epoch"] = np.array([0, 1, 2, 2])
    assert list(step_change._differences(evidence, evidence.step_change)) == []


def test_steps_that_do_not_differ_say_what_would_have_been_found():
    finding = step_change.check(evidence_of(change_of(is_found=False)))
    assert (finding.check, finding.status, finding.effect) == ("step-change", "clear", 2.5)
    assert finding.reason == (
        "would have found 1.3 times from step 5 on, and 1.9 times in one step"
    )
    assert len(finding.evidence) == 6
    untested = step_change.check(evidence_of())
    assert (untested.check, untested.reason) == (
        "step-change", "needs at least 4 steps, and 8 prompts more than steps"
    )  # fmt: skip
    newer = evidence_of(change_of())
    newer.weights_differ = True
    assert step_change.check(newer).reason.startswith("the trainer's weights are newer")


@pytest.mark.parametrize(
    ("far", "shared", "words"),
    [
        (range(10, 20), "all of rank 1", ""),
        (range(10, 18), "all of rank 1", " In these steps, the far ones are all of rank 1."),
        (range(10, 15), "all of rank 1", " In these steps, the far ones are all of rank 1."),
        (range(10, 15), "", " It is far larger in 5 of 20 responses."),
        (range(5, 15), "all of rank 1", " It is far larger in 10 of 20 responses."),
        (range(9, 19), "all of rank 1", " It is far larger in 10 of 20 responses."),
        (range(11, 20), "all of rank 1", ""),
        (None, "all of rank 1", ""),
    ],
)
def test_far_responses_are_mentioned_unless_they_are_those_of_the_steps(
    far, shared, words, monkeypatch
):
    """Of twenty responses the steps have the last ten."""
    calls = []
    monkeypatch.setattr(
        step_change, "shared_by", lambda *arguments: calls.append(arguments) or shared
    )
    inside_S = np.arange(20) >= 10
    subset = None
    if far is not None:
        subset = Subset(np.isin(np.arange(20), list(far)), np.arange(20) > 0)
    evidence = evidence_of(far=subset)
    sentence = step_change._sentence_on_far(evidence, change_of(inside_S=inside_S))
    assert sentence == words
    for sample, far_S, among_S, traces in calls:
        assert (sample, traces) == (evidence.sample, evidence.traces)
        assert far_S is subset.inside_S
        assert among_S.tolist() == inside_S.tolist()
