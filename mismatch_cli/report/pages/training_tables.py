"""The tables of a training report: a row for each algorithm or run, as finished text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mismatch_cli import numbers
from mismatch_cli.metrics.correlation import series_correlation
from mismatch_cli.metrics.update_table import CLIPPING, LAST, TRAINING
from mismatch_cli.report.view import Column, Table
from mismatch_cli.studies.phases import phases_of, seconds_by_phase
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
    spread,
)

_RUN = Column("run", kind="text")
_CORRELATIONS = "Bad updates and reward over the steps"
_LONG = 0.1  # of a step
_MANY = 12  # rows of correlations: more are folded away, and not shown on a terminal


def percent(value: float | None) -> str:
    """A share in percent; the sign itself stands in the head of the column."""
    return numbers.number(None if value is None else 100 * value)


def with_range(found: Spread, digits: int = 3) -> str:
    """A mean over seeds and their range: `0.932 [0.911, 0.953]`."""
    value, low, high = (numbers.number(part, digits) for part in found)
    return value if low == numbers.MISSING else f"{value} [{low}, {high}]"


def algorithms_table(algorithms: Mapping[str, Sequence[TrainingRun]]) -> Table:
    """The mean over the seeds of each algorithm; nothing to say where every algorithm has one run."""

    def cell(runs: Sequence[TrainingRun], digits: int, number: Callable[[TrainingRun], float | None]) -> str:
        return with_range(spread([number(run) for run in runs]), digits)

    numbers_of: tuple[tuple[int, Callable[[TrainingRun], float | None]], ...] = (
        (3, lambda run: last(run, "reward")), (3, final_accuracy),
        (2, lambda run: last(run, "mismatch", "abs_dp_mean")),
        (2, lambda run: _times_100(over_steps(run, "bad_over_negative"))),
        (2, lambda run: _times_100(over_steps(run, "blocked"))),
    )  # fmt: skip
    return Table(
        "By algorithm",
        (
            Column("algorithm", kind="text"), Column("seeds"), Column("final reward", TRAINING["reward"]),
            Column("final accuracy", TRAINING["eval_accuracy"]), Column("|π − μ| at the end", TRAINING["abs_dp_last"]),
            Column("bad updates, % of A < 0", TRAINING["bad_over_negative"], optional=True),
            Column("blocked, %", TRAINING["blocked"], optional=True),
        ),
        tuple(
            (name, str(len(runs)), *(cell(runs, *number) for number in numbers_of)) for name, runs in algorithms.items()
        ) if any(len(runs) > 1 for runs in algorithms.values()) else (),
        note="Means over seeds, with the lowest and the highest of them.",
        shrinks=True,
    )  # fmt: skip


def _times_100(value: float | None) -> float | None:
    return None if value is None else 100 * value


def runs_table(runs: Sequence[TrainingRun]) -> Table:
    """A row for each run; names that `train` gave say algorithm and seed already."""
    named = all(run.name == f"{re.sub('[:,]', '-', run.algorithm)}-seed-{run.seed}" for run in runs)
    who = () if named else (Column("algorithm", kind="text"), Column("seed"))
    return Table(
        "By run",
        (
            _RUN, *who, Column("steps"), Column("updates", optional=True),
            Column("final reward", TRAINING["reward"]), Column("best", TRAINING["best"], optional=True),
            Column("final accuracy", TRAINING["eval_accuracy"]),
            Column("|π − μ| at first", TRAINING["abs_dp_first"], optional=True),
            Column("at the end", TRAINING["abs_dp_last"], optional=True),
            Column("s a step", TRAINING["seconds"], optional=True),
        ),
        tuple(
            (
                run.name, *(() if named else (run.algorithm, numbers.MISSING if run.seed is None else str(run.seed))),
                numbers.count(last_step(run)), _whole(highest(run, "updates")),
                numbers.number(last(run, "reward")), numbers.number(best_reward(run)),
                numbers.number(final_accuracy(run)), numbers.number(first(run, "mismatch", "abs_dp_mean")),
                numbers.number(last(run, "mismatch", "abs_dp_mean")),
                numbers.number(sum(seconds_by_phase(run).values()) or None),
            )
            for run in runs
        ),
        note=f"The final reward is the mean of the last {LAST} steps.",
        shrinks=True,
    )  # fmt: skip


def _whole(value: float | None) -> str:
    return numbers.count(None if value is None else round(value))


def blocked_table(runs: Sequence[TrainingRun]) -> Table:
    shares = (
        (Column("blocked, %", TRAINING["blocked"]), "blocked"),
        (Column("A > 0, %", TRAINING["blocked_positive"], optional=True), "blocked_positive"),
        (Column("A < 0, %", TRAINING["blocked_negative"], optional=True), "blocked_negative"),
        (Column("bad updates, % of A < 0", TRAINING["bad_over_negative"]), "bad_over_negative"),
        (Column("% of A ≠ 0", TRAINING["bad_over_tokens"], optional=True), "bad_over_tokens"),
    )
    means = (
        (Column("mean μ of blocked", TRAINING["mu_blocked"]), "mu_blocked"),
        (Column("their entropy, nats", TRAINING["entropy_blocked"], optional=True), "entropy_blocked"),
    )
    rows = [
        (
            run.name,
            *(percent(over_steps(run, key)) for _, key in shares),
            *(numbers.number(over_steps(run, key)) for _, key in means),
        )
        for run in runs
    ]
    return Table(
        "Blocked tokens and bad updates by run",
        (_RUN, *(column for column, _ in shares), *(column for column, _ in means)),
        tuple(row for row in rows if any(cell != numbers.MISSING for cell in row[1:])),
        note="Means over steps.",
        shrinks=True,
    )


def correlation_table(runs: Sequence[TrainingRun]) -> Table:
    """Bad updates, where there were any, with the reward of the step, and with how it differs from the step before."""
    rows = [row for run in runs for row in _correlations(run)]
    return Table(
        _CORRELATIONS,
        (
            _RUN, Column("bad updates with", kind="text"), Column("steps"),
            Column("correlation", CLIPPING["correlations"]), Column("95 % interval"),
        ),
        tuple(rows),
        note="Bad updates as a share of the tokens with A < 0. Steps follow each other and share their policy: an "
        "association over them shows no cause.",
        fold=_CORRELATIONS if len(rows) > _MANY else "",
        terminal_rows=_MANY,
    )  # fmt: skip


def _correlations(run: TrainingRun) -> list[tuple[str, ...]]:
    bad_N, reward_N = run.series("bad_over_negative"), run.series("reward")
    change_N = np.diff(reward_N, prepend=np.nan)
    rows: list[tuple[str, ...]] = []
    for what, value_N in (("the reward", reward_N), ("its change", change_N)):
        both_N = np.isfinite(bad_N) & np.isfinite(value_N)
        if not bad_N[both_N].any():  # never measured, or never any
            continue
        found = series_correlation(bad_N[both_N], value_N[both_N])
        value, interval = numbers.estimate(found.value, found.low, found.high)
        if interval == numbers.MISSING:
            interval = found.note or interval
        rows.append((run.name, what, numbers.count(int(both_N.sum())), value, interval))
    return rows


def trainer_table(runs: Sequence[TrainingRun]) -> Table:
    """What says whether the optimiser and the sync are sound."""
    return Table(
        "The trainer by run",
        (
            _RUN, Column("entropy at first"), Column("at the end, nats", TRAINING["entropy"]),
            Column("KL(μ‖π), nats", TRAINING["k3"], optional=True),
            Column("π/μ, 1 % to 99 %", TRAINING["ratio"], optional=True),
            Column("gradient norm", TRAINING["grad_norm"], optional=True), Column("length", TRAINING["length"]),
            Column("truncated, %", TRAINING["truncated"], optional=True),
            Column("back-offs", TRAINING["back_offs"], optional=True), Column("sync proven", TRAINING["sync"]),
        ),
        tuple(
            (
                run.name, numbers.number(first(run, "entropy")), numbers.number(last(run, "entropy")),
                numbers.number(last(run, "current", "k3")), _ratios(run),
                numbers.number(median_of(run.series("grad_norm"))), numbers.number(last(run, "length")),
                percent(last(run, "truncated")), _whole(highest(run, "back_offs")), _sync(run),
            )
            for run in runs
        ),
        note="Where steps are too small to tell the new weights from the old by their log-probabilities, the sync of "
        "a step is undecidable: it counts as not proven.",
        fold="The trainer by run",
        shrinks=True,
        terminal_rows=0,
    )  # fmt: skip


def _ratios(run: TrainingRun) -> str:
    low, high = (last(run, "current", key) for key in ("ratio_p01", "ratio_p99"))
    return numbers.MISSING if low is None or high is None else f"{numbers.near(low, 1)} – {numbers.near(high, 1)}"


def _sync(run: TrainingRun) -> str:
    answers = [record["sync"] for record in run.records if isinstance(record.get("sync"), str)]
    return f"{answers.count('proven'):,} / {len(answers):,}" if answers else numbers.MISSING


def time_table(runs: Sequence[TrainingRun]) -> Table:
    """Seconds of each phase, and its share of the step; the short ones are given up where there is no room."""
    found = [(run.name, seconds) for run in runs if (seconds := seconds_by_phase(run))]
    phases = phases_of([seconds for _, seconds in found])
    long = {phase for phase in phases for _, row in found if row.get(phase, 0.0) > _LONG * sum(row.values())}
    return Table(
        "Seconds of a step, and percent of it",
        (_RUN, Column("step", TRAINING["seconds"]), *(Column(phase, optional=phase not in long) for phase in phases)),
        tuple(
            (name, numbers.number(sum(seconds.values())), *(_of_step(seconds, phase) for phase in phases))
            for name, seconds in found
        ),
        note="What takes less than half a percent is counted as other.",
        shrinks=True,
    )


def _of_step(seconds: Mapping[str, float], phase: str) -> str:
    if phase not in seconds:
        return numbers.MISSING
    return f"{numbers.number(seconds[phase])} ({100 * seconds[phase] / sum(seconds.values()):.0f} %)"
