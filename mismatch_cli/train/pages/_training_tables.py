"""The tables of training runs: a row per algorithm, per run, or per dose of staleness."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from math import inf

from mismatch_cli.base import numbers
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.update_table import CLIPPING, TRAINING
from mismatch_cli.report.outline import Brief, Priority, Table
from mismatch_cli.report.tables import (
    TextColumn,
    col,
    interval_or_note,
    number,
    percent,
    plain,
    table,
    text,
    value_of,
)
from mismatch_cli.train.pages._training_verdict import reward_title
from mismatch_cli.train.studies.phases import StepTime, phases_of, timed
from mismatch_cli.train.studies.run_numbers import RunGroup
from mismatch_cli.train.studies.runs import SetAccuracy, TrainingRun, sync_checks
from mismatch_cli.train.studies.staleness import SHARES, Dose
from mismatch_cli.train.studies.training import Correlation, TrainingAnalysis, correlations

_MOST = 10  # rows of a screen
_MEANING_OF_BAD = "Bad: push down a token (A < 0) that already lost 0.5 or more."
_CORRELATIONS = "Bad updates and reward over the steps"
_MANY = 12  # rows of correlations: more are folded on the page and cut on a terminal
_LONG = 0.1  # of a step: a narrow terminal hides shorter phases
_SPARE, _FULL = Priority.SPARE, Priority.FULL
# Keys of metrics
_ACCURACY, _CORRELATION, _RATIO = "eval_accuracy", "correlations", "ratio"
_SYNC, _SECONDS = "sync", "seconds"


def _value(
    key: str,
    title: str,
    show: Callable[[Estimate], str] = number,
    *,
    short: str = "",
    priority: Priority = Priority.USUAL,
) -> TextColumn[RunGroup]:
    """A column with a number of each row, by its key in `TRAINING`."""
    return col(
        title,
        lambda group: show(group.number(key)),
        TRAINING[key],
        short=short,
        priority=priority,
    )


def _share(mean: Estimate) -> str:
    """In percent, without the interval."""
    return percent(value_of(mean))


def _whole(mean: Estimate) -> str:
    """As a whole number, without the interval."""
    value = value_of(mean)
    if value is None:
        return numbers.MISSING
    return numbers.count(round(value))


def _or_note(mean: Estimate) -> str:
    """The value, or how many of the runs have one."""
    if mean.value is None:
        return mean.note or numbers.MISSING
    return number(mean)


_RUN: TextColumn[RunGroup] = text("run", lambda row: row.name)
_BLOCKED = _value("blocked", "blocked, %", _share, short="blocked %")
_BAD = _value("bad_over_negative", "bad updates, % of A < 0", _share, short="bad %")
_BAD_OF_ALL = _value("bad_over_tokens", "% of A ≠ 0", _share, short="bad % of all", priority=_SPARE)


def _ends(study: TrainingAnalysis) -> list[TextColumn[RunGroup]]:
    """What is compared, of algorithms and of runs."""
    columns = [
        _value("reward", reward_title(study), plain),
        _value("eval_accuracy", "final accuracy", short="accuracy"),
        _value("abs_dp_last", "final |π − μ|", short="|π − μ|"),
        _BLOCKED,
    ]
    if study.occurs("bad_over_negative"):
        columns += [_BAD, _BAD_OF_ALL]
    return columns


def _note(study: TrainingAnalysis, rows: Sequence[RunGroup]) -> str:
    """Over which steps, and over which seeds if a row has several."""
    most = max((len(row.runs) for row in rows), default=0)
    over = ", ± 95 % over seeds" if most > 1 else ""
    return f"Reward: {study.window}{over}."


def _brief(study: TrainingAnalysis, note: str) -> Brief:
    """The first rows of a table; the page says elsewhere what a bad update is."""
    if study.occurs("bad_over_negative"):
        note += f" {_MEANING_OF_BAD}"
    return Brief.first(_MOST, note=note)


def algorithms_table(study: TrainingAnalysis) -> Table:
    """Means over the seeds of each algorithm, the highest reward first; empty for a single run."""
    rows = sorted(study.by_algorithm, key=_highest_first) if len(study.runs) > 1 else []
    reward = numbers.number(study.reward_to_reach, 2)
    note = _note(study, rows)
    # Of a single algorithm, the table of its runs is on the screen instead.
    is_brief = len(rows) > 1 and study.claimed is None
    return table(
        "By algorithm",
        rows,
        [
            text("algorithm", lambda row: row.name),
            col("seeds", lambda row: str(len(row.runs)), priority=_FULL),
            *_ends(study),
            _value("area", "area"),
            _value("steps_to_reward", f"steps to {reward}", _or_note, priority=_SPARE),
            _value(
                "seconds_to_reward",
                f"seconds to {reward}",
                _or_note,
                short=f"s to {reward}",
                priority=_SPARE,
            ),
        ],
        note=note,
        brief=_brief(study, note) if is_brief else None,
    )


def _highest_first(row: RunGroup) -> float:
    reward = value_of(row.number("reward"))
    return inf if reward is None else -reward


def runs_table(study: TrainingAnalysis) -> Table:
    """A row per run; names that `train` gave already say algorithm and seed."""
    note = _note(study, study.by_run)
    return table(
        "By run",
        study.by_run,
        [
            _RUN,
            *_who(study),
            col("steps", lambda row: numbers.count(row.run.steps), priority=_FULL),
            *_ends(study),
            _value("abs_dp_first", "first |π − μ|", priority=_FULL),
            _value("best", "best reward", priority=_FULL),
            _value("seconds", "s per step", priority=_FULL),
        ],
        note=note,
        brief=_brief(study, note) if len(study.by_algorithm) == 1 else None,
    )


def _who(study: TrainingAnalysis) -> Iterator[TextColumn[RunGroup]]:
    """What tells runs apart besides their names."""
    if not all(map(_is_named, study.runs)):
        yield text("algorithm", lambda row: row.run.algorithm, priority=_FULL)
        yield col("seed", _seed, priority=_FULL)
    if len(study.settings) > 1:
        yield text("setting", lambda row: row.setting, priority=_FULL)


def _is_named(run: TrainingRun) -> bool:
    """Whether its name says algorithm and seed, as `train` names its folders."""
    return run.name == f"{re.sub('[:,]', '-', run.algorithm)}-seed-{run.seed}"


def _seed(row: RunGroup) -> str:
    return numbers.MISSING if row.run.seed is None else str(row.run.seed)


_SetRow = tuple[str, str, SetAccuracy]


def sets_table(study: TrainingAnalysis) -> Table:
    """The accuracy on each evaluation set, for runs with several."""
    rows: list[_SetRow] = []
    for run in study.restricted:
        for name, accuracy in run.accuracy_by_set.items():
            rows.append((run.name, name, accuracy))
    return table(
        "Accuracy by evaluation set",
        rows,
        [
            text("run", lambda row: row[0]),
            text("set", lambda row: row[1]),
            col("before", lambda row: number(row[2].before), priority=_SPARE),
            col("final accuracy", lambda row: number(row[2].final), TRAINING[_ACCURACY]),
            col("best", lambda row: number(row[2].best)),
        ],
        note="Elsewhere, accuracy is the mean over the sets, with equal weights.",
    )


def blocked_table(study: TrainingAnalysis) -> Table:
    """Means over the steps, without runs that recorded none."""
    columns = [
        _BLOCKED,
        _value("blocked_positive", "A > 0, %", _share, priority=_SPARE),
        _value("blocked_rare", "A > 0, μ < 0.1, %", _share, priority=_SPARE),
        _value("blocked_negative", "A < 0, %", _share, priority=_SPARE),
        _BAD,
        _BAD_OF_ALL,
        _value("mu_blocked", "mean μ of blocked"),
        _value("entropy_blocked", "entropy of blocked, nats", priority=_SPARE),
    ]
    rows = []
    for row in study.by_run:
        cells = {column.cell(row) for column in columns}
        if cells != {numbers.MISSING}:
            rows.append(row)
    return table(
        "Blocked tokens and bad updates by run",
        rows,
        [_RUN, *columns],
        note="Means over steps.",
    )


_DoseRow = tuple[str, Dose]


def staleness_table(study: TrainingAnalysis) -> Table:
    """A row per algorithm and dose; empty where the runs do not differ in staleness."""
    rows: list[_DoseRow] = []
    for response in study.by_staleness:
        rows += zip(repeat(response.algorithm), response.doses)
    return table(
        "Blocked tokens by staleness",
        rows,
        [
            text("algorithm", lambda row: row[0]),
            col("N", lambda row: str(row[1].staleness)),
            col("seeds", lambda row: str(row[1].seeds)),
            *map(_of_dose, SHARES, ("blocked, %", "A > 0, %", "A < 0, %")),
            col("more, points", lambda row: percent(row[1].more)),
            col("paired seeds", lambda row: numbers.count(row[1].paired_seeds)),
        ],
        note=(
            "N: optimiser steps by which the weights that sample are behind. More: blocked tokens "
            "than at the lowest N, in points, in the mean over runs with the same seed if two or "
            "more seeds are shared. Means over the steps at which every engine is as far behind "
            "as it should be."
        ),
    )


def _of_dose(key: str, title: str) -> TextColumn[_DoseRow]:
    return col(title, lambda row: percent(getattr(row[1], key)), TRAINING[key])


def correlation_table(study: TrainingAnalysis) -> Table:
    """Bad updates, if any, with the reward of the step and with its change from the step before."""
    rows = list(chain.from_iterable(map(correlations, study.runs)))
    columns: list[TextColumn[Correlation]] = [
        text("run", lambda row: row.run),
        text("bad updates with", lambda row: row.other),
        col("steps", lambda row: numbers.count(row.steps)),
        col("correlation", lambda row: number(row.estimate), CLIPPING[_CORRELATION]),
        col("95 % interval", lambda row: interval_or_note(row.estimate)),
    ]
    return table(
        _CORRELATIONS,
        rows,
        columns,
        note=(
            "Bad updates as a share of the tokens with A < 0. Steps follow each other and share "
            "a policy: a correlation over them does not show a cause."
        ),
        fold=_CORRELATIONS if len(rows) > _MANY else "",
        terminal_rows=_MANY,
    )


def trainer_table(study: TrainingAnalysis) -> Table:
    """Whether the optimiser and the weight sync are sound."""
    return table(
        "Trainer by run",
        study.by_run,
        [
            _RUN,
            col("updates", lambda row: _whole(row.number("updates")), priority=_SPARE),
            col("first entropy, nats", lambda row: number(row.number("first_entropy"))),
            _value("entropy", "final entropy, nats"),
            _value("k3", "KL(μ‖π), nats", priority=_SPARE),
            col("π/μ, 1 % to 99 %", _ratios, TRAINING[_RATIO], priority=_SPARE),
            _value("grad_norm", "gradient norm", priority=_SPARE),
            _value("length", "length"),
            _value("turns", "turns", priority=_SPARE),
            _value("truncated", "truncated, %", _share, priority=_SPARE),
            _value("back_offs", "back-offs", _whole, priority=_SPARE),
            col("sync proven", _sync, TRAINING[_SYNC]),
            _value("weights_changed", "weights changed in the engine, %", _share, priority=_SPARE),
            _value("rounding_gap", "|π − μ| by rounding", priority=_SPARE),
        ],
        note=(
            "Of the checked steps; an engine that hides its tensors is never proven. Rounding: "
            "to the engine's dtype."
        ),
        fold="Trainer by run",
        terminal_rows=0,
    )


def _ratios(row: RunGroup) -> str:
    low, high = value_of(row.number("ratio_p01")), value_of(row.number("ratio_p99"))
    if low is None or high is None:
        return numbers.MISSING
    return f"{numbers.near(low, 1)} – {numbers.near(high, 1)}"


def _sync(row: RunGroup) -> str:
    checks = sync_checks(row.run.records)
    if not checks.steps:
        return numbers.MISSING
    return f"{checks.proven:,} / {checks.steps:,}"


_TimeRow = tuple[TrainingRun, StepTime]


def time_table(study: TrainingAnalysis) -> Table:
    """Seconds and share of each phase; a narrow terminal hides the short ones."""
    rows = timed(study.runs)
    return table(
        "Seconds per step, by phase",
        rows,
        [
            text("run", lambda row: row[0].name),
            col("step", lambda row: number(row[1].seconds), TRAINING[_SECONDS]),
            *_phase_columns([time for _, time in rows]),
        ],
        note="Phases under half a percent count as other.",
    )


def _phase_columns(times: Sequence[StepTime]) -> Iterator[TextColumn[_TimeRow]]:
    for phase in phases_of(times):
        longest = max(time.share(phase) for time in times)
        priority = Priority.USUAL if longest > _LONG else _SPARE
        yield col(phase, partial(_of_phase, phase), priority=priority)


def _of_phase(phase: str, row: _TimeRow) -> str:
    time = row[1]
    if not time.of(phase):
        return numbers.MISSING
    return f"{number(time.of(phase))} ({100 * time.share(phase):.0f} %)"
