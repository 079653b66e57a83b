"""Every measurement of one pair of policies: the accumulators, updated together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mismatch_cli.base.hashing import prompt_groups
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.correlation import SampledSpearman
from mismatch_cli.metrics.estimate import Estimate, Jackknife, clamped, grouped_share
from mismatch_cli.metrics.gap_table import METRICS, SCALES
from mismatch_cli.metrics.gaps import TokenGaps, token_gaps
from mismatch_cli.metrics.pair_summary import (
    MetricEstimate,
    PairSummary,
    Sequences,
    StepRow,
    TokenTotals,
)
from mismatch_cli.metrics.pairs import PAIR_COLUMNS, Pair
from mismatch_cli.metrics.population import DistinctPrompts, RewardGroups, TokenCounts
from mismatch_cli.metrics.profiles import Extremes, LengthProfile, ResponseProfile
from mismatch_cli.metrics.step_sums import StepSums
from mismatch_cli.metrics.sums import (
    COLUMNS,
    INDEX,
    TOPK_MASSES,
    GroupSums,
    SequenceWeights,
    add_response_sums,
    evaluate,
    token_sums,
)
from mismatch_cli.metrics.volatility import (
    QUANTILES,
    CellCounts,
    CellMoments,
    Cells,
    token_quantiles,
    volatility_rows,
)
from mismatch_cli.rules.batch import TokenBatch
from mismatch_cli.trace.columns import TOPK_COLUMNS


class TokenAccumulator(Protocol):
    """Anything that can be updated from the gaps of some responses."""

    def update(self, gaps: TokenGaps) -> None: ...


class MismatchSummary(Accumulator):
    """All statistics of one pair of policies, in bounded memory (about 20 MB) for any number of
    tokens.

    Counts, histograms and extremes are exact: any order and sharding gives the same bits. Float
    sums depend on the order of additions; they are formed per batch and then added, so summaries of
    single batches, merged in order, give the bits of one summary of all batches. Many workers give
    the bits of one if both summarise each part of a trace and merge the parts in order.
    """

    READS = (*PAIR_COLUMNS, "reward", "entropy_trainer", *TOPK_COLUMNS)
    SETTINGS = ("pair",)

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.exact = _ExactState()
        self.rounded = _RoundedState()

    def update(self, batch: TokenBatch, *observers: TokenAccumulator) -> None:
        """Add the responses of a batch; does nothing if the batch lacks the pair.

        `observers` (worst tokens, scatter sample, lattice) are updated from the same gaps, to
        compute nothing twice.
        """
        if not batch.num_responses or not self.pair.measured_in(batch):
            return
        # Float sums are formed per batch, then added: many workers do the same, to the bit.
        of_batch = _RoundedState()
        slices = token_gaps(batch, self.pair)
        sums_SM = np.concatenate(
            [self._update_tokens(gaps, of_batch, observers) for gaps in slices]
        )
        add_response_sums(sums_SM, batch)
        of_batch.update_responses(prompt_groups(batch.prompt_id_S), batch.step_S, sums_SM)
        self.rounded.merge(of_batch)
        self.exact.prompts.update(batch.prompt_id_S[sums_SM[:, INDEX["n"]] > 0])
        self.exact.groups.update(batch)

    def merge(self, other: MismatchSummary) -> None:
        """Add another summary's state; an empty one takes no time."""
        if other.exact.counts.responses:
            super().merge(other)

    def _update_tokens(
        self, gaps: TokenGaps, of_batch: _RoundedState, observers: Sequence[TokenAccumulator]
    ) -> np.ndarray:
        cells = Cells.of(gaps)
        self.exact.update(gaps, cells)
        of_batch.moments.update(gaps, cells)
        of_batch.profile.update(gaps)
        for observer in observers:
            observer.update(gaps)
        return token_sums(gaps)

    def estimates(self) -> dict[str, Estimate]:
        """Every metric of the catalog except the rank correlation, which takes longer than all
        others together.
        """
        prompts = self.exact.prompts.result()
        estimates = {key: metric.estimate(prompts) for key, metric in self.jackknife().items()}
        estimates |= self.exact.extremes.result()
        # A quantile is interpolated within a bin of a histogram: it may exceed the exact extreme.
        bounds = {
            "abs_d": (0.0, estimates["abs_d_max"].value),
            "ratio": (estimates["ratio_min"].value, estimates["ratio_max"].value),
        }
        for key in QUANTILES:
            quantity, _, _ = key.rpartition("_")
            estimates[key] = clamped(estimates[key], *bounds[quantity])
        return estimates

    def jackknife(self) -> dict[str, Jackknife]:
        """The metrics of `estimates` except extremes, with the values behind their intervals."""
        exact, rounded = self.exact, self.rounded
        return (
            rounded.sums.jackknife(evaluate, SCALES)
            | rounded.weights.jackknife()
            | token_quantiles(exact.cells)
            | {"equal_rewards_share": exact.groups.jackknife()}
        )

    def result(self) -> PairSummary:
        """Every metric of the catalog, and where the gap is."""
        exact, rounded = self.exact, self.rounded
        prompts = exact.prompts.result()
        estimates = self.estimates() | {"spearman": exact.spearman.result(prompts)}
        totals = TokenTotals(
            **vars(exact.counts), prompts=prompts, prompts_exact=exact.prompts.exact
        )
        return PairSummary(
            pair=self.pair.name,
            counts=totals,
            metrics={key: MetricEstimate(**vars(estimates[key])) for key in METRICS},
            volatility=volatility_rows(exact.cells, rounded.moments, prompts),
            positions=rounded.profile.positions(prompts),
            from_end=rounded.profile.from_end(prompts),
            turns=rounded.profile.turns(prompts),
            sequence=Sequences(rounded.lengths.result(prompts)),
            by_step=[
                _topk_masses(first, last, sums_GM, prompts)
                for first, last, sums_GM in rounded.steps
            ],
        )


_MOST_STEPS = 2**9
_MASS_TOKENS = f"{TOPK_MASSES[0]}_n"  # both masses have the same tokens


def _topk_masses(first: int, last: int, sums_GM: np.ndarray, prompts: int) -> StepRow:
    """The row of some steps, from the sums of both masses and the number of their tokens."""
    *masses, tokens_G = sums_GM.T
    shares = {
        name: grouped_share(mass_G, tokens_G, prompts)
        for name, mass_G in zip(TOPK_MASSES, masses, strict=True)
    }
    return StepRow(first, last, int(tokens_G.sum()), shares)


class _ExactState(Accumulator):
    """Integers and extremes: the same bits in any order."""

    def __init__(self) -> None:
        self.counts = TokenCounts()
        self.prompts = DistinctPrompts()
        self.groups = RewardGroups()
        self.cells = CellCounts()
        self.extremes = Extremes()
        self.spearman = SampledSpearman()

    def update(self, gaps: TokenGaps, cells: Cells) -> None:
        self.counts.update(gaps)
        self.cells.update(gaps, cells)
        self.extremes.update(gaps)
        self.spearman.update(gaps)


class _RoundedState(Accumulator):
    """Float sums: the same bits in the same order."""

    def __init__(self) -> None:
        self.sums = GroupSums(len(COLUMNS))
        self.weights = SequenceWeights()
        self.moments = CellMoments()
        self.profile = ResponseProfile()
        self.lengths = LengthProfile()
        self.steps = StepSums(_MOST_STEPS)  # masses of the top K, and the number of their tokens

    def update_responses(
        self, group_S: np.ndarray, step_S: np.ndarray, sums_SM: np.ndarray
    ) -> None:
        d_S, counted_S, supported_S = (sums_SM[:, INDEX[name]] for name in ("d", "n", "supported"))
        # A token out of support makes the weight of its response 0.
        log_weight_S = np.where(supported_S < counted_S, -np.inf, d_S)
        log_weight_S[counted_S == 0] = np.nan
        self.sums.update(group_S, sums_SM)
        self.weights.update(group_S, log_weight_S)
        self.lengths.update(group_S, supported_S, d_S)
        if sums_SM[:, INDEX[_MASS_TOKENS]].any():
            columns = [INDEX[name] for name in (*TOPK_MASSES, _MASS_TOKENS)]
            self.steps.update(step_S, group_S, sums_SM[:, columns])
