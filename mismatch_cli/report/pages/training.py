"""From recorded training runs to what is shown: one `ReportView`, which terminal and HTML both print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mismatch_cli import numbers
from mismatch_cli.errors import suggest
from mismatch_cli.metrics.gap_table import Metric
from mismatch_cli.metrics.update_table import TRAINING
from mismatch_cli.places import shown
from mismatch_cli.report.pages.training_tables import (
    algorithms_table,
    blocked_table,
    correlation_table,
    runs_table,
    time_table,
    trainer_table,
    with_range,
)
from mismatch_cli.report.tables import filled
from mismatch_cli.report.view import Facts, MetricRow, ReportView, Section, Table
from mismatch_cli.studies.runs import TrainingRun
from mismatch_cli.studies.training import (
    TrainingAnalysis,
    accuracy_before,
    by_algorithm,
    final_accuracy,
    last,
    last_step,
    partial,
    planned_steps,
    seconds_by_phase,
    spread,
)

_NOTATION = (
    "μ is the rollout’s probability of the sampled token and π the trainer’s, A the advantage. At equal weights π is "
    "taken before the first update of the step; the weights of an update are those that it changes. A blocked token is "
    "one that the algorithm’s mask keeps out of the update. [low, high] after a mean over several seeds are the lowest "
    "and the highest of them."
)
_LEADING = 3  # algorithms whose numbers stand in the headline; of more, the highest and the lowest
_SETTINGS = (("Model", "model"), ("Problems", "dataset"))
_NAMES_SHOWN = 3
_TELLING = ("step", "reward", "grad_norm")  # two runs that agree in these have made the same updates
_IN_THE_TABLE = ("algorithm", "seed")  # of runs


def page(study: TrainingAnalysis, reload_seconds: int = 0) -> ReportView:
    """One run or several; a page that reloads itself is one of a training that goes on."""
    runs = study.runs
    return ReportView(
        title="Training: does it stay stable?",
        about=_about(runs),
        notes=_notes(runs) + ("Training goes on: this page looks for a newer one by itself.",) * bool(reload_seconds),
        headline=_headline(runs),
        leading=_leading(runs),
        outline=_sections(runs),
        settings=_settings(runs),
        command=_command(runs),
        notation=_NOTATION,
        reload_seconds=reload_seconds,
    )


def _sections(runs: Sequence[TrainingRun]) -> tuple[Section, ...]:
    return (
        _section(
            "Reward and mismatch", "", algorithms_table(by_algorithm(runs)), runs_table(runs), trainer_table(runs)
        ),
        _section(
            "Bad updates and blocked tokens",
            "A bad update pushes down a token whose probability has already fallen by 0.5 or more from the rollout's: "
            "A < 0 and μ − π ≥ 0.5. The paper does not name its denominator, so both are shown. A blocked token "
            "contributes nothing to the update.",
            blocked_table(runs),
            correlation_table(runs),
        ),
        _section("Where the time goes", _time_text(runs), time_table(runs)),
    )


def _section(title: str, text: str, *tables: Table) -> Section:
    return Section(title, text, tables=filled(*tables))


def _time_text(runs: Sequence[TrainingRun]) -> str:
    """How much of a step the recomputing of log-probabilities takes, where it was done."""
    shares = []
    for run in runs:
        seconds = seconds_by_phase(run)
        if "recompute" in seconds:
            shares.append(seconds["recompute"] / sum(seconds.values()))
    if not shares:
        return ""
    low, high = (f"{100 * share:.0f} %" for share in (min(shares), max(shares)))
    return f"Recomputing log π′ takes {low if low == high else f'{low} to {high}'} of a step where it is done."


def _about(runs: Sequence[TrainingRun]) -> Facts:
    algorithms = by_algorithm(runs)
    seeds = sorted({run.seed for run in runs if run.seed is not None})
    steps = sorted({last_step(run) for run in runs})
    facts = [(label, _values(runs, key)) for label, key in _SETTINGS]
    facts += [
        ("Trainer", _values(runs, "trainer_dtype")),
        ("Rollout engine", " · ".join(part for part in (_values(runs, "engine"), _rollout_dtype(runs)) if part)),
        ("Sampling", _sampling(runs)),
        ("Algorithms", ", ".join(algorithms)),
        ("Runs", f"{numbers.count(len(runs))}" + (f", seed{'s' * (len(seeds) > 1)} {_listed(seeds)}" if seeds else "")),
        ("Steps", " to ".join(numbers.count(step) for step in dict.fromkeys((steps[0], steps[-1])))),
    ]
    return tuple((label, value) for label, value in facts if value)


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _values(runs: Sequence[TrainingRun], key: str) -> str:
    """The setting, or the different ones of the runs."""
    return ", ".join(dict.fromkeys(str(run.config[key]) for run in runs if run.config.get(key) not in (None, "")))


def _rollout_dtype(runs: Sequence[TrainingRun]) -> str:
    cache = _values(runs, "kv_cache_dtype")
    return _values(runs, "rollout_dtype") + (f" · KV cache {cache}" if cache not in ("", "auto") else "")


def _sampling(runs: Sequence[TrainingRun]) -> str:
    words = (
        ("{} problems a step", "prompts_per_step"), ("{} samples each", "samples_per_prompt"),
        ("temperature {}", "temperature"), ("at most {} tokens", "max_tokens"),
    )  # fmt: skip
    return " · ".join(text.format(value) for text, key in words if (value := _values(runs, key)))


def _notes(runs: Sequence[TrainingRun]) -> tuple[str, ...]:
    going = [run for run in runs if not _is_done(run)]
    notes = [f"PARTIAL: {run.name} stands at step {last_step(run):,} of {run.config['steps']:,}." for run in going]
    if len(notes) > _NAMES_SHOWN:
        notes = [f"PARTIAL: {len(notes)} of {len(runs)} runs have not reached their last step."]
    for run in runs:
        if (found := partial(run)) and found["missing_steps"]:
            lost = found["missing_steps"]
            notes.append(
                f"PARTIAL: {run.name} has no line for {numbers.things(len(lost), 'step')} before its last one "
                f"(the first is {lost[0]:,})."
            )
    for names in _indistinguishable(runs):
        notes.append(f"{' and '.join(names)} made the same updates at every step: their lines lie on each other.")
    if len({_values([run], "model") for run in runs}) > 1 or len({_values([run], "dataset") for run in runs}) > 1:
        notes.append("The runs have different models or problems: their rewards are not comparable.")
    return tuple(notes)


def _is_done(run: TrainingRun) -> bool:
    """Whether it has reached its last step, as far as that is known."""
    planned = planned_steps(run)
    return planned is None or last_step(run) >= planned


def _indistinguishable(runs: Sequence[TrainingRun]) -> list[list[str]]:
    """Algorithms whose runs are the same to the last bit: what one blocks, the others block too, or nobody anything."""
    alike: dict[object, list[str]] = {}
    for name, seeds in by_algorithm(runs).items():
        what = frozenset((run.seed, *(run.series(key).tobytes() for key in _TELLING)) for run in seeds)
        if any(run.series(_TELLING[-1]).any() for run in seeds):
            alike.setdefault(what, []).append(name)
    return [names for names in alike.values() if len(names) > 1]


def _headline(runs: Sequence[TrainingRun]) -> str:
    rewards = {name: spread([last(run, "reward") for run in seeds])[0] for name, seeds in by_algorithm(runs).items()}
    known = {name: reward for name, reward in rewards.items() if reward is not None}
    if not known:
        return "No reward was recorded."
    if len(known) <= _LEADING:
        return " ".join(_in_words(name, by_algorithm(runs)[name]) for name in known)
    ends = {"highest": max(known, key=known.__getitem__), "lowest": min(known, key=known.__getitem__)}
    sentences = [_in_words(name, by_algorithm(runs)[name], how) for how, name in ends.items()]
    return f"Of {len(known)} algorithms, " + " ".join(sentences)


def _in_words(name: str, runs: Sequence[TrainingRun], most: str = "") -> str:
    """`NAME has a final reward of 0.932 [0.911, 0.953] and a final accuracy of 0.961, from 0.512 … (3 seeds).`"""
    reward = with_range(spread([last(run, "reward") for run in runs]))
    final = "final " if all(map(_is_done, runs)) else ""
    text = f"{name} has the {most} {final}reward, {reward}," if most else f"{name} has a {final}reward of {reward}"
    accuracy = spread([final_accuracy(run) for run in runs])
    if accuracy[0] is not None:
        text += f" and {'a' if final else 'an'} {final}accuracy of {with_range(accuracy)}"
        before = spread([accuracy_before(run) for run in runs])
        text += f", from {with_range(before)} before training" if final and before[0] is not None else ""
    text = text.rstrip(",") + (f" ({len(runs)} seeds)" if len(runs) > 1 else "")
    return f"{text}." if final else f"{text} so far."


def _leading(runs: Sequence[TrainingRun]) -> tuple[MetricRow, ...]:
    """Final reward and accuracy beside each other, of as many algorithms as have room."""
    algorithms = list(by_algorithm(runs).items())
    if len(algorithms) > _LEADING:
        return ()
    rows = []
    for metric in (TRAINING["reward"], TRAINING["eval_accuracy"]):
        for name, seeds in algorithms:
            values = [last(run, "reward") if metric is TRAINING["reward"] else final_accuracy(run) for run in seeds]
            label = metric.label if all(map(_is_done, seeds)) else f"{metric.label.removeprefix('final ')} so far"
            rows += _row(metric, label, name if len(algorithms) > 1 else "", values)
    return tuple(rows)


def _row(metric: Metric, label: str, name: str, values: Sequence[float | None]) -> list[MetricRow]:
    found = spread(values)
    if found[0] is None:
        return []
    value, interval = numbers.estimate(*found)
    note = "one seed" if found[1] is None else ""
    return [MetricRow(metric, value, interval, note=note, name=f"{label} · {name}" if name else label)]


def _settings(runs: Sequence[TrainingRun]) -> tuple[tuple[str, Facts], ...]:
    """Every setting: those that all runs share, then those in which they differ, run by run."""
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    same = [key for key in keys if len({repr(run.config.get(key)) for run in runs}) == 1]
    shared = tuple((_words(key), _shown(runs[0], key)) for key in same)
    tables = [("All runs" if len(runs) > 1 else "Configuration", shared)]
    for run in runs:
        other = [key for key in keys if key not in (*same, *_IN_THE_TABLE)]
        tables.append((run.name, tuple((_words(key), _shown(run, key)) for key in other)))
    return tuple((title, facts) for title, facts in tables if facts)


def _words(key: str) -> str:
    return key.replace("_", " ")


def _shown(run: TrainingRun, key: str) -> str:
    value = run.config.get(key)
    return numbers.MISSING if value in (None, "") else str(value)


def _command(runs: Sequence[TrainingRun]) -> str:
    return suggest("report", *(shown(run.folder or Path(run.name)) for run in runs))
