"""The tables and figures of docs/evidence.md, from the runs that lab/evidence.py keeps.

`python -m lab.evidence page` calls it. Differences are paired by seed over the steps that
the compared runs share, with 95 % intervals (`studies.seeds`). A prediction is shown if the whole
interval is in its range, contradicted if it is wholly outside, else not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import matplotlib as mpl
import numpy as np

from mismatch_cli.base.numbers import MISSING
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.train.studies.common_steps import CommonSteps
from mismatch_cli.train.studies.runs import TrainingRun, read_runs
from mismatch_cli.train.studies.seeds import NO_SPREAD, difference, over_seeds
from tests.docs.pages import DOCS, renewed

PAGE, IMAGES, MARK = DOCS / "evidence.md", DOCS / "images", "results"
GRPO, DPPO, PG_IS = "grpo-clip-higher", "dppo-binary-tv", "pg-is"
TOP_K, RELAXED = "dppo-topk-tv", "relax-both"
_COLOURS = {
    GRPO: "#c44e52",
    DPPO: "#4c72b0",
    PG_IS: "#7f7f7f",
    TOP_K: "#8172b3",
    RELAXED: "#55a868",
}
_DASHED = (PG_IS, RELAXED)  # they may cover other lines
_BLOCKED = "% of A > 0, μ < 0.1 blocked"
_TITLES = {
    "tokens": "Rare tokens",
    "variants": "Rare tokens: top-K TV and relaxed clipping",
    "solutions": "Whole solutions",
    "stability": "Stability",
    "real": "The real model",
}
Measure = Callable[[TrainingRun], float | None]


class PlannedRun(Protocol):
    """A run of the design."""

    @property
    def name(self) -> str: ...

    updates: int
    algorithm: str


class Cell(NamedTuple):
    """The seeds of one algorithm in one setting; `algorithm` is without thresholds."""

    part: str
    updates: int
    algorithm: str


class Evidence:
    """The runs that are kept in `folder`, of those that `design` plans for a part."""

    def __init__(self, design: Callable[[str], Sequence[PlannedRun]], folder: Path) -> None:
        self._folders: dict[Cell, list[Path]] = {}
        for part in _TITLES:
            for run in design(part):
                cell = Cell(part, run.updates, run.algorithm.partition(":")[0])
                folders = self._folders.setdefault(cell, [])
                if (folder / run.name).is_dir():
                    folders.append(folder / run.name)
        self._runs = {cell: read_runs(paths) for cell, paths in self._folders.items()}

    def cells(self, part: str) -> list[Cell]:
        """The cells of a part that have runs, the fewest updates first."""
        own = [cell for cell, runs in self._runs.items() if cell.part == part and runs]
        return sorted(own, key=lambda cell: cell.updates)

    def runs(self, cell: Cell) -> list[TrainingRun]:
        """The seeds of a cell."""
        return self._runs[cell]

    def gap(self, own: Cell, rival: Cell, measure: Measure) -> Estimate:
        """Own − rival, over the steps that all their runs share, paired by seed."""
        number, runs = len(self.runs(own)), [*self.runs(own), *self.runs(rival)]
        if not 0 < number < len(runs):
            return Estimate(None)
        pairs = []
        for run in CommonSteps(runs).restricted:
            value = measure(run)
            if value is not None:
                pairs.append((run.seed, value))
        return difference(pairs[:number], pairs[number:]).estimate

    def level(self, cell: Cell, measure: Measure) -> Estimate:
        """The mean over the seeds of a cell."""
        return over_seeds(map(measure, self.runs(cell)))

    def doses(self) -> list[tuple[Cell, Estimate]]:
        """The cells of GRPO that DPPO has too, with DPPO − GRPO."""
        pairs = [("tokens", 2), ("tokens", 16), ("tokens", 32), ("solutions", 16), ("real", 8)]
        doses = []
        for part, updates in pairs:
            cell = Cell(part, updates, GRPO)
            ahead = self.gap(cell._replace(algorithm=DPPO), cell, area)
            if ahead.value is not None:
                doses.append((cell, ahead))
        return doses


def area(run: TrainingRun) -> float | None:
    """The area under the reward, a step being 1/steps wide: the mean over the steps."""
    return run.mean("reward")


def ending(run: TrainingRun) -> float | None:
    """The mean reward of the last ten steps."""
    return run.last("reward")


def blocked_rare(run: TrainingRun) -> float | None:
    """The share of the tokens with A > 0 and μ < 0.1 that the run's mask blocks."""
    return run.mean("blocked_rare")


class Range(NamedTuple):
    """Where a number is predicted to be; `is_undecided`: its interval holds 0."""

    least: float = -np.inf
    most: float = np.inf
    is_undecided: bool = False

    def __str__(self) -> str:
        if self.is_undecided:
            return "undecided"
        if np.isinf(self.most):
            return f"> {self.least:g}"
        if np.isinf(self.least):
            return f"< {self.most:g}"
        return f"−{-self.least:g} to {self.most:g}"

    def verdict(self, estimate: Estimate) -> str:
        """What the interval says of the prediction."""
        if estimate.value is None:
            return "not run"
        low, high = estimate.low, estimate.high
        # Every seed has this value
        if estimate.note == NO_SPREAD:
            low = high = estimate.value
        if low is None or high is None:
            return "one seed"
        if self.is_undecided:
            return "as predicted" if low <= 0 <= high else "**contradicted**"
        if self.least < low and high < self.most:
            return "**shown**"
        return "**contradicted**" if high < self.least or low > self.most else "not shown"


_ABOVE_0, _UNDECIDED = Range(0), Range(is_undecided=True)


@dataclass(frozen=True)
class Prediction:
    """A number of the design and its range: a cell's mean, or its difference to a rival's."""

    claim: int
    about: str
    range: Range
    measure: Measure
    cell: Cell
    rival: Cell | None = None

    def row(self, evidence: Evidence) -> list[str]:
        """A row of the table of predictions."""
        if self.rival is None:
            estimate = evidence.level(self.cell, self.measure)
        else:
            estimate = evidence.gap(self.cell, self.rival, self.measure)
        verdict = self.range.verdict(estimate)
        return [str(self.claim), self.about, str(self.range), _interval(estimate), verdict]


def predictions() -> list[Prediction]:
    """The predictions of the page, in its order."""
    two, sixteen, thirty_two = (partial(Cell, "tokens", updates) for updates in (2, 16, 32))
    variant, solution = partial(Cell, "variants", 16), partial(Cell, "solutions", 16)
    stable, real = partial(Cell, "stability", 16), partial(Cell, "real", 8)
    none_far, grpo = Range(-0.05, 0.05), sixteen(GRPO)
    return [
        Prediction(1, "16 updates: DPPO − GRPO", _ABOVE_0, area, sixteen(DPPO), grpo),
        Prediction(1, "16 updates: blocked by GRPO", Range(0.3), blocked_rare, grpo),
        Prediction(1, "16 updates: blocked by DPPO", Range(most=0.1), blocked_rare, sixteen(DPPO)),
        Prediction(
            1, "32 updates: DPPO − GRPO", _ABOVE_0, area, thirty_two(DPPO), thirty_two(GRPO)
        ),
        Prediction(1, "GRPO: 32 − 16 updates", Range(most=0.05), area, thirty_two(GRPO), grpo),
        Prediction(1, "2 updates: DPPO − GRPO", Range(-0.03, 0.03), area, two(DPPO), two(GRPO)),
        Prediction(1, "2 updates: blocked by GRPO", Range(most=0.05), blocked_rare, two(GRPO)),
        Prediction(2, "relax-both − GRPO", _ABOVE_0, area, variant(RELAXED), grpo),
        Prediction(2, "relax-both − DPPO", none_far, area, variant(RELAXED), sixteen(DPPO)),
        Prediction(3, "DPPO binary − top-K", _ABOVE_0, area, sixteen(DPPO), variant(TOP_K)),
        Prediction(3, "top-K − GRPO", _ABOVE_0, area, variant(TOP_K), grpo),
        Prediction(
            3,
            "blocked: top-K − binary",
            _ABOVE_0,
            blocked_rare,
            variant(TOP_K),
            sixteen(DPPO),
        ),
        Prediction(4, "16 updates: PG-IS − DPPO", none_far, area, sixteen(PG_IS), sixteen(DPPO)),
        Prediction(
            4, "32 updates: PG-IS − DPPO", none_far, area, thirty_two(PG_IS), thirty_two(DPPO)
        ),
        Prediction(4, "16 updates: PG-IS − GRPO", _ABOVE_0, area, sixteen(PG_IS), grpo),
        Prediction(5, "solutions: DPPO − GRPO", _ABOVE_0, area, solution(DPPO), solution(GRPO)),
        Prediction(5, "solutions: blocked by GRPO", Range(0.05), blocked_rare, solution(GRPO)),
        Prediction(5, "solutions: DPPO − PG-IS", _ABOVE_0, area, solution(DPPO), solution(PG_IS)),
        Prediction(6, "GRPO − PG-IS, last 10", _ABOVE_0, ending, stable(GRPO), stable(PG_IS)),
        Prediction(6, "DPPO − PG-IS, last 10", _ABOVE_0, ending, stable(DPPO), stable(PG_IS)),
        Prediction(6, "DPPO − GRPO, last 10", _UNDECIDED, ending, stable(DPPO), stable(GRPO)),
        Prediction(7, "real model: DPPO − GRPO", _ABOVE_0, area, real(DPPO), real(GRPO)),
        Prediction(7, "real model: blocked by GRPO", Range(0.05), blocked_rare, real(GRPO)),
    ]


def tables(evidence: Evidence) -> Iterator[str]:
    """The predictions with what came out, the cells that have runs, and the figures."""
    rows = [prediction.row(evidence) for prediction in predictions()]
    yield _table(["claim", "comparison", "predicted", "came out", "verdict"], rows)
    parts = {part: cells for part in _TITLES if (cells := evidence.cells(part))}
    yield _table(_HEAD, [_row(evidence, cell) for cells in parts.values() for cell in cells])
    for part in parts:
        yield f"![{_TITLES[part]}: reward](images/evidence-{part}.png)"
    if evidence.doses():
        yield "![DPPO − GRPO by the rare tokens that GRPO blocks](images/evidence-dose.png)"


_HEAD = [
    "part", "updates", "algorithm", "mean reward", "each seed", "last step", "blocked, %",
    "rare blocked, %", "bad updates, % of A < 0",
]  # fmt: skip


def _row(evidence: Evidence, cell: Cell) -> list[str]:
    runs = evidence.runs(cell)
    measures = (_mean("blocked"), blocked_rare, _mean("bad_over_negative"))
    shares = [_percent(evidence.level(cell, measure)) for measure in measures]
    return [
        cell.part,
        str(cell.updates),
        cell.algorithm,
        _interval(evidence.level(cell, area)),
        ", ".join(_plain(area(run)) for run in runs),
        _interval(evidence.level(cell, lambda run: float(run.series("reward")[-1]))),
        *shares,
    ]


def _mean(key: str) -> Measure:
    return lambda run: run.mean(key)


def _plain(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}".replace("-", "−")


def _interval(estimate: Estimate) -> str:
    if estimate.low is None:
        return _plain(estimate.value)
    return f"{_plain(estimate.value)} [{_plain(estimate.low)}, {_plain(estimate.high)}]"


def _percent(estimate: Estimate) -> str:
    return MISSING if estimate.value is None else f"{100 * estimate.value:.2g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw(evidence: Evidence, folder: Path) -> None:
    """A figure for each part that has runs, and the dose."""
    mpl.use("agg")
    for part in _TITLES:
        cells = evidence.cells(part)
        if cells:
            _draw_curves(evidence, cells, folder / f"evidence-{part}.png")
    doses = evidence.doses()
    if doses:
        _draw_dose(evidence, doses, folder / "evidence-dose.png")


def _draw_curves(evidence: Evidence, cells: list[Cell], file: Path) -> None:
    """A panel for each number of updates: thin lines are seeds, thick ones their means."""
    import matplotlib.pyplot as plt

    # They are drawn beside what they are compared with
    if cells[0].part == "variants":
        cells += [cell for cell in evidence.cells("tokens") if cell.updates == cells[0].updates]
    counts = sorted({cell.updates for cell in cells})
    figure, (axes,) = plt.subplots(
        1, len(counts), figsize=(1.6 + 3 * len(counts), 3.6), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis, updates in zip(axes, counts, strict=True):
        for cell in cells:
            if cell.updates == updates:
                _draw_seeds(axis, cell.algorithm, evidence.runs(cell))
        axis.set(title=f"{updates} updates a rollout", xlabel="step")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("reward")
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    _save(figure, file)


def _draw_seeds(axis: Any, algorithm: str, seeds: Sequence[TrainingRun]) -> None:
    runs, colour = CommonSteps(seeds).restricted, _COLOURS[algorithm]
    for run in runs:
        axis.plot(run.step_N, run.series("reward"), color=colour, linewidth=0.7, alpha=0.5)
    mean_N = np.mean([run.series("reward") for run in runs], axis=0)
    style = "--" if algorithm in _DASHED else "-"
    axis.plot(runs[0].step_N, mean_N, style, color=colour, linewidth=2, label=algorithm)


def _draw_dose(evidence: Evidence, doses: Sequence[tuple[Cell, Estimate]], file: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5.6, 3.6), layout="constrained")
    for cell, ahead in doses:
        blocked = 100 * (evidence.level(cell, blocked_rare).value or 0.0)
        points = axis.plot(blocked, ahead.value, "o", label=f"{cell.part}, {cell.updates} updates")
        if ahead.low is not None:
            axis.vlines(blocked, ahead.low, ahead.high, color=points[0].get_color())
    axis.axhline(0, color="#999999", linewidth=0.8)
    axis.set(xlabel=f"GRPO: {_BLOCKED}", ylabel="mean reward, DPPO − GRPO")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)
    _save(figure, file)


def _save(figure: Any, file: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(file, dpi=110, metadata={"Software": None})
    plt.close(figure)


def write(evidence: Evidence) -> None:
    """The figures, and the tables between the marks of the page."""
    draw(evidence, IMAGES)
    renewed(PAGE, MARK, "\n\n".join(tables(evidence)))
