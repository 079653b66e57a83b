"""One side's distribution is mixed with a uniform one: a floor under rare tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.base.numbers import things
from mismatch_cli.diagnosis.evidence import Evidence, Finding, Row
from mismatch_cli.diagnosis.power import clear, no_power, percent
from mismatch_cli.diagnosis.sample import Sample

NAME, STAGE = "uniform-mixture", 3
TITLE = "Mixed with a uniform distribution"
CAUSE = (
    "One side smooths its probabilities: label smoothing or ε-greedy sampling gives every token of "
    "the vocabulary a small share, or the probabilities are clamped from below and renormalised."
)
CHANGE = "Take the log-softmax of the logits: no smoothing, no ε, no clamp of probabilities."
SOURCE = "label smoothing, ε-greedy sampling: (1 − ε) π + ε / V"
_FLOORS = np.exp(np.linspace(np.log(1e-8), np.log(1e-2), 31))  # ε / V
_LIKELY = 0.1  # probability: there the floor adds little, and the mean ratio is 1 − ε
_RARE = 5.0  # times the floor: a token at most as probable as this shows it
_FEWEST = 3  # rare tokens
_OFF = 0.35  # of the gap of the rare tokens that may be left
_TAKES = 0.2  # of the gap
_VOCABULARY = (50, 2e6)  # tokens: ε over the floor
_SIDES = ("logp_trainer", "logp_rollout")
_MEASURE = "share of the probability"


@dataclass(frozen=True)
class _Mixture:
    """One side is (1 − ε) p + floor, where p is the other side's probability."""

    side: str
    epsilon: float
    floor: float
    rare: int  # tokens that show the floor
    left_N: np.ndarray  # log π − log μ beyond it, nats
    takes: float  # of Σ|d|

    @property
    def vocabulary(self) -> float:
        """How many tokens share ε."""
        return self.epsilon / self.floor


def check(evidence: Evidence) -> Finding:
    """Fit log((1 − ε) p + δ) to one side, where p is the other side's probability: on half of the
    prompts, used on the other half.
    """
    sample = evidence.sample
    mixture = mixture_in(sample)
    if mixture is None:
        return clear(NAME, 0.0, _MEASURE, _power(sample))
    rows: tuple[Row, ...] = (
        ("mixed side", mixture.side),
        ("ε, its share", mixture.epsilon),
        ("floor under every token, ε / V", mixture.floor),
        ("V, by these two", mixture.vocabulary),
        ("tokens that are rarer than five times the floor", mixture.rare),
    )
    lost = percent(mixture.epsilon)
    sentence = (
        f"{mixture.side} fits a distribution of which {lost} is spread evenly: likely tokens lose "
        f"{lost}, and the {things(mixture.rare, 'rare token')} stay above {mixture.floor:.2g}."
    )
    return Finding(NAME, "found", mixture.epsilon, _MEASURE, sentence, rows, left_N=mixture.left_N)


def mixture_in(sample: Sample) -> _Mixture | None:
    """The mixture that explains most; None if neither side is one.

    It has to show at both ends: likely tokens lose a share that, spread evenly, is the floor of
    the rare ones.
    """
    mixtures = [_fit_mixture(sample, side) for side in _SIDES]
    return max(filter(None, mixtures), key=lambda mixture: mixture.takes, default=None)


def _fit_mixture(sample: Sample, side: str) -> _Mixture | None:
    """One side as a mixture of the other (`other_N`); None if that does not show at both ends."""
    own_N, other_N = sample.logp_N, sample.logq_N
    if side == "logp_rollout":
        own_N, other_N = other_N, own_N
    # Most traces end here, at a fraction of the cost of a fit
    if not _rises(own_N, other_N):
        return None
    total = float(np.abs(sample.d_N).sum())
    left_N = _left_of_halves(sample, own_N, other_N)
    if not total or left_N is None:
        return None
    epsilon, floor = _best(own_N, other_N)
    signed_N = left_N if side == "logp_trainer" else -left_N
    takes = 1 - float(np.abs(left_N).sum()) / total
    rare_N = np.exp(other_N) < _RARE * floor
    mixture = _Mixture(side, epsilon, floor, int(rare_N.sum()), signed_N, takes)
    return mixture if _shows(mixture, np.abs(sample.d_N), rare_N) else None


def _rises(own_N: np.ndarray, other_N: np.ndarray) -> bool:
    """Whether the rarest tokens are more probable on the mixed side."""
    if len(other_N) < _FEWEST:
        return False
    rarest = np.argpartition(other_N, _FEWEST - 1)[:_FEWEST]
    return float((own_N - other_N)[rarest].mean()) > 0


def _left_of_halves(sample: Sample, own_N: np.ndarray, other_N: np.ndarray) -> np.ndarray | None:
    """One side beyond the mixture of the other that the other half of the prompts shows; None if
    that has no likely tokens.
    """
    left_N = np.empty(len(own_N))
    for half in (0, 1):
        used_N = sample.half_N == half
        if not (np.exp(other_N[~used_N]) > _LIKELY).any():
            return None
        epsilon, floor = _best(own_N[~used_N], other_N[~used_N])
        left_N[used_N] = own_N[used_N] - _mixed(other_N[used_N], epsilon, floor)
    return left_N


def _shows(mixture: _Mixture, abs_d_N: np.ndarray, rare_N: np.ndarray) -> bool:
    """Whether both ends show it, and it explains enough of the gap."""
    low, high = _VOCABULARY
    if mixture.takes < _TAKES or mixture.rare < _FEWEST or not low < mixture.vocabulary < high:
        return False
    left = float(np.abs(mixture.left_N[rare_N]).mean())
    return left < _OFF * float(abs_d_N[rare_N].mean())


def _best(own_N: np.ndarray, other_N: np.ndarray) -> tuple[float, float]:
    """ε and the floor that leave the least of Σ|own − mixed|; ε is 1 at most, where likely tokens
    are at the floor.
    """
    likely_N = np.exp(other_N) > _LIKELY
    own_M, other_M = np.exp(own_N[likely_N]), np.exp(other_N[likely_N])
    fits = []
    for floor in _FLOORS.tolist():
        share = float(np.median((own_M - floor) / other_M))
        epsilon = min(1.0, max(0.0, 1 - share))
        left = float(np.abs(own_N - _mixed(other_N, epsilon, floor)).sum())
        fits.append((left, epsilon, floor))
    _, epsilon, floor = min(fits)
    return epsilon, floor


def _mixed(logp_N: np.ndarray, epsilon: float, floor: float) -> np.ndarray:
    return np.log((1 - epsilon) * np.exp(logp_N) + floor)


def _power(sample: Sample) -> str:
    """The ε whose floor, in a vocabulary of 10⁵, is twice the gap."""
    rare = int((sample.logq_N < np.log(_FLOORS[-1])).sum())
    if rare < _FEWEST:
        return no_power(f"{things(rare, 'token')} rarer than 1 %, which would show a floor")
    gap = float(np.abs(sample.d_N).mean())
    return f"a share of ≥ {percent(-np.expm1(-2 * gap))}"
