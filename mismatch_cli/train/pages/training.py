"""The page of training runs: a `ReportView`, which terminal and HTML print."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from mismatch_cli.base import numbers
from mismatch_cli.base.places import shown
from mismatch_cli.metrics.gap_table import Metric
from mismatch_cli.metrics.update_table import CLIPPING, TRAINING
from mismatch_cli.report.about import command_line
from mismatch_cli.report.tables import (
    Col,
    col,
    filled,
    interval_or_note,
    number,
    parts,
    percent,
    plain,
    table,
    text,
)
from mismatch_cli.report.view import Facts, MetricRow, ReportView, Section, Table
from mismatch_cli.studies.watch_state import WatchState
from mismatch_cli.train.pages._staleness_table import staleness_table
from mismatch_cli.train.pages._training_claims import claims_screen, claims_table
from mismatch_cli.train.pages._training_screen import (
    GAP,
    half_way,
    reward_title,
    screen,
    speed_column,
)
from mismatch_cli.train.studies.common_steps import CommonSteps, in_words
from mismatch_cli.train.studies.learning_speed import AREA, BAD_OF_ALL, SECONDS, STEPS
from mismatch_cli.train.studies.runs import MOST_MISSING, TrainingRun, sync_proven
from mismatch_cli.train.studies.seeds import over_seeds, spread
from mismatch_cli.train.studies.training import (
    TrainingAnalysis,
    correlations,
    phases_of,
    problems_of,
    seconds_by_phase,
    settings_of,
)

_NOTATION = (
    "μ is the rollout’s probability of the sampled token and π the trainer’s, A the advantage. "
    "At equal weights means before the first update of the step; the weights of an update are "
    "those that it changes. A blocked token is one that the algorithm’s mask keeps out of the "
    "update. After a mean over several seeds, ± covers 95 % over seeds (Student’s t), and [low, "
    "high] are the lowest and highest of them."
)
_NO_BAD_UPDATES = "There were no bad updates. "
_BAD_UPDATES = (
    "A bad update pushes down a token that already lost 0.5 or more in probability since the "
    "rollout: A < 0 and μ − π ≥ 0.5. The paper does not name its denominator, so both are shown. "
    "A blocked token contributes nothing to the update."
)
_LEADING = 3  # algorithms with their numbers beside the headline
_NAMES_SHOWN = 3
_IN_THE_TABLE = ("algorithm", "seed")  # of runs
_CORRELATIONS = "Bad updates and reward over the steps"
_LONG = 0.1  # of a step
_MANY = 12  # rows of correlations: more are folded on the page and cut on a terminal
_RUN: Col[TrainingRun] = text("run", lambda run: run.name)


def page(study: TrainingAnalysis, reload_seconds: int = 0) -> ReportView:
    """One run or several; the page reloads itself while training continues."""
    runs, notes = study.runs, _notes(study)
    answer = screen(study, notes)
    title = "Does training stay stable?"
    if study.claimed is not None:
        answer = claims_screen(study, _notes_of_claims(study))
        title = "Does {} learn faster than {}?".format(*study.claimed)
    return ReportView(
        title=title,
        about=_about(study),
        notes=notes
        + ("Training is still running: this page reloads itself.",) * bool(reload_seconds),
        leading=_leading(study),
        screen=answer,
        outline=_sections(study),
        settings=_settings(runs),
        command=command_line(
            "report", [run.folder or Path(run.name) for run in runs], *study.claim_flags
        ),
        notation=_NOTATION,
        reload_seconds=reload_seconds,
    )


def _sections(study: TrainingAnalysis) -> tuple[Section, ...]:
    runs = study.runs
    never_bad = study.has("bad_over_negative") and not study.occurs("bad_over_negative")
    limits = () if study.watched is None else _limits(study.watched)
    rewards = (
        _algorithms_table(study),
        _runs_table(study),
        _sets_table(study.restricted),
        _trainer_table(runs),
    )
    return (
        *limits,
        Section("Which learns faster", tables=filled(claims_table(study))),
        Section("Reward and mismatch", tables=filled(*rewards)),
        Section(
            "Bad updates and blocked tokens",
            (_NO_BAD_UPDATES if never_bad else "") + _BAD_UPDATES,
            tables=filled(
                _blocked_table(study.restricted), staleness_table(study), _correlation_table(runs)
            ),
        ),
        Section("Where the time goes", _time_text(runs), tables=filled(_time_table(runs))),
    )


def _limits(watched: WatchState) -> tuple[Section, ...]:
    """Every alarm: since which step, whether it is over, and what was measured at first."""
    rows = table(
        "Alarms",
        list(watched.alarms),
        [
            text("when", lambda alarm: alarm.when),
            text("metric", lambda alarm: alarm.check.quantity),
            text("what happened", lambda alarm: str(alarm.check.reason)),
            text("limits", lambda alarm: str(shown(alarm.check.limits))),
        ],
    )
    return (Section("Limits", tables=filled(rows)),) if watched.limits else ()


def _time_text(runs: Sequence[TrainingRun]) -> str:
    """The share of a step that recomputing log-probabilities takes; empty where no run does."""
    phases = map(seconds_by_phase, runs)
    shares = [
        seconds["recompute"] / sum(seconds.values()) for seconds in phases if "recompute" in seconds
    ]
    if not shares:
        return ""
    low, high = (f"{100 * share:.0f} %" for share in (min(shares), max(shares)))
    return (
        f"Recomputing log π′ takes {low if low == high else f'{low} to {high}'} of a step in "
        "runs that do it."
    )


def _about(study: TrainingAnalysis) -> Facts:
    runs = study.runs
    seeds = sorted({run.seed for run in runs if run.seed is not None})
    steps = sorted({run.steps for run in runs})
    named = f", seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if seeds else ""
    facts = (
        ("Model", settings_of(runs, "model")),
        ("Problems", ", ".join(dict.fromkeys(filter(None, map(problems_of, runs))))),
        ("Trainer", settings_of(runs, "trainer_dtype")),
        (
            "Rollout engine",
            " · ".join(filter(None, (settings_of(runs, "engine"), _rollout_dtype(runs)))),
        ),
        ("Sampling", _sampling(runs)),
        ("Algorithms", ", ".join(dict.fromkeys(run.algorithm for run in runs))),
        ("Settings", "; ".join(filter(None, study.settings))),
        ("Runs", f"{numbers.count(len(runs))}{named}"),
        (
            "Steps",
            " to ".join(numbers.count(step) for step in dict.fromkeys((steps[0], steps[-1]))),
        ),
    )
    return tuple((label, value) for label, value in facts if value)


def _rollout_dtype(runs: Sequence[TrainingRun]) -> str:
    cache = settings_of(runs, "kv_cache_dtype")
    return settings_of(runs, "rollout_dtype") + (
        f" · KV cache {cache}" if cache not in ("", "auto") else ""
    )


def _sampling(runs: Sequence[TrainingRun]) -> str:
    words = (
        ("{} problems a step", "prompts_per_step"), ("{} samples each", "samples_per_prompt"),
        ("temperature {}", "temperature"), ("at most {} tokens", "max_tokens"),
    )  # fmt: skip
    return " · ".join(
        text.format(value) for text, key in words if (value := settings_of(runs, key))
    )


def _notes_of_claims(study: TrainingAnalysis) -> tuple[str, ...]:
    """What each comparison leaves out: it covers fewer runs than the page, and other steps."""
    runs_of_each = [TrainingAnalysis(claim.common.runs) for claim in study.claims]
    return tuple(dict.fromkeys(chain.from_iterable(map(_notes, runs_of_each))))


def _notes(study: TrainingAnalysis) -> tuple[str, ...]:
    runs = study.runs
    going = [run for run in runs if not run.is_done]
    notes = [
        f"PARTIAL: {run.name} is at step {run.last_step:,} of {run.config['steps']:,}."
        for run in going
    ]
    if len(notes) > _NAMES_SHOWN:
        notes = [f"PARTIAL: {len(notes)} of {len(runs)} runs have not reached their last step."]
    notes += [_shared_steps(steps) for steps in study.common if not steps.is_whole]
    for run in runs:
        if lost := (run.partial or {}).get("missing_steps"):
            count = "at least " * (len(lost) == MOST_MISSING) + numbers.things(len(lost), "step")
            notes.append(
                f"PARTIAL: {run.name} has no record of {count} before its last (first: "
                f"{lost[0]:,})."
            )
    for names in study.indistinguishable:
        notes.append(
            f"{' and '.join(names)} made the same updates at every step: their lines coincide."
        )
    if any(len({settings_of([run], key) for run in runs}) > 1 for key in ("model", "dataset")):
        notes.append(
            "The runs use different models or problems, so their rewards are not comparable."
        )
    return tuple(notes)


def _shared_steps(steps: CommonSteps) -> str:
    """Over which steps runs of different length are compared, and which of them end first."""
    runs, short = numbers.things(len(steps.runs), "run"), [run.name for run in steps.shortest]
    if not len(steps.step_N):
        return f"PARTIAL: {runs} share no step, so they are not compared."
    sentence = f"PARTIAL: {runs} are compared over {in_words(steps.step_N)}, which they share"
    if not short:
        return f"{sentence}."
    if len(short) == 1:
        return f"{sentence}; {short[0]} ends there."
    named = f"{len(short)} of them" if len(short) > _NAMES_SHOWN else " and ".join(short)
    return f"{sentence}; {named} end there."


def _with_range(values: Iterable[float | None], digits: int = 3) -> str:
    """A mean over seeds and their range: `0.932 [0.911, 0.953]`."""
    value, low, high = (numbers.number(part, digits) for part in spread(values))
    return value if low == numbers.MISSING else f"{value} [{low}, {high}]"


def _leading(study: TrainingAnalysis) -> tuple[MetricRow, ...]:
    """Final reward and accuracy of each algorithm; empty where there are more than have room."""
    if len(study.algorithms) > _LEADING:
        return ()
    rows = []
    for metric in (TRAINING["reward"], TRAINING["eval_accuracy"]):
        for name, runs in study.compared.items():
            found = over_seeds(
                run.last("reward") if metric.key == "reward" else run.final_accuracy for run in runs
            )
            done = all(run.is_done for run in study.algorithms[name])
            label = _label(metric, study, done)
            title = f"{label} · {name}" if len(study.algorithms) > 1 else label
            if found.value is not None:
                value, _, half = plain(found).partition(" ")
                interval = f"{half}, 95 % over {len(runs)} seeds" if half else numbers.MISSING
                rows.append(MetricRow(metric, value, interval, note=found.note or "", name=title))
    return tuple(rows)


def _label(metric: Metric, study: TrainingAnalysis, done: bool) -> str:
    """`final reward`; of runs that are not done, or are compared over other steps, less."""
    plain_label = metric.label.removeprefix("final ")
    if not done:
        return f"{plain_label} so far"
    if metric.key == "reward" and not study.is_final:
        return f"{plain_label}, {study.window}"
    return metric.label


def _settings(runs: Sequence[TrainingRun]) -> tuple[tuple[str, Facts], ...]:
    """Every setting: those that all runs share, then those that differ, by run."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    same = [key for key in keys if len({repr(run.config.get(key)) for run in runs}) == 1]
    differing = [key for key in keys if key not in (*same, *_IN_THE_TABLE)]
    tables = [("All runs" if len(runs) > 1 else "Configuration", runs[0], same)]
    tables += [(run.name, run, differing) for run in runs]
    return tuple(
        (title, tuple(_setting(run, key) for key in names)) for title, run, names in tables if names
    )


def _setting(run: TrainingRun, key: str) -> tuple[str, str]:
    value = run.config.get(key)
    return key.replace("_", " "), numbers.MISSING if value in (None, "") else str(value)


def _algorithms_table(study: TrainingAnalysis) -> Table:
    """Means over the seeds of each algorithm; empty where every algorithm has one run."""
    algorithms = study.compared
    several = any(len(runs) > 1 for runs in algorithms.values())
    return table(
        "By algorithm",
        algorithms.items() if several else (),
        [
            text("algorithm", lambda item: item[0]),
            col("seeds", lambda item: str(len(item[1]))),
            _over_seeds(reward_title(study), lambda run: run.last("reward"), TRAINING["reward"]),
            speed_column("area", AREA, study),
            speed_column(f"steps to {half_way(study)}", STEPS, study),
            speed_column(f"seconds to {half_way(study)}", SECONDS, study),
            _over_seeds(
                "final accuracy", lambda run: run.final_accuracy, TRAINING["eval_accuracy"]
            ),
            _over_seeds("final |π − μ|", lambda run: run.ends(*GAP)[1], TRAINING["abs_dp_last"], 2),
            _share_over_seeds("blocked, %", "blocked"),
            _share_over_seeds("bad updates, % of A < 0", "bad_over_negative"),
            speed_column("% of A ≠ 0", BAD_OF_ALL, study, percent),
        ],
        note=f"Mean [lowest, highest] over seeds. Reward and final |π − μ|: {study.window}.",
    )


def _over_seeds(
    title: str, value: Callable[[TrainingRun], float | None], metric: Metric, digits: int = 3
) -> Col[tuple[str, Sequence[TrainingRun]]]:
    return col(title, lambda item: _with_range(map(value, item[1]), digits), metric)


def _share_over_seeds(title: str, key: str) -> Col[tuple[str, Sequence[TrainingRun]]]:
    def cell(item: tuple[str, Sequence[TrainingRun]]) -> str:
        return _with_range(
            (100 * mean for run in item[1] if (mean := run.mean(key)) is not None), 2
        )

    return col(title, cell, TRAINING[key], optional=True)


def _runs_table(study: TrainingAnalysis) -> Table:
    """A row per run; names that `train` gave already say algorithm and seed."""
    runs, setting_of = (
        study.runs,
        {id(run): name for name, part in study.settings.items() for run in part.runs},
    )
    shared = {id(run): part for run, part in zip(runs, study.restricted, strict=True)}
    named = all(run.name == f"{re.sub('[:,]', '-', run.algorithm)}-seed-{run.seed}" for run in runs)
    who: list[Col[TrainingRun]] = [
        text("algorithm", lambda run: run.algorithm),
        col("seed", lambda run: numbers.MISSING if run.seed is None else str(run.seed)),
    ]
    settings: list[Col[TrainingRun]] = []
    if len(study.settings) > 1:
        settings.append(text("setting", lambda run: setting_of[id(run)]))
    return table(
        "By run",
        runs,
        [
            _RUN,
            *([] if named else who),
            *settings,
            col("steps", lambda run: numbers.count(run.steps)),
            col("updates", lambda run: _whole(run.highest("updates")), optional=True),
            *_endings(lambda run: shared[id(run)], reward_title(study)),
            col("s per step", _seconds, TRAINING["seconds"], optional=True),
        ],
        note=f"The {reward_title(study)} is the mean of {study.window}.",
    )


def _endings(
    shared: Callable[[TrainingRun], TrainingRun], reward: str
) -> tuple[Col[TrainingRun], ...]:
    """The columns whose numbers are compared: over the steps that all runs share."""
    return (
        col(reward, lambda run: number(shared(run).last("reward")), TRAINING["reward"]),
        col("best", lambda run: number(shared(run).best_reward), TRAINING["best"], optional=True),
        col(
            "final accuracy",
            lambda run: number(shared(run).final_accuracy),
            TRAINING["eval_accuracy"],
        ),
        col(
            "first |π − μ|",
            lambda run: number(shared(run).ends(*GAP)[0]),
            TRAINING["abs_dp_first"],
            optional=True,
        ),
        col(
            "final |π − μ|",
            lambda run: number(shared(run).ends(*GAP)[1]),
            TRAINING["abs_dp_last"],
            optional=True,
        ),
    )


def _sets_table(runs: Sequence[TrainingRun]) -> Table:
    """The accuracy on each evaluation set, for runs with several."""
    rows = [(run.name, name, found) for run in runs for name, found in run.accuracy_by_set.items()]
    return table(
        "Accuracy by evaluation set",
        rows,
        [
            text("run", lambda row: row[0]),
            text("set", lambda row: row[1]),
            col("before", lambda row: number(row[2]["before"]), optional=True),
            col("final accuracy", lambda row: number(row[2]["final"]), TRAINING["eval_accuracy"]),
            col("best", lambda row: number(row[2]["best"])),
        ],
        note="Elsewhere, accuracy is the mean over the sets, with equal weights.",
    )


def _seconds(run: TrainingRun) -> str:
    return number(sum(seconds_by_phase(run).values()) or None)


def _whole(value: float | None) -> str:
    return numbers.count(None if value is None else round(value))


def _blocked_table(runs: Sequence[TrainingRun]) -> Table:
    """Means over the steps, without runs that recorded none."""
    columns = [
        _over_steps("blocked, %", "blocked", percent),
        _over_steps("A > 0, %", "blocked_positive", percent, optional=True),
        _over_steps("A > 0, μ < 0.1, %", "blocked_rare", percent, optional=True),
        _over_steps("A < 0, %", "blocked_negative", percent, optional=True),
        _over_steps("bad updates, % of A < 0", "bad_over_negative", percent),
        _over_steps("% of A ≠ 0", "bad_over_tokens", percent, optional=True),
        _over_steps("mean μ of blocked", "mu_blocked", number),
        _over_steps("entropy of blocked, nats", "entropy_blocked", number, optional=True),
    ]
    return table(
        "Blocked tokens and bad updates by run",
        [run for run in runs if any(column.cell(run) != numbers.MISSING for column in columns)],
        [_RUN, *columns],
        note="Means over steps.",
    )


def _over_steps(
    title: str, key: str, show: Callable[[float | None], str], *, optional: bool = False
) -> Col[TrainingRun]:
    return col(title, lambda run: show(run.mean(key)), TRAINING[key], optional=optional)


def _correlation_table(runs: Sequence[TrainingRun]) -> Table:
    """Bad updates, if any, with the reward of the step and with its change from the step before."""
    rows = [row for run in runs for row in correlations(run)]
    return table(
        _CORRELATIONS,
        rows,
        [
            text("run", lambda row: row.run),
            text("bad updates with", lambda row: row.other),
            col("steps", lambda row: numbers.count(row.steps)),
            col(
                "correlation",
                lambda row: numbers.estimate(*parts(row.found))[0],
                CLIPPING["correlations"],
            ),
            col("95 % interval", lambda row: interval_or_note(row.found)),
        ],
        note=(
            "Bad updates as a share of the tokens with A < 0. Steps follow each other and share "
            "a policy: a correlation over them does not show a cause."
        ),
        fold=_CORRELATIONS if len(rows) > _MANY else "",
        terminal_rows=_MANY,
    )


def _trainer_table(runs: Sequence[TrainingRun]) -> Table:
    """Whether the optimiser and the weight sync are sound."""
    return table(
        "Trainer by run",
        runs,
        [
            _RUN,
            col("first entropy, nats", lambda run: number(run.ends("entropy")[0])),
            col(
                "final entropy, nats",
                lambda run: number(run.ends("entropy")[1]),
                TRAINING["entropy"],
            ),
            _recent("KL(μ‖π), nats", "k3", number, "current", "k3"),
            col("π/μ, 1 % to 99 %", _ratios, TRAINING["ratio"], optional=True),
            col(
                "gradient norm",
                lambda run: number(run.median("grad_norm")),
                TRAINING["grad_norm"],
                optional=True,
            ),
            col("length", lambda run: number(run.last("length")), TRAINING["length"]),
            col("turns", lambda run: number(_turns(run)), TRAINING["turns"], optional=True),
            _recent("truncated, %", "truncated", percent, "truncated"),
            col(
                "back-offs",
                lambda run: _whole(run.highest("back_offs")),
                TRAINING["back_offs"],
                optional=True,
            ),
            col("sync proven", _sync, TRAINING["sync"]),
            _recent(
                "weights changed in the engine, %",
                "weights_changed",
                percent,
                "rounding",
                "weights_changed",
            ),
            _recent("|π − μ| by rounding", "rounding_gap", number, "rounding", "abs_dp_mean"),
        ],
        note=(
            "Of the checked steps; an engine that hides its tensors is never proven. Rounding: "
            "to the engine's dtype."
        ),
        fold="Trainer by run",
        terminal_rows=0,
    )


def _recent(
    title: str, metric: str, show: Callable[[float | None], str], *keys: str
) -> Col[TrainingRun]:
    return col(title, lambda run: show(run.last(*keys)), TRAINING[metric], optional=True)


def _ratios(run: TrainingRun) -> str:
    low, high = (run.last("current", key) for key in ("ratio_p01", "ratio_p99"))
    return (
        numbers.MISSING
        if low is None or high is None
        else f"{numbers.near(low, 1)} – {numbers.near(high, 1)}"
    )


def _turns(run: TrainingRun) -> float | None:
    """The mean number of turns; None where every response has one turn."""
    turns = run.last("turns")
    return None if turns == 1 else turns


def _sync(run: TrainingRun) -> str:
    told, steps = sync_proven(run.records)
    return f"{told['proven']:,} / {steps:,}" if steps else numbers.MISSING


def _time_table(runs: Sequence[TrainingRun]) -> Table:
    """Seconds and share of each phase; a narrow terminal hides the short ones."""
    rows = [(run.name, seconds) for run in runs if (seconds := seconds_by_phase(run))]
    return table(
        "Seconds per step, by phase",
        rows,
        [
            text("run", lambda row: row[0]),
            col("step", lambda row: number(sum(row[1].values())), TRAINING["seconds"]),
            *_phase_columns([seconds for _, seconds in rows]),
        ],
        note="Phases under half a percent count as other.",
    )


def _phase_columns(
    steps: Sequence[Mapping[str, float]],
) -> Iterator[Col[tuple[str, Mapping[str, float]]]]:
    for phase in phases_of(steps):
        long = any(seconds.get(phase, 0.0) > _LONG * sum(seconds.values()) for seconds in steps)
        yield col(phase, partial(_of_step, phase), optional=not long)


def _of_step(phase: str, row: tuple[str, Mapping[str, float]]) -> str:
    seconds = row[1]
    if phase not in seconds:
        return numbers.MISSING
    return f"{number(seconds[phase])} ({100 * seconds[phase] / sum(seconds.values()):.0f} %)"
