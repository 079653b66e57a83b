"""A token that every response has at the same place, since a sampler forced it."""

from dataclasses import dataclass

import numpy as np

from mismatch_cli.base.numbers import things
from mismatch_cli.diagnosis.evidence import Evidence, Finding, untested
from mismatch_cli.diagnosis.power import clear, none, percent
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
    """The tokens with the same id at one place."""

    position: int
    token: int
    index_T: np.ndarray
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
        forced_T[place.index_T] = True
    share = float(forced_T.sum()) / max(1, sample.num_counted)
    if not places:
        return clear(NAME, share, "share of tokens", _power(sample))
    first = places[0]
    surprise = [float(-side[first.index_T].mean()) for side in (sample.logq_T, sample.logp_T)]
    sentence = (
        f"{len(first.index_T):,} of {first.responses:,} responses have token {first.token} at "
        f"place {first.position + 1}, with a mean log μ of {-surprise[0]:.3g} and a mean log π of "
        f"{-surprise[1]:.3g}: it was forced, not sampled."
    )
    rows = (
        ("token", first.token),
        ("place in the response, from 1", first.position + 1),
        ("places with a forced token", len(places)),
        ("mean −log μ there, nats", surprise[0]),
        ("mean −log π there, nats", surprise[1]),
    )
    left_N = sample.left_without(forced_T)
    return Finding(NAME, "found", share, "share of tokens", sentence, rows, left_N=left_N)


def _power(sample: Sample) -> str:
    """The places that enough responses reach."""
    reach_P = np.bincount(sample.position_T[sample.index_N])
    places = int((reach_P >= _FEWEST).sum())
    if not places:
        return none(f"no place is reached by {_FEWEST} responses")
    return f"it in {percent(_ALL)} of the responses, at any of the first {things(places, 'place')}"


def spoiled_T(evidence: Evidence) -> np.ndarray:
    """Whatever is at a forced place."""
    sample = evidence.sample
    return np.isin(sample.position_T, [place.position for place in _forced_places(sample)])


def _forced_places(sample: Sample) -> list[_Place]:
    return [place for place in _uniform_places(sample) if _is_forced(sample, place)]


def _uniform_places(sample: Sample) -> list[_Place]:
    """The places where nearly all responses that reach them have one id."""
    ids_T, position_N = sample.response_ids_T, sample.position_T[sample.index_N]
    if ids_T is None:
        return []
    order = sample.index_N[np.argsort(position_N, kind="stable")]
    counts_P = np.bincount(position_N)
    places = []
    for position, index_T in enumerate(np.split(order, np.cumsum(counts_P)[:-1])):
        if len(index_T) < _FEWEST:
            continue
        ids, counts = np.unique(ids_T[index_T], return_counts=True)
        if counts.max() >= _ALL * len(index_T):
            token = int(ids[counts.argmax()])
            same_T = index_T[ids_T[index_T] == token]
            places.append(_Place(position, token, same_T, len(index_T)))
    return places


def _is_forced(sample: Sample, place: _Place) -> bool:
    """Whether one side makes the token improbable, and the gap is this place's alone."""
    logq_T, logp_T = sample.logq_T[place.index_T], sample.logp_T[place.index_T]
    gap = float(np.abs(logp_T - logq_T).mean())
    elsewhere_N = sample.position_T[sample.index_N] != place.position
    others = float(np.abs(sample.d_N[elsewhere_N]).mean()) if elsewhere_N.any() else 0.0
    improbable = max(float(-logq_T.mean()), float(-logp_T.mean())) > _NATS
    by_engine = float(-logq_T.mean()) > _NATS or not logq_T.any()
    return improbable and by_engine and gap > _TIMES * others
