"""One number of a framework's dashboard: its name there, what it is made of, and where that is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan, sqrt

import numpy as np

from mismatch_cli.dialects._quantities import MEAN_GAP, MINUS_LOG_P, MINUS_LOG_Q, OfResponses, Quantity, ResponseMeans


class Moments:
    """Count, mean, Σ(x − mean)², least and largest value, in float64; batches are joined by Chan's update."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        self.least, self.largest = inf, -inf

    def update(self, values: np.ndarray) -> None:
        if not len(values):
            return
        added, mean = len(values), float(values.mean(dtype=np.float64))
        with np.errstate(invalid="ignore", over="ignore"):  # an infinite ratio has no spread
            squares = float(np.square(values - np.float64(mean)).sum())
            step = mean - self.mean
            total = self.count + added
            self.squares += squares + step * step * self.count * added / total
            self.mean += step * added / total
        self.count = total
        self.least, self.largest = min(self.least, float(values.min())), max(self.largest, float(values.max()))


def mean(moments: Moments) -> float:
    return moments.mean


def least(moments: Moments) -> float:
    return moments.least


def largest(moments: Moments) -> float:
    return moments.largest


def sample_sd(moments: Moments) -> float:
    """With n − 1 in the denominator, as torch.std."""
    return sqrt(moments.squares / (moments.count - 1)) if moments.count > 1 else nan


def population_sd(moments: Moments) -> float:
    """With n in the denominator: √(E x² − (E x)²)."""
    return sqrt(moments.squares / moments.count)


def effective_share(moments: Moments) -> float:
    """1 / E[(w / E w)²]."""
    return moments.mean**2 / (moments.mean**2 + moments.squares / moments.count)


def ratio_of_means(over: Moments, under: Moments) -> float:
    return over.mean / under.mean if under.mean else nan


_OF_TRAINING, _OF_ROLLOUT = ResponseMeans(MINUS_LOG_P), ResponseMeans(MINUS_LOG_Q)
_ROWS: tuple[tuple[str, str, Quantity, Callable[[Moments], float]], ...] = (
    ("training_ppl", "E_y exp(−mean log π)", OfResponses(np.exp, _OF_TRAINING), mean),
    ("training_log_ppl", "E_y (−mean log π)", _OF_TRAINING, mean),
    ("rollout_ppl", "E_y exp(−mean log μ)", OfResponses(np.exp, _OF_ROLLOUT), mean),
    ("rollout_log_ppl", "E_y (−mean log μ)", _OF_ROLLOUT, mean),
    ("log_ppl_diff", "E_y (−mean d)", MEAN_GAP, mean),
    ("log_ppl_abs_diff", "E_y |mean d|", OfResponses(np.abs, MEAN_GAP), mean),
    ("log_ppl_diff_max", "max_y (−mean d)", MEAN_GAP, largest),
    ("log_ppl_diff_min", "min_y (−mean d)", MEAN_GAP, least),
    ("ppl_ratio", "E_y exp(−mean d)", OfResponses(np.exp, MEAN_GAP), mean),
)


def perplexity_lines(prefix: str, source: str) -> tuple[Line, ...]:
    """The lines under a framework's own prefix."""
    return tuple(
        Line(f"{prefix}{name}", ENGINE_GAP, formula, source, of=quantity, reduce=reduce)
        for name, formula, quantity, reduce in _ROWS
    )


ENGINE_GAP, CURRENT, UPDATE = "mismatch", "total", "staleness"  # pairs of metrics/pairs.py
COMPARES = {
    ENGINE_GAP: ("recomputed", "rollout"),
    CURRENT: ("trainer", "rollout"),
    UPDATE: ("trainer", "recomputed"),
}


@dataclass(frozen=True)
class Line:
    """A metric of a framework: `reduce` of the quantities `of`, or a metric of `metrics/gap_table.py`.

    `pair` says which two policies the framework compares; in the formula π is the first of them and μ the second.
    `needs` are columns of the batch beside the log-probabilities. Lines with the same `word` go by one name in several
    frameworks and are different numbers.
    """

    name: str
    pair: str
    formula: str
    source: str  # the file that computes it
    of: Quantity | tuple[Quantity, ...] = ()
    reduce: Callable[..., float] = mean
    metric: str = ""
    note: str = ""
    word: str = ""
    needs: tuple[str, ...] = ()

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        return self.of if isinstance(self.of, tuple) else (self.of,)

    @property
    def compares(self) -> str:
        return " / ".join(COMPARES[self.pair])
