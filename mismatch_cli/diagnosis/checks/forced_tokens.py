"""A token that every response has at the same place, since a sampler forced it."""

from dataclasses import dataclass

import numpy as np

from mismatch_cli.base.numbers import things
from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.power import clear, no_power, percent
from mismatch_cli.diagnosis.sample import WITHOUT_IDS, Sample

NAME, STAGE = "forced-tokens", 1
TITLE = "Forced tokens in the loss"
CAUSE = (
    "A logits processor or a budget forced a token, which the model did not choose: one side calls "
    "it impossible or certain, and its ratio is meaningless."
)
CHANGE = "Set the loss mask to 0 for a token that a sampler forces (such as the end of a thought)."
SOURCE = "forced end-of-thought tokens in thinking budgets"
_FEWEST = 16  # responses that reach a place
_ALL = 0.9  # of them with the same id: a few may end there
_NATS = 1.0  # mean surprise: sixteen equal tokens of it are drawn once in e^16 tries
_TIMES = 10.0  # the gap elsewhere


@dataclass(frozen=True)
class _Place:
    """The place of responses at which nearly all have one id."""

    position: int
    token: int
    index: np.ndarray  # of these tokens in the sample
    responses: int  # that reach the place


def check(evidence: Evidence) -> Finding:
    """Find places where nearly all responses have one id that one side makes improbable, with a
    gap there that is far above that of the other tokens.
    """
    sample = evidence.sample
    if sample.response_ids_T is None:
        return untested(NAME, WITHOUT_IDS)
    places = _forced_places(sample)
    forced_T = np.zeros(len(sample.logq_T), dtype=bool)
    for place in places:
        forced_T[place.index] = True
    share = float(forced_T.sum()) / max(1, sample.num_counted)
    if not places:
        return clear(NAME, share, "share of tokens", _power(sample))
    first = places[0]
    logq, logp = float(sample.logq_T[first.index].mean()), float(sample.logp_T[first.index].mean())
    sentence = (
        f"{len(first.index):,} of {first.responses:,} responses have token {first.token} at "
        f"place {first.position + 1}, with a mean log μ of {logq:.3g} and a mean log π of "
        f"{logp:.3g}: it was forced, not sampled."
    )
    rows = (
        ("token", first.token),
        ("place in the response, from 1", first.position + 1),
        ("places with a forced token", len(places)),
        ("mean −log μ there, nats", -logq),
        ("mean −log π there, nats", -logp),
    )
    left_N = sample.left_without(forced_T)
    return Finding(NAME, "found", share, "share of tokens", sentence, rows, left_N=left_N)


def _power(sample: Sample) -> str:
    """A token forced in nearly all responses, at the places that enough responses reach."""
    responses_P = np.bincount(sample.position_T[sample.index_N])
    places = int((responses_P >= _FEWEST).sum())
    if not places:
        return no_power(f"no place is reached by {_FEWEST} responses")
    return f"it in {percent(_ALL)} of the responses, at any of the first {things(places, 'place')}"


def spoiled_T(evidence: Evidence) -> np.ndarray:
    """Every token at a forced place, even of another id."""
    sample = evidence.sample
    return np.isin(sample.position_T, [place.position for place in _forced_places(sample)])


def _forced_places(sample: Sample) -> list[_Place]:
    return [place for place in _uniform_places(sample) if _is_forced(sample, place)]


def _uniform_places(sample: Sample) -> list[_Place]:
    """The places where nearly all responses that reach them have one id."""
    ids_T, position_N = sample.response_ids_T, sample.position_T[sample.index_N]
    if ids_T is None:
        return []
    by_position = sample.index_N[np.argsort(position_N, kind="stable")]
    responses_P = np.bincount(position_N)
    places = []
    for position, index in enumerate(np.split(by_position, np.cumsum(responses_P)[:-1])):
        if len(index) < _FEWEST:
            continue
        ids, counts = np.unique(ids_T[index], return_counts=True)
        if counts.max() >= _ALL * len(index):
            token = int(ids[counts.argmax()])
            places.append(_Place(position, token, index[ids_T[index] == token], len(index)))
    return places


def _is_forced(sample: Sample, place: _Place) -> bool:
    """Whether one side makes the token improbable, and the gap is this place's alone."""
    logq, logp = sample.logq_T[place.index], sample.logp_T[place.index]
    gap = float(np.abs(logp - logq).mean())
    elsewhere_N = sample.position_T[sample.index_N] != place.position
    others = float(np.abs(sample.d_N[elsewhere_N]).mean()) if elsewhere_N.any() else 0.0
    improbable = max(float(-logq.mean()), float(-logp.mean())) > _NATS
    # An engine calls a token that it forced impossible, or certain
    by_engine = float(-logq.mean()) > _NATS or not logq.any()
    return improbable and by_engine and gap > _TIMES * others
