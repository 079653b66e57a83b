"""Results of a curation: how many problems were kept, and how their accuracy regresses to the
mean when held out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np

from mismatch_cli.metrics.estimate import SHARE, SIGNED, Estimate, interval, point_estimate
from mismatch_cli.metrics.population import Curation
from mismatch_cli.studies.study import Study

_BINS = 6  # of the accuracy range of the kept problems
_BARS = 21  # at most, in a histogram


@dataclass(frozen=True, kw_only=True)
class AccuracyBin:
    """The kept problems with an accuracy in a range, as measured on the samples that chose them."""

    from_: float
    to: float
    problems: int
    accuracy: float  # means over problems
    held_out_accuracy: Estimate


@dataclass(frozen=True, kw_only=True)
class CurationResult:
    """What summary.json of a curation holds; accuracies are means over problems."""

    config: Mapping[str, Any]
    count: int  # problems
    kept: int
    confirmed: int
    written: int
    unstated: int  # responses without an answer
    accuracy: Estimate
    accuracy_of_kept: Estimate
    held_out_accuracy: Estimate
    staying: Estimate
    bins: Sequence[AccuracyBin]


@dataclass(frozen=True)
class CurationAnalysis(Study):
    """A curation, and its settings."""

    STUDY, FORMAT = "curation", "mismatch-cli curation"

    curation: Curation
    config: Mapping[str, Any]  # as in the manifest of the traces
    confirm: bool = False  # whether only the confirmed problems are written
    command: tuple[str, ...] = ()  # as typed
    training: str = ""  # the command that trains on the written problems

    @property
    def model(self) -> str:
        return str(self.config["model"])

    @property
    def problems(self) -> str:
        return str(self.config["prompts"]["location"])

    @property
    def reward(self) -> str:
        """A user's own function that graded the samples; empty for the usual grader."""
        return str(self.config["reward"] or "")

    @property
    def subject(self) -> str:
        return f"{self.model} · {self.problems}"

    @cached_property
    def accuracy_P(self) -> np.ndarray:
        """The accuracy of every problem, on the samples used for selection."""
        return np.array(list(self.curation.accuracy.values()))

    @cached_property
    def histogram(self) -> tuple[np.ndarray, np.ndarray]:
        """How many problems have an accuracy between the edges; each bin covers as many numbers
        of right answers, or an equal part of the range of rewards that leave that of shares.
        """
        samples = self.curation.samples
        # A problem has 0 to `samples` right answers, and a bar so many of these numbers.
        # The edges lie halfway between numbers, so that no accuracy is on an edge.
        numbers = ceil((samples + 1) / _BARS)
        edges = (np.arange(0, samples + numbers + 1, numbers) - 0.5) / samples
        accuracy_P = self.accuracy_P
        if len(accuracy_P) and not edges[0] <= accuracy_P.min() <= accuracy_P.max() <= edges[-1]:
            lowest, highest = min(accuracy_P.min(), 0.0), max(accuracy_P.max(), 1.0)
            edges = np.linspace(lowest, highest, _BARS + 1)
        return np.histogram(accuracy_P, edges)

    @cached_property
    def pairs_K2(self) -> np.ndarray:
        """The accuracies of the kept problems: on the samples used for selection, and held out."""
        curation = self.curation
        return np.array([(curation.accuracy[p], curation.held_out[p]) for p in curation.kept])

    @cached_property
    def bins(self) -> list[tuple[float, float, np.ndarray]]:
        """Ranges of the selecting accuracy, each with its kept problems as in `pairs_K2`,
        without empty ranges.
        """
        low, high = self.curation.keep
        edge_B = np.linspace(low, high, _BINS + 1)
        # An accuracy at an edge belongs to the bin above, also where the edge was rounded up.
        bin_K = np.searchsorted(edge_B, self.pairs_K2[:, 0] + 1e-9, side="right") - 1
        bin_K = np.clip(bin_K, 0, _BINS - 1)
        bins = []
        for number in np.unique(bin_K):
            in_bin = self.pairs_K2[bin_K == number]
            bins.append((edge_B[number], edge_B[number + 1], in_bin))
        return bins

    @property
    def staying(self) -> Estimate:
        """The share of the kept problems that are in the range on the held-out samples as well."""
        return self.share_within(self.pairs_K2[:, 1])

    def share_within(self, accuracy_N: np.ndarray) -> Estimate:
        """The share of some problems whose accuracy is in the range."""
        return mean_over_problems([self.curation.within(accuracy) for accuracy in accuracy_N])

    @cached_property
    def result(self) -> CurationResult:
        """What summary.json holds; the problems are in perfectible.jsonl."""
        curation = self.curation
        accuracy_K, held_out_K = self.pairs_K2.T
        written = curation.confirmed if self.confirm else curation.kept
        bins = []
        for low, high, pairs_K2 in self.bins:
            bins.append(
                AccuracyBin(
                    from_=low,
                    to=high,
                    problems=len(pairs_K2),
                    accuracy=float(pairs_K2[:, 0].mean()),
                    held_out_accuracy=mean_over_problems(pairs_K2[:, 1]),
                )
            )
        return CurationResult(
            config=self.config,
            count=len(curation.accuracy),
            kept=len(curation.kept),
            confirmed=len(curation.confirmed),
            written=len(written),
            unstated=curation.unstated,
            accuracy=mean_over_problems(self.accuracy_P),
            accuracy_of_kept=mean_over_problems(accuracy_K),
            held_out_accuracy=mean_over_problems(held_out_K),
            staying=self.staying,
            bins=bins,
        )


def mean_over_problems(values: Sequence[float] | np.ndarray) -> Estimate:
    """A mean with its 95 % interval across problems."""
    value_N = np.asarray(values, dtype=np.float64)
    mean = float(value_N.mean())
    if len(value_N) < 2:
        return point_estimate(mean)
    without_N = (value_N.sum() - value_N) / (len(value_N) - 1)  # the mean without each problem
    # The scale of shares keeps an interval within 0 and 1.
    # Rewards of a user's own function can be outside, where that scale has no values.
    is_share = 0 < mean < 1 and value_N.min() >= 0 and value_N.max() <= 1
    return interval(mean, without_N, len(value_N), SHARE if is_share else SIGNED)
