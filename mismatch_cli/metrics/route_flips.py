"""Where the trainer of a mixture of experts routes tokens differently from the engine, and its
share of the gap.

A layer *flips* a token if the two sides choose different experts, in any order. The routers at the
preceding token decide a response token's log π. Notation of `ROUTING`: E is the mean over counted
tokens with known routes, f the number of layers that flip a token, S and S′ the experts that engine
and trainer choose in a layer, k their number, d = log π − log μ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.hashing import GROUPS, prompt_groups
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.estimate import POSITIVE, SHARE, Estimate, Scale
from mismatch_cli.metrics.gap_table import Metric, table
from mismatch_cli.metrics.gaps import TokenGaps
from mismatch_cli.metrics.sums import GroupSums
from mismatch_cli.metrics.volatility import MU_BINS, MU_EDGES, Cells
from mismatch_cli.trace.routes import LAYER_COUNTS, MARGIN_BINS, MARGIN_EDGES, NOT_MEASURED

FLIP_EDGES = (1, 2, 3, 5, 9)  # layers that flip a token: 0, 1, 2, 3–4, 5–8, 9 and more
_FLIP_BINS = len(FLIP_EDGES) + 1
_FIRST_LAYERS = NOT_MEASURED + 1  # 255 if none flips
_R3 = "arXiv 2510.11370 (R3)"

# fmt: off
ROUTING = table(
    Metric("flipped_tokens", "tokens that a layer flips", "share with f > 0", "share", _R3,
           scale=SHARE),
    Metric("flipped_routers", "routers that flip", "E f / layers", "share", _R3, scale=SHARE),
    Metric("agreement", "agreement of the experts", "E |S ∩ S′| / k over layers", "share",
           "elementary", scale=SHARE,
           agreement=1.0),
    Metric("share_of_gap", "share of the gap on flipped tokens", "Σ |d| where f > 0, over Σ |d|",
           "share", "elementary",
           scale=SHARE),
    Metric("abs_d_flipped", "mean |Δlog p| where flipped", "E |d| where f > 0", "nats",
           "elementary", scale=POSITIVE),
    Metric("abs_d_other", "mean |Δlog p| elsewhere", "E |d| where f = 0", "nats", "elementary",
           scale=POSITIVE),
)
# fmt: on


@dataclass(frozen=True)
class LayerRow:
    """A layer with a router: how many of its tokens flip."""

    layer: int
    tokens: int
    flipped: Estimate
    agreement: Estimate  # experts in common
    same_first: Estimate  # the same expert first


@dataclass(frozen=True)
class FlipsRow:
    """Tokens that from `low` to `high` layers flip; no `high`: that many and more."""

    low: int
    high: int | None
    tokens: int
    share_of_gap: float | None
    abs_d_mean: Estimate


@dataclass(frozen=True)
class FlippedBin:
    """The share of flipped tokens in a bin of μ."""

    mu_low: float
    mu_high: float
    tokens: int
    flipped: Estimate


@dataclass(frozen=True)
class MarginCounts:
    """Router margins of one kind, logits: quantiles, and how many are between the edges."""

    count: int
    p5: float | None
    p50: float | None
    p95: float | None
    counts: Sequence[int]


@dataclass(frozen=True)
class Margins:
    """Router margins where the sides agree, and where they flip."""

    edges: Sequence[float]
    agreeing: MarginCounts
    flipped: MarginCounts


@dataclass(frozen=True, kw_only=True)
class RoutingSummary:
    """Where trainer and engine choose different experts, as summary.json has it."""

    replayed: bool  # the trainer's tokens went to the engine's experts
    tokens: int
    experts: int | None
    experts_per_token: int
    metrics: Mapping[str, Estimate]  # those of `ROUTING`
    layers: Sequence[LayerRow]
    by_flips: Sequence[FlipsRow]
    by_mu: Sequence[FlippedBin]
    first: Sequence[int]  # tokens by the first layer that flips them
    margins: Margins


class RouteFlips(Accumulator):
    """Flips by token, by layer and by margin; empty for a trace without routes."""

    READS = ("route_flips", "route_first", "route_layers", "route_margins")

    def __init__(self) -> None:
        self.tokens = GroupSums(2 * (_FLIP_BINS + MU_BINS))
        self.first = np.zeros(_FIRST_LAYERS, dtype=np.int64)
        self.layers: dict[int, GroupSums] = {}
        self.margins = np.zeros((2, MARGIN_BINS), dtype=np.int64)

    def update(self, gaps: TokenGaps) -> None:
        """Add the flips of the counted tokens of some responses."""
        flips_N = gaps.column("route_flips_T")
        if flips_N is None:
            return
        measured_N = flips_N != NOT_MEASURED
        flips_bin_N = np.searchsorted(FLIP_EDGES, flips_N, side="right")
        mu_bin_N = Cells.of(gaps).mu_bin_N
        columns = (
            (flips_bin_N, _FLIP_BINS, measured_N),
            (flips_bin_N, _FLIP_BINS, measured_N * gaps.abs_d_N),
            (mu_bin_N, MU_BINS, measured_N),
            (mu_bin_N, MU_BINS, measured_N & (flips_N > 0)),
        )
        group_N = gaps.per_token(gaps.group_S)
        sums = []
        for bin_N, bins, weight_N in columns:
            sums_C = np.bincount(group_N * bins + bin_N, weight_N, minlength=GROUPS * bins)
            sums.append(sums_C.reshape(GROUPS, bins))
        self.tokens.sums_GM += np.concatenate(sums, axis=1)
        first_N = gaps.column("route_first_T")
        if first_N is not None:
            self.first += np.bincount(first_N[measured_N], minlength=_FIRST_LAYERS)

    def update_responses(self, table: pa.Table, prompt_id_S: np.ndarray) -> None:
        """Add the counts recorded per response."""
        if "route_layers" not in table.column_names:
            return
        groups = prompt_groups(prompt_id_S).tolist()
        for group, layer_counts in zip(groups, table["route_layers"], strict=True):
            if not layer_counts.is_valid:
                continue
            counts_MC = layer_counts.values.to_numpy().reshape(-1, len(LAYER_COUNTS))
            for layer, counts_C in enumerate(counts_MC):
                if layer not in self.layers:
                    self.layers[layer] = GroupSums(len(LAYER_COUNTS))
                self.layers[layer].sums_GM[group] += counts_C
        margins = table["route_margins"].combine_chunks().flatten().to_numpy()
        self.margins += margins.reshape(-1, 2, MARGIN_BINS).sum(0)

    def result(self, prompts: int, trainer: Mapping[str, Any]) -> RoutingSummary | None:
        """What the routers did; None if nothing was measured.

        `trainer` is that section of the manifest.
        """
        if not self.layers:
            return None
        k = trainer.get("experts_per_token") or 1
        agreeing, flipped = map(_margins, self.margins)
        return RoutingSummary(
            replayed=trainer.get("routes") == "replayed",
            tokens=int(self.tokens.sums_GM[:, :_FLIP_BINS].sum()),
            experts=trainer.get("num_experts"),
            experts_per_token=k,
            metrics=self._metrics(k, prompts),
            layers=self._by_layer(trainer.get("router_layers"), k, prompts),
            by_flips=self._by_flips(prompts),
            by_mu=self._by_mu(prompts),
            first=self.first[: len(self.layers)].tolist(),
            margins=Margins(MARGIN_EDGES.tolist(), agreeing, flipped),
        )

    def _metrics(self, k: int, prompts: int) -> dict[str, Estimate]:
        """The metrics of `ROUTING`, over all tokens and layers."""
        scales = {key: metric.scale for key, metric in ROUTING.items()}
        all_layers = GroupSums(len(LAYER_COUNTS))
        for layer in sorted(self.layers):
            all_layers.sums_GM += self.layers[layer].sums_GM
        estimates = self.tokens.result(_evaluate_tokens, prompts, scales)
        estimates |= all_layers.result(_evaluate_layer(k), prompts, scales)
        return {key: estimates[key] for key in ROUTING}

    def _by_layer(self, numbers: Sequence[int] | None, k: int, prompts: int) -> list[LayerRow]:
        """Each layer with a router; `numbers` are those of the layers in the model."""
        layers = sorted(self.layers)
        numbers = numbers or layers
        if len(numbers) != len(layers):
            raise MismatchError(
                f"The manifest names {len(numbers)} layers with a router, but responses have "
                f"counts of {len(layers)}. Record the trace again."
            )
        return [
            _layer_row(number, self.layers[layer], k, prompts)
            for number, layer in zip(numbers, layers, strict=True)
        ]

    def _by_flips(self, prompts: int) -> list[FlipsRow]:
        """Tokens by how many layers flip them: their number, mean |Δlog p| and share of the gap."""
        count_GB = self.tokens.sums_GM[:, :_FLIP_BINS]
        abs_d_GB = self.tokens.sums_GM[:, _FLIP_BINS : 2 * _FLIP_BINS]
        gap = float(abs_d_GB.sum())
        highs = (*(edge - 1 for edge in FLIP_EDGES), None)
        rows = []
        for b, (low, high) in enumerate(zip((0, *FLIP_EDGES), highs, strict=True)):
            tokens = int(count_GB[:, b].sum())
            share = float(abs_d_GB[:, b].sum()) / gap if gap > 0 else None
            mean = _ratio(abs_d_GB[:, b], count_GB[:, b], POSITIVE, prompts)
            rows.append(FlipsRow(low, high, tokens, share, mean))
        return rows

    def _by_mu(self, prompts: int) -> list[FlippedBin]:
        """The share of flipped tokens in each bin of μ."""
        count_GB, flipped_GB = np.split(self.tokens.sums_GM[:, 2 * _FLIP_BINS :], 2, axis=1)
        edges = (0.0, *MU_EDGES, 1.0)
        rows = []
        for b in range(MU_BINS):
            flipped = _ratio(flipped_GB[:, b], count_GB[:, b], SHARE, prompts)
            tokens = int(count_GB[:, b].sum())
            rows.append(FlippedBin(edges[b], edges[b + 1], tokens, flipped))
        return rows


def _ratio(part_G: np.ndarray, whole_G: np.ndarray, scale: Scale, prompts: int) -> Estimate:
    """Σ part / Σ whole."""
    # `grouped_ratio` adds each column pairwise, `GroupSums` its rows one after the other.
    # The last bits would differ, so the order of additions is kept.
    sums = GroupSums(2)
    sums.sums_GM += np.stack([part_G, whole_G], axis=1)
    estimates = sums.result(_evaluate_ratio, prompts, {"ratio": scale})
    return estimates["ratio"]


def _evaluate_ratio(sums_x2: np.ndarray) -> dict[str, np.ndarray]:
    return {"ratio": sums_x2[..., 0] / sums_x2[..., 1]}


def _evaluate_tokens(sums_xM: np.ndarray) -> dict[str, np.ndarray]:
    count_xB, abs_d_xB = sums_xM[..., :_FLIP_BINS], sums_xM[..., _FLIP_BINS : 2 * _FLIP_BINS]
    flipped = count_xB[..., 1:].sum(-1)
    flipped_abs_d = abs_d_xB[..., 1:].sum(-1)
    return {
        "flipped_tokens": flipped / count_xB.sum(-1),
        "share_of_gap": flipped_abs_d / abs_d_xB.sum(-1),
        "abs_d_flipped": flipped_abs_d / flipped,
        "abs_d_other": abs_d_xB[..., 0] / count_xB[..., 0],
    }


def _evaluate_layer(k: int) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
    def evaluate(sums_xC: np.ndarray) -> dict[str, np.ndarray]:
        tokens, flips, shared, first = np.moveaxis(sums_xC, -1, 0)
        return {
            "flipped_routers": flips / tokens,
            "agreement": shared / (k * tokens),
            "same_first": first / tokens,
        }

    return evaluate


def _layer_row(number: int, layer: GroupSums, k: int, prompts: int) -> LayerRow:
    scales = dict.fromkeys(("flipped_routers", "agreement", "same_first"), SHARE)
    estimates: dict[str, Estimate] = layer.result(_evaluate_layer(k), prompts, scales)
    return LayerRow(
        layer=number,
        tokens=int(layer.sums_GM[:, 0].sum()),
        flipped=estimates["flipped_routers"],
        agreement=estimates["agreement"],
        same_first=estimates["same_first"],
    )


def _margins(counts_B: np.ndarray) -> MarginCounts:
    """Quantiles of router margins in logits, from half octaves, so accurate to within a fifth;
    and the counts.
    """
    counts = counts_B.tolist()
    count = sum(counts)
    if not count:
        return MarginCounts(0, None, None, None, counts)
    ranks = [0.05 * count, 0.5 * count, 0.95 * count]
    p5, p50, p95 = map(_middle, np.searchsorted(np.cumsum(counts_B), ranks).tolist())
    return MarginCounts(count, p5, p50, p95, counts)


def _middle(margin_bin: int) -> float:
    """The logarithmic centre of a bin of margins; for the outer bins, their single edge."""
    if margin_bin == 0:
        return float(MARGIN_EDGES[0])
    if margin_bin >= len(MARGIN_EDGES):
        return float(MARGIN_EDGES[-1])
    return float(np.sqrt(MARGIN_EDGES[margin_bin - 1] * MARGIN_EDGES[margin_bin]))
