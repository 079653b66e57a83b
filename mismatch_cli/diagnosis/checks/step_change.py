"""A gap that changes from one step to the next, for good or for some steps, at equal weights."""

from collections.abc import Iterator, Sequence

import numpy as np

from mismatch_cli.diagnosis.by_step import FEWEST_PROMPTS, FEWEST_STEPS, StepChange
from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row, untested
from mismatch_cli.diagnosis.origins import VERSIONS
from mismatch_cli.diagnosis.shared_origins import shared_by

NAME, STAGE = "step-change", 5
ANY_SHARE = True  # a single bad step of many has little of the gap
COMPARES_PARTS = True
OF_SHAPE = True
TITLE = "A gap that changes at a step"
CAUSE = (
    "Something of the run changed there: a restart, an upgrade, another setting, or weights that "
    "did not reach the engine for some steps."
)
CHANGE = (
    "Look up what happened to the run at that step; record one step before and one after it, and "
    "compare them; --earlier-model MODEL tests stale weights."
)
SOURCE = "vLLM 48310 (FP8 scales of the cache lost at a sync), restarts with another version"
_LAG = " − ".join(reversed(VERSIONS))
_MEASURE = "times the gap of the other steps"
_NAMED = 3  # things that changed
_SAME = 0.9  # of the responses: the far ones are those of these steps


def check(evidence: Evidence) -> Finding:
    """Test the steps that differ most from all others: `by_step.find_step_change`."""
    if evidence.weights_differ:
        return untested(
            NAME, "the trainer's weights are newer, perhaps by different numbers of steps"
        )
    change = evidence.step_change
    if change is None:
        reason = (
            f"needs at least {FEWEST_STEPS} steps, and {FEWEST_PROMPTS} prompts more than steps"
        )
        return untested(NAME, reason)
    rows = _rows(change)
    if not change.is_found:
        power = (
            f"would have found {change.smallest:.2g} times from step {change.middle} on, and "
            f"{change.smallest_once:.2g} times in one step"
        )
        return Finding(NAME, "clear", change.times, _MEASURE, evidence=rows, reason=power)
    differences = list(_differences(evidence, change))
    sentence = f"{_sentence(change, differences)}{_sentence_on_far(evidence, change)}"
    sample = evidence.sample
    inside_N = change.inside_S[sample.response_N]
    left_N = np.where(inside_N, sample.d_N / change.times, sample.d_N)
    rows = (*rows, *differences)
    return Finding(NAME, "found", change.times, _MEASURE, sentence, rows, left_N=left_N)


def _sentence(change: StepChange, differences: Sequence[tuple[str, str]]) -> str:
    """Where, by how much, and what is on record there."""
    low, high = change.between
    where = f"{change.where[0].upper()}{change.where[1:]}"
    on_record = "; ".join(f"{name} {value}" for name, value in differences[:_NAMED])
    reason = f"On record there: {on_record}."
    if not on_record:
        reason = "The manifest records no change there."
    return (
        f"{where}, the gap is {change.times:.2g} times that {change.others} ({low:.2g} to "
        f"{high:.2g}). {reason}"
    )


def _sentence_on_far(evidence: Evidence, change: StepChange) -> str:
    """A sentence about the responses whose gap is far larger, unless they are these steps."""
    far, inside_S = evidence.far_responses, change.inside_S
    if far is None or (far.inside_S == inside_S).mean() > _SAME:
        return ""
    shared = shared_by(evidence.sample, far.inside_S, far.among_S & inside_S, evidence.traces)
    if far.inside_S[inside_S].sum() > _SAME * far.inside_S.sum() and shared:
        return f" In these steps, the far ones are {shared}."
    return f" It is far larger {far.where}."


def _rows(change: StepChange) -> tuple[Row, ...]:
    return (
        ("where the steps differ most", change.where),
        ("95 % interval of the factor", "{:.2g} to {:.2g}".format(*change.between)),
        ("z", change.z),
        ("z needed for so many steps", change.z_needed),
        (f"found from step {change.middle} on, if times", change.smallest),
        ("found in one step, if times", change.smallest_once),
    )


def _differences(evidence: Evidence, change: StepChange) -> Iterator[tuple[str, str]]:
    """The values that all responses of these steps have on record, and all others do not, by
    name.
    """
    for name, value_S in _on_record(evidence):
        inside = set(value_S[change.inside_S].tolist())
        outside = set(value_S[~change.inside_S].tolist())
        if len(inside) == len(outside) == 1 and inside != outside:
            yield name, f"{inside.pop()} instead of {outside.pop()}"


def _on_record(evidence: Evidence) -> Iterator[tuple[str, np.ndarray]]:
    """What the rows and the manifests say of each response that may change at a step."""
    origin_S = evidence.sample.origin_S
    if all(name in origin_S for name in VERSIONS):
        rollout_S, trainer_S = (origin_S[name] for name in VERSIONS)
        yield _LAG, trainer_S - rollout_S
    if "epoch" in origin_S:
        yield "epoch", origin_S["epoch"]
    for name, values in evidence.traces.settings.items():
        yield name, np.array([str(value) for value in values])[origin_S["trace"]]
