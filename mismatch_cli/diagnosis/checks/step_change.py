"""A gap that changes from one step to the next, for good or for some steps, at equal weights."""

from collections.abc import Iterator

import numpy as np

from mismatch_cli.diagnosis.by_step import FEWEST_PROMPTS, FEWEST_STEPS, StepChange
from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row, untested
from mismatch_cli.diagnosis.shared_origins import shared_by

NAME, STAGE = "step-change", 5
ANY_SHARE = True  # a single bad step of many has little of the gap
COMPARES_PARTS = True
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
_VERSIONS = ("version_trainer", "version_rollout")
_LAG = " − ".join(_VERSIONS)
_MEASURE = "times the gap of the other steps"
_NAMED = 3  # things that changed
_SAME = 0.9  # of the responses: the far ones are those of these steps


def check(evidence: Evidence) -> Finding:
    """Test the steps that differ most from all others: `by_step.change_of`."""
    if evidence.weights_differ:
        return untested(
            NAME, "the trainer's weights are newer, perhaps by different numbers of steps"
        )
    change = evidence.step_change
    if change is None:
        return untested(
            NAME,
            f"needs at least {FEWEST_STEPS} steps, and {FEWEST_PROMPTS} prompts more than steps",
        )
    rows = _rows(change)
    if not change.is_found:
        power = (
            f"would have found {change.smallest:.2g} times from step {change.middle} on, and "
            f"{change.smallest_once:.2g} times in one step"
        )
        return Finding(NAME, "clear", change.times, _MEASURE, evidence=rows, reason=power)
    changed = tuple(_changed(evidence, change))
    sentence = f"{_sentence(change, changed)}{_far_ones(evidence, change)}"
    sample = evidence.sample
    inside_N = change.inside_S[sample.response_N]
    left_N = np.where(inside_N, sample.d_N / change.times, sample.d_N)
    figures = (*rows, *changed)
    return Finding(NAME, "found", change.times, _MEASURE, sentence, figures, left_N=left_N)


def _sentence(change: StepChange, changed: tuple[tuple[str, str], ...]) -> str:
    """Where, by how much, and what is on record there."""
    low, high = change.between
    what = "; ".join(f"{name} {value}" for name, value in changed[:_NAMED])
    return (
        f"{change.where[0].upper()}{change.where[1:]}, the gap is {change.times:.2g} times that "
        f"{change.others} ({low:.2g} to {high:.2g}). "
        + (f"On record there: {what}." if what else "The manifest records no change there.")
    )


def _far_ones(evidence: Evidence, change: StepChange) -> str:
    """A sentence about the responses whose gap is far larger, unless they are these steps."""
    part = evidence.far
    if part is None or (part.inside_S == change.inside_S).mean() > _SAME:
        return ""
    inside_S = change.inside_S
    members = shared_by(evidence.sample, part.inside_S, part.among_S & inside_S, evidence.traces)
    if part.inside_S[inside_S].sum() > _SAME * part.inside_S.sum() and members:
        return f" In these steps, the far ones are {members}."
    return f" It is far larger {part.where}."


def _rows(change: StepChange) -> tuple[Row, ...]:
    return (
        ("where the steps differ most", change.where),
        ("95 % interval of the factor", "{:.2g} to {:.2g}".format(*change.between)),
        ("z", change.z),
        ("z needed for so many steps", change.z_needed),
        (f"found from step {change.middle} on, if times", change.smallest),
        ("found in one step, if times", change.smallest_once),
    )


def _changed(evidence: Evidence, change: StepChange) -> Iterator[tuple[str, str]]:
    """What the rows and the manifests have in these steps, and nowhere else."""
    inside_S, origin_S = change.inside_S, dict(evidence.sample.origin_S)
    if all(name in origin_S for name in _VERSIONS):
        newer, sampling = (origin_S[name] for name in _VERSIONS)
        origin_S[_LAG] = newer - sampling
    for name in (_LAG, "epoch"):
        if name in origin_S:
            yield from _instead(name, origin_S[name][inside_S], origin_S[name][~inside_S])
    for name, values in evidence.traces.settings.items():
        value_S = np.array([str(value) for value in values])[origin_S["trace"]]
        yield from _instead(name, value_S[inside_S], value_S[~inside_S])


def _instead(name: str, inside_R: np.ndarray, outside_R: np.ndarray) -> Iterator[tuple[str, str]]:
    """What all have here, and all others do not, if there is one value of each."""
    inside, outside = set(inside_R.tolist()), set(outside_R.tolist())
    if len(inside) == len(outside) == 1 and inside != outside:
        yield name, f"{inside.pop()} instead of {outside.pop()}"
