"""The tables of a training report: a row for each algorithm or run, as finished text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mismatch_cli import numbers
from mismatch_cli.metrics.correlation import series_correlation
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.gap_table import Metric
from mismatch_cli.metrics.update_table import CLIPPING, LAST, TRAINING
from mismatch_cli.report.tables import Col, col, interval_or_note, number, parts, percent, table, text
from mismatch_cli.report.view import Table
from mismatch_cli.studies.runs import TrainingRun
from mismatch_cli.studies.training import (
    Spread,
    best_reward,
    final_accuracy,
    first,
    highest,
    last,
    last_step,
    median_of,
    over_steps,
    phases_of,
    seconds_by_phase,
    spread,
)

_RUN: Col[TrainingRun] = text("run", lambda run: run.name)
_CORRELATIONS = "Bad updates and reward over the steps"
_GAP = ("mismatch", "abs_dp_mean")  # of a step
_LONG = 0.1  # of a step
_MANY = 12  # rows of correlations: more are folded away, and not shown on a terminal


def with_range(found: Spread, digits: int = 3) -> str:
    """A mean over seeds and their range: `0.932 [0.911, 0.953]`."""
    value, low, high = (numbers.number(part, digits) for part in found)
    return value if low == numbers.MISSING else f"{value} [{low}, {high}]"


def algorithms_table(algorithms: Mapping[str, Sequence[TrainingRun]]) -> Table:
    """The mean over the seeds of each algorithm; nothing to say where every algorithm has one run."""
    several = any(len(runs) > 1 for runs in algorithms.values())
    return table(
        "By algorithm",
        algorithms.items() if several else (),
        [
            text("algorithm", lambda item: item[0]),
            col("seeds", lambda item: str(len(item[1]))),
            _over_seeds("final reward", lambda run: last(run, "reward"), TRAINING["reward"]),
            _over_seeds("final accuracy", final_accuracy, TRAINING["eval_accuracy"]),
            _over_seeds("|π − μ| at the end", lambda run: last(run, *_GAP), TRAINING["abs_dp_last"], 2),
            _share_over_seeds("bad updates, % of A < 0", "bad_over_negative"),
            _share_over_seeds("blocked, %", "blocked"),
        ],
        note="Means over seeds, with the lowest and the highest of them.",
        shrinks=True,
    )


def _over_seeds(
    title: str, value: Callable[[TrainingRun], float | None], metric: Metric, digits: int = 3, *, optional: bool = False
) -> Col[tuple[str, Sequence[TrainingRun]]]:
    return col(
        title, lambda item: with_range(spread([value(run) for run in item[1]]), digits), metric, optional=optional
    )


def _share_over_seeds(title: str, key: str) -> Col[tuple[str, Sequence[TrainingRun]]]:
    def value(run: TrainingRun) -> float | None:
        mean = over_steps(run, key)
        return None if mean is None else 100 * mean

    return _over_seeds(title, value, TRAINING[key], 2, optional=True)


def runs_table(runs: Sequence[TrainingRun]) -> Table:
    """A row for each run; names that `train` gave say algorithm and seed already."""
    named = all(run.name == f"{re.sub('[:,]', '-', run.algorithm)}-seed-{run.seed}" for run in runs)
    who: list[Col[TrainingRun]] = [
        text("algorithm", lambda run: run.algorithm),
        col("seed", lambda run: numbers.MISSING if run.seed is None else str(run.seed)),
    ]
    return table(
        "By run",
        runs,
        [
            _RUN,
            *([] if named else who),
            col("steps", lambda run: numbers.count(last_step(run))),
            col("updates", lambda run: _whole(highest(run, "updates")), optional=True),
            col("final reward", lambda run: number(last(run, "reward")), TRAINING["reward"]),
            col("best", lambda run: number(best_reward(run)), TRAINING["best"], optional=True),
            col("final accuracy", lambda run: number(final_accuracy(run)), TRAINING["eval_accuracy"]),
            col("|π − μ| at first", lambda run: number(first(run, *_GAP)), TRAINING["abs_dp_first"], optional=True),
            col("at the end", lambda run: number(last(run, *_GAP)), TRAINING["abs_dp_last"], optional=True),
            col("s a step", _seconds, TRAINING["seconds"], optional=True),
        ],
        note=f"The final reward is the mean of the last {LAST} steps.",
        shrinks=True,
    )


def _seconds(run: TrainingRun) -> str:
    return number(sum(seconds_by_phase(run).values()) or None)


def _whole(value: float | None) -> str:
    return numbers.count(None if value is None else round(value))


def blocked_table(runs: Sequence[TrainingRun]) -> Table:
    """Means over the steps; runs that recorded none of them are left out."""
    columns = [
        _over_steps("blocked, %", "blocked", percent),
        _over_steps("A > 0, %", "blocked_positive", percent, optional=True),
        _over_steps("A < 0, %", "blocked_negative", percent, optional=True),
        _over_steps("bad updates, % of A < 0", "bad_over_negative", percent),
        _over_steps("% of A ≠ 0", "bad_over_tokens", percent, optional=True),
        _over_steps("mean μ of blocked", "mu_blocked", number),
        _over_steps("their entropy, nats", "entropy_blocked", number, optional=True),
    ]
    return table(
        "Blocked tokens and bad updates by run",
        [run for run in runs if any(column.cell(run) != numbers.MISSING for column in columns)],
        [_RUN, *columns],
        note="Means over steps.",
        shrinks=True,
    )


def _over_steps(
    title: str, key: str, show: Callable[[float | None], str], *, optional: bool = False
) -> Col[TrainingRun]:
    return col(title, lambda run: show(over_steps(run, key)), TRAINING[key], optional=optional)


def correlation_table(runs: Sequence[TrainingRun]) -> Table:
    """Bad updates, where there were any, with the reward of the step, and with how it differs from the step before."""
    rows = [row for run in runs for row in _correlations(run)]
    return table(
        _CORRELATIONS,
        rows,
        [
            text("run", lambda row: row.run),
            text("bad updates with", lambda row: row.other),
            col("steps", lambda row: numbers.count(row.steps)),
            col("correlation", lambda row: numbers.estimate(*parts(row.found))[0], CLIPPING["correlations"]),
            col("95 % interval", lambda row: interval_or_note(row.found)),
        ],
        note="Bad updates as a share of the tokens with A < 0. Steps follow each other and share their policy: an "
        "association over them shows no cause.",
        fold=_CORRELATIONS if len(rows) > _MANY else "",
        terminal_rows=_MANY,
    )


@dataclass(frozen=True)
class _Correlation:
    """Of bad updates with another series of the same run."""

    run: str
    other: str
    steps: int
    found: Estimate


def _correlations(run: TrainingRun) -> Iterator[_Correlation]:
    bad_N, reward_N = run.series("bad_over_negative"), run.series("reward")
    for other, value_N in (("the reward", reward_N), ("its change", np.diff(reward_N, prepend=np.nan))):
        known_N = np.isfinite(bad_N) & np.isfinite(value_N)
        if bad_N[known_N].any():  # measured, and not always 0
            found = series_correlation(bad_N[known_N], value_N[known_N])
            yield _Correlation(run.name, other, int(known_N.sum()), found)


def trainer_table(runs: Sequence[TrainingRun]) -> Table:
    """What says whether the optimiser and the sync are sound."""
    return table(
        "The trainer by run",
        runs,
        [
            _RUN,
            col("entropy at first", lambda run: number(first(run, "entropy"))),
            col("at the end, nats", lambda run: number(last(run, "entropy")), TRAINING["entropy"]),
            col("KL(μ‖π), nats", lambda run: number(last(run, "current", "k3")), TRAINING["k3"], optional=True),
            col("π/μ, 1 % to 99 %", _ratios, TRAINING["ratio"], optional=True),
            col("gradient norm", _gradient_norm, TRAINING["grad_norm"], optional=True),
            col("length", lambda run: number(last(run, "length")), TRAINING["length"]),
            col("truncated, %", lambda run: percent(last(run, "truncated")), TRAINING["truncated"], optional=True),
            col("back-offs", lambda run: _whole(highest(run, "back_offs")), TRAINING["back_offs"], optional=True),
            col("sync proven", _sync, TRAINING["sync"]),
        ],
        note="Where steps are too small to tell the new weights from the old by their log-probabilities, the sync of "
        "a step is undecidable: it counts as not proven.",
        fold="The trainer by run",
        shrinks=True,
        terminal_rows=0,
    )


def _gradient_norm(run: TrainingRun) -> str:
    return number(median_of(run.series("grad_norm")))


def _ratios(run: TrainingRun) -> str:
    low, high = (last(run, "current", key) for key in ("ratio_p01", "ratio_p99"))
    return numbers.MISSING if low is None or high is None else f"{numbers.near(low, 1)} – {numbers.near(high, 1)}"


def _sync(run: TrainingRun) -> str:
    answers = [record["sync"] for record in run.records if isinstance(record.get("sync"), str)]
    return f"{answers.count('proven'):,} / {len(answers):,}" if answers else numbers.MISSING


def time_table(runs: Sequence[TrainingRun]) -> Table:
    """Seconds of each phase, and its share of the step; the short ones are given up where there is no room."""
    rows = [(run.name, seconds) for run in runs if (seconds := seconds_by_phase(run))]
    return table(
        "Seconds of a step, and percent of it",
        rows,
        [
            text("run", lambda row: row[0]),
            col("step", lambda row: number(sum(row[1].values())), TRAINING["seconds"]),
            *_phase_columns([seconds for _, seconds in rows]),
        ],
        note="What takes less than half a percent is counted as other.",
        shrinks=True,
    )


def _phase_columns(steps: Sequence[Mapping[str, float]]) -> Iterator[Col[tuple[str, Mapping[str, float]]]]:
    for phase in phases_of(steps):
        long = any(seconds.get(phase, 0.0) > _LONG * sum(seconds.values()) for seconds in steps)
        yield col(phase, partial(_of_step, phase), optional=not long)


def _of_step(phase: str, row: tuple[str, Mapping[str, float]]) -> str:
    seconds = row[1]
    if phase not in seconds:
        return numbers.MISSING
    return f"{number(seconds[phase])} ({100 * seconds[phase] / sum(seconds.values()):.0f} %)"
