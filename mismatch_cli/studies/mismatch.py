"""One pass over traces: the summary of every pair of policies they hold, and the samples that plots and tables need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from typing import Any

from mismatch_cli.batch import TokenBatch
from mismatch_cli.errors import MismatchError
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.metrics.kept_rows import ScatterSample, WorstTokens
from mismatch_cli.metrics.lattice import Lattice
from mismatch_cli.metrics.pairs import PAIRS, Pair, pairs_in
from mismatch_cli.metrics.summary import MismatchSummary
from mismatch_cli.places import shown
from mismatch_cli.studies.imported import without_unknown
from mismatch_cli.studies.mismatch_plot_data import PlotData
from mismatch_cli.trace.completeness import remedy
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.schema import TOPK_COLUMNS
from mismatch_cli.verdict.assess import assess

SUMMARY_FORMAT = "mismatch-cli summary"
SUMMARY_VERSION = 1
_COLUMNS = (
    "version_rollout", "version_trainer", "reward", "loss_mask", "logp_trainer", "logp_recomputed",
    "logp_trainer_repeat", "entropy_trainer", *TOPK_COLUMNS,
)  # fmt: skip


@dataclass
class Analysis:
    """What was found: summaries by pair name, the noise floor, and samples of the first pair."""

    traces: Sequence[Trace]
    pairs: dict[str, MismatchSummary]
    worst: list[WorstTokens]  # one per trace: keys are unique within a trace only
    floor: MismatchSummary = field(default_factory=lambda: MismatchSummary(PAIRS["floor"]))
    scatter: ScatterSample = field(default_factory=ScatterSample)
    lattice: Lattice = field(default_factory=Lattice)
    unscored_responses: int = 0

    @property
    def manifest(self) -> dict[str, Any]:
        return self.traces[0].manifest

    @property
    def main_pair(self) -> Pair:
        """The pair that plots and worst tokens are about: the first one that is there."""
        return PAIRS[next(iter(self.pairs))]


def analyse(traces: Sequence[Trace], worst: int, on_responses: Callable[[int], None] = lambda _: None) -> Analysis:
    """Read traces once, in bounded memory, and keep the `worst` worst tokens; several traces are one measurement."""
    check_poolable(traces)
    pairs = {name: MismatchSummary(PAIRS[name]) for name in pairs_in(traces)}
    analysis = Analysis(traces, pairs, [WorstTokens(worst) for _ in traces])
    for trace, its_worst in zip(traces, analysis.worst, strict=True):
        for batch in trace.batches(_COLUMNS):
            _update(analysis, batch, its_worst)
            on_responses(batch.num_responses)
    if not any(summary.exact.counts.tokens for summary in analysis.pairs.values()):
        raise MismatchError(f"{traces[0].folder} holds no log-probabilities of a trainer. {traces[0].how_to_score}")
    return analysis


def _update(analysis: Analysis, batch: TokenBatch, worst: WorstTokens) -> None:
    main, *others = analysis.pairs.values()
    if not any(summary.pair.measured_in(batch) for summary in analysis.pairs.values()):
        analysis.unscored_responses += batch.num_responses
        return
    main.update(batch, analysis.scatter, worst, analysis.lattice)
    for summary in [*others, analysis.floor]:
        summary.update(batch)


def check_poolable(traces: Sequence[Trace]) -> None:
    """Numbers of different models or settings must not be averaged, and nothing may count twice."""
    first = traces[0]
    seeds = set()
    for trace in traces:
        differing = [name for name, value in _identity(trace).items() if value != _identity(first)[name]]
        if differing:
            raise MismatchError(
                f"{trace.folder} and {first.folder} differ in {differing[0]}, so they cannot be pooled. "
                "Report them one at a time."
            )
        seed = trace.manifest.get("config", {}).get("seed", trace.folder)
        if seed in seeds:
            raise MismatchError(
                f"{trace.folder} repeats the seed of another trace: its responses would count twice. Leave it out."
            )
        seeds.add(seed)


def _identity(trace: Trace) -> dict[str, Any]:
    """What has to be equal for traces to be samples of one thing."""
    manifest = trace.manifest
    return {
        "rollout engine": {k: v for k, v in manifest.get("rollout", {}).items() if k != "seed"},
        "trainer": {k: v for k, v in manifest.get("trainer", {}).items() if k != "threads"},
        "trainer at the rollout's weights": {k: v for k, v in manifest.get("recomputed", {}).items() if k != "threads"},
        "sampling settings": manifest.get("config", {}).get("sampling"),
        "top log-probs": manifest.get("top_logprobs"),
        "prompts": manifest.get("prompts", {}).get("digest"),
    }


def summary_json(analysis: Analysis) -> dict[str, Any]:
    """What `--json` prints and `summary.json` holds; documented in docs/summary.md."""
    floor = analysis.floor.result() if analysis.floor.exact.counts.tokens else None
    summary = {
        "format": SUMMARY_FORMAT,
        "version": SUMMARY_VERSION,
        "traces": shown([str(trace.folder) for trace in analysis.traces]),
        "about": about(analysis.traces, analysis.unscored_responses),
        "pairs": {
            name: without_unknown(_with_floor(summary.result(), floor), analysis.manifest.get("imported"))
            for name, summary in analysis.pairs.items()
        },
        "floor": floor,
        "lattice": [vars(line) for line in analysis.lattice.result()],
        "worst": _worst(analysis.worst),
    }
    return summary | {"verdict": assess(summary)}


def about(traces: Sequence[Trace], unscored_responses: int) -> dict[str, Any]:
    """What a report says about how its traces were made, and what they lack."""
    manifest = traces[0].manifest
    names = (
        "imported",
        "rollout",
        "trainer",
        "recomputed",
        "equal_weights",
        "prompts",
        "config",
        "libraries",
        "threads",
        "top_logprobs",
    )
    told = {name: manifest[name] for name in names if name in manifest} | {
        "unscored_responses": unscored_responses,
        "grading_timeouts": sum(trace.count("grading_timeouts") for trace in traces),
        "partial": [_shortfall(trace) for trace in traces if trace.completeness.partial],
    }
    return dict(shown(told))


def _shortfall(trace: Trace) -> dict[str, Any]:
    """What a trace lacks that its manifest promises, and how it becomes whole."""
    found = trace.completeness
    only = found.unscored > 0 and len(found.reasons) == 1
    how = remedy(trace.folder, trace.manifest, unscored=only)
    return {"trace": str(trace.folder), **found.to_json(), "remedy": how}


def _worst(of_traces: Sequence[WorstTokens]) -> dict[str, list[dict[str, Any]]]:
    """The worst of all traces, each row with the index of its trace."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, how_bad in _BADNESS.items():
        rows = [row | {"trace": i} for i, worst in enumerate(of_traces) for row in worst.result()[name]]
        found[name] = sorted(rows, key=how_bad, reverse=True)[: getattr(of_traces[0], name).capacity]
    return found


_BADNESS: dict[str, Callable[[dict[str, Any]], float]] = {
    "abs_d": lambda row: abs(row["logp_current"] - row["logp_reference"]),
    "abs_dp": lambda row: abs(exp(_or_zero_mass(row["logp_current"])) - exp(row["logp_reference"])),
    "responses": lambda row: abs(row["d_sum"]),
}


def _or_zero_mass(logp: float | None) -> float:
    return -inf if logp is None else logp  # a token out of support has no finite log π


def _with_floor(result: dict[str, Any], floor: dict[str, Any] | None) -> dict[str, Any]:
    """Each metric of a gap beside the same metric of the trainer against itself."""
    if floor is not None:
        for key, estimate in result["metrics"].items():
            if METRICS[key].agreement is not None:
                value = floor["metrics"][key]["value"]
                estimate |= {"floor": value, "times_floor": METRICS[key].times_floor(estimate["value"], value)}
    return result


def plot_data(analysis: Analysis, summary: dict[str, Any]) -> PlotData:
    """What the plots draw: the first pair of a summary, and the samples that were taken for it."""
    pair = summary["pairs"][analysis.main_pair.name]
    return PlotData.of(
        pair,
        analysis.scatter.result(),
        [line["spacing"] for line in summary["lattice"]],
        f"{who_is_compared(analysis.manifest)} · {pair['counts']['tokens']:,} tokens",
    )


def who_is_compared(manifest: Mapping[str, Any]) -> str:
    """The line below every figure, so that a copied picture says what it shows."""
    sides = (manifest.get("trainer"), manifest.get("rollout"))
    return " against ".join(f"{s.get('engine') or 'transformers'} {s.get('dtype') or ''}".strip() for s in sides if s)
