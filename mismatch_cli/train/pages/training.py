"""The page of training runs: an `Outline`, which terminal and HTML print."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.base.places import shorten_paths
from mismatch_cli.metrics.estimate import finite_or_none
from mismatch_cli.metrics.gap_table import Metric
from mismatch_cli.metrics.update_table import TRAINING
from mismatch_cli.report.outline import Facts, MetricRow, Outline, Profile, Section, Verdict
from mismatch_cli.report.preamble import command_line
from mismatch_cli.report.tables import filled, plain, table, text
from mismatch_cli.studies.watch_state import WatchState
from mismatch_cli.train.pages._training_claims import claim_remarks, claim_verdict, claims_table
from mismatch_cli.train.pages._training_tables import (
    algorithms_table,
    blocked_table,
    correlation_table,
    runs_table,
    sets_table,
    staleness_table,
    time_table,
    trainer_table,
)
from mismatch_cli.train.pages._training_verdict import verdict, watch_verdict
from mismatch_cli.train.studies.common_steps import CommonSteps, in_words
from mismatch_cli.train.studies.phases import mean_time, recomputing
from mismatch_cli.train.studies.run_numbers import GAP, RunGroup
from mismatch_cli.train.studies.run_settings import shared_and_different, task_of
from mismatch_cli.train.studies.runs import (
    MOST_MISSING,
    TrainingRun,
    algorithms_of,
    named_by,
    sync_in_words,
)
from mismatch_cli.train.studies.training import (
    Curve,
    TrainingAnalysis,
    problems_of,
    settings_of,
    steps_of,
    what_was_trained,
)

_NOTATION = (
    "μ is the rollout’s probability of the sampled token and π the trainer’s, A the advantage. "
    "At equal weights means before the first update of the step; the weights of an update are "
    "those that it changes. A blocked token is one that the algorithm’s mask keeps out of the "
    "update. After a mean over several seeds, ± covers 95 % over seeds (Student’s t)."
)
_NO_BAD_UPDATES = "There were no bad updates. "
_BAD_UPDATES = (
    "A bad update pushes down a token that already lost 0.5 or more in probability since the "
    "rollout: A < 0 and μ − π ≥ 0.5. The paper does not name its denominator, so both are shown. "
    "A blocked token contributes nothing to the update."
)
_LEADING = 3  # algorithms with their numbers beside the headline
_NAMED = 3  # runs or algorithms that a sentence names
_IN_THE_TABLE = ("algorithm", "seed")  # of runs
_LONG = 0.1  # of a step: shorter phases are not named
_DRAWN = (3, 2)  # algorithms with curves on the screen: with one setting, and with several
_BARS = (24, 20)  # of a curve: with one algorithm, and with several, whose names take room


def page(study: TrainingAnalysis, reload_seconds: int = 0) -> Outline:
    """One run or several; the page reloads itself while training continues."""
    notes = _notes_of_answer(study)
    other_notes = [note for note in _notes(study) if note not in notes]
    if reload_seconds:
        notes += ("Training is still running: this page reloads itself.",)
    folders = [run.folder or Path(run.name) for run in study.runs]
    return Outline(
        title=_title(study),
        about=_about(study),
        subject=_subject(study.answered),
        notes=notes,
        leading=_leading(study),
        verdict=_verdict(study),
        remarks=claim_remarks(study.claims) if study.claimed else _remarks(study),
        profiles=_profiles(study.answered),
        next=_next(study),
        parts=_sections(study, other_notes),
        settings=_settings(study.runs),
        command=command_line("report", folders, *study.claim_flags),
        notation=_NOTATION,
        reload_seconds=reload_seconds,
    )


def _title(study: TrainingAnalysis) -> str:
    if study.claimed is None:
        return "Does training stay stable?"
    own, rival = study.claimed
    return f"Does {own} learn faster than {rival}?"


def _verdict(study: TrainingAnalysis) -> Verdict:
    if study.watched is not None:
        return watch_verdict(study, study.watched)
    if study.claimed is not None:
        return claim_verdict(study.claims)
    return verdict(study)


def _sections(study: TrainingAnalysis, notes: Sequence[str]) -> tuple[Section, ...]:
    """All parts; the notes are those on runs that the answer is not about."""
    rewards = filled(
        algorithms_table(study), runs_table(study), sets_table(study), trainer_table(study)
    )
    updates = filled(blocked_table(study), staleness_table(study), correlation_table(study))
    none_bad = _NO_BAD_UPDATES if study.never("bad_over_negative") else ""
    return (
        *_limits(study.watched),
        Section("Which learns faster", tables=filled(claims_table(study))),
        Section("Reward and mismatch", " ".join(notes), tables=rewards),
        Section("Bad updates and blocked tokens", none_bad + _BAD_UPDATES, tables=updates),
        Section("Where the time goes", _time_text(study.runs), tables=filled(time_table(study))),
    )


def _limits(watched: WatchState | None) -> tuple[Section, ...]:
    """Every alarm: since which step, whether it is over, and what was measured at first."""
    if watched is None or not watched.limits:
        return ()
    rows = table(
        "Alarms",
        watched.alarms,
        [
            text("when", lambda alarm: alarm.when),
            text("metric", lambda alarm: alarm.check.quantity),
            text("what happened", lambda alarm: str(alarm.check.reason)),
            text("limits", lambda alarm: str(shorten_paths(alarm.check.limits))),
        ],
    )
    return (Section("Limits", tables=filled(rows)),)


def _time_text(runs: Sequence[TrainingRun]) -> str:
    """The share of a step that recomputing log-probabilities takes; empty where no run does."""
    shares = recomputing(runs)
    if not shares:
        return ""
    least, most = f"{100 * min(shares):.0f} %", f"{100 * max(shares):.0f} %"
    share = least if least == most else f"{least} to {most}"
    return f"Recomputing log π′ takes {share} of a step in runs that do it."


def _subject(study: TrainingAnalysis) -> tuple[str, str]:
    """What was trained, and how, in two lines."""
    runs = study.runs
    names = algorithms_of(runs)
    algorithms = " and ".join(names) if len(names) < _NAMED else f"{len(names)} algorithms"
    batch = (settings_of(runs, "prompts_per_step"), settings_of(runs, "samples_per_prompt"))
    engine = (settings_of(runs, "engine"), settings_of(runs, "rollout_dtype"))
    return (
        f"train  {_joined(algorithms, *what_was_trained(runs))}",
        _joined(
            numbers.things(len(runs), "run"),
            steps_of(runs),
            _named(" × ".join(filter(None, batch)), "{} responses"),
            _named(settings_of(runs, "trainer_dtype"), "trainer {}"),
            " ".join(filter(None, engine)),
        ),
    )


def _joined(*parts: str) -> str:
    return " · ".join(filter(None, parts))


def _named(value: str, words: str) -> str:
    """The value in words; empty if there is none."""
    return words.format(value) if value else ""


def _about(study: TrainingAnalysis) -> Facts:
    """The settings of the runs in words, and how many runs and steps there are."""
    runs = study.runs
    seeds = sorted({run.seed for run in runs if run.seed is not None})
    seed_words = ", seed {}" if len(seeds) == 1 else ", seeds {}"
    steps = [run.steps for run in runs]
    ends = map(numbers.count, (min(steps), max(steps)))
    facts = {
        "Model": settings_of(runs, "model"),
        "Problems": ", ".join(dict.fromkeys(filter(None, map(problems_of, runs)))),
        "Trainer": settings_of(runs, "trainer_dtype"),
        "Rollout engine": _in_words(runs, _ENGINE),
        "Sampling": _in_words(runs, _SAMPLING),
        "Algorithms": ", ".join(algorithms_of(runs)),
        "Settings": "; ".join(filter(None, study.settings)),
        "Runs": numbers.count(len(runs)) + _named(", ".join(map(str, seeds)), seed_words),
        "Steps": " to ".join(dict.fromkeys(ends)),
    }
    return _filled(facts)


def _filled(facts: Mapping[str, str]) -> Facts:
    """The facts that are not empty."""
    return tuple((label, words) for label, words in facts.items() if words)


# Settings, and how they are said
_ENGINE = {"engine": "{}", "rollout_dtype": "{}", "kv_cache_dtype": "KV cache {}"}
_SAMPLING = {
    "prompts_per_step": "{} problems a step",
    "samples_per_prompt": "{} samples each",
    "temperature": "temperature {}",
    "max_tokens": "at most {} tokens",
}


def _in_words(runs: Sequence[TrainingRun], words_of: Mapping[str, str]) -> str:
    """The settings that runs have, without those that follow from others."""
    facts = []
    for key, words in words_of.items():
        value = settings_of(runs, key)
        if value != "auto":
            facts.append(_named(value, words))
    return _joined(*facts)


def _notes_of_answer(study: TrainingAnalysis) -> tuple[str, ...]:
    """What the answer leaves out; each comparison covers fewer runs than the page, and other
    steps.
    """
    if study.claimed is None:
        return _notes(study)
    runs_of_each = [TrainingAnalysis(claim.common.runs) for claim in study.claims]
    return tuple(dict.fromkeys(chain.from_iterable(map(_notes, runs_of_each))))


def _notes(study: TrainingAnalysis) -> tuple[str, ...]:
    runs = study.runs
    notes = [*_going(runs), *map(_shared_steps, study.common), *map(_lost_steps, runs)]
    for names in study.indistinguishable:
        notes.append(
            f"{' and '.join(names)} made the same updates at every step: their lines coincide."
        )
    if len(set(map(task_of, runs))) > 1:
        trained = {(settings_of([run], "model"), settings_of([run], "dataset")) for run in runs}
        what = "models or problems" if len(trained) > 1 else "problems or rewards"
        notes.append(f"The runs use different {what}, so their rewards are not comparable.")
    return tuple(filter(None, notes))


def _going(runs: Sequence[TrainingRun]) -> list[str]:
    """The runs that have not reached their last step."""
    going = [run for run in runs if not run.is_done]
    if len(going) > _NAMED:
        return [f"PARTIAL: {len(going)} of {len(runs)} runs have not reached their last step."]
    return [
        f"PARTIAL: {run.name} is at step {run.last_step:,} of {run.planned_steps:,}."
        for run in going
    ]


def _lost_steps(run: TrainingRun) -> str:
    if run.partial is None or not run.partial.missing_steps:
        return ""
    lost = run.partial.missing_steps
    steps = numbers.things(len(lost), "step")
    if len(lost) == MOST_MISSING:
        steps = f"at least {steps}"
    return f"PARTIAL: {run.name} has no record of {steps} before its last (first: {lost[0]:,})."


def _shared_steps(steps: CommonSteps) -> str:
    """Over which steps runs of different length are compared, and which of them end first; empty
    where all have the same.
    """
    if steps.is_whole:
        return ""
    runs = numbers.things(len(steps.runs), "run")
    if not len(steps.step_N):
        return f"PARTIAL: {runs} share no step, so they are not compared."
    sentence = f"PARTIAL: {runs} are compared over {in_words(steps.step_N)}, which they share"
    short = [run.name for run in steps.shortest]
    if not short:
        return f"{sentence}."
    if len(short) == 1:
        return f"{sentence}; {short[0]} ends there."
    named = f"{len(short)} of them" if len(short) > _NAMED else " and ".join(short)
    return f"{sentence}; {named} end there."


def _leading(study: TrainingAnalysis) -> tuple[MetricRow, ...]:
    """Final reward and accuracy of each algorithm; empty where there are more than have room."""
    if len(study.by_algorithm) > _LEADING:
        return ()
    rows = []
    for key in (_REWARD, "eval_accuracy"):
        for group in study.by_algorithm:
            row = _leading_row(study, TRAINING[key], group)
            if row.value != numbers.MISSING:
                rows.append(row)
    return tuple(rows)


_REWARD = "reward"


def _leading_row(study: TrainingAnalysis, metric: Metric, group: RunGroup) -> MetricRow:
    """A number of an algorithm, which is named if there are several."""
    mean = group.number(metric.key)
    value, _, half = plain(mean).partition(" ")
    seeds = group.runs_with(metric.key)
    interval = f"{half}, 95 % over {seeds} seeds" if half else numbers.MISSING
    name = _label(study, metric, group)
    if len(study.by_algorithm) > 1:
        name += f" · {group.name}"
    return MetricRow(metric, value, interval, note=mean.note or "", name=name)


def _label(study: TrainingAnalysis, metric: Metric, group: RunGroup) -> str:
    """`final reward`; of runs that are not done, or are compared over other steps, less."""
    plain_label = metric.label.removeprefix("final ")
    if not all(run.is_done for run in group.whole):
        return f"{plain_label} so far"
    if metric.key == _REWARD and not study.is_final:
        return f"{plain_label}, {study.window}"
    return metric.label


def _settings(runs: Sequence[TrainingRun]) -> tuple[tuple[str, Facts], ...]:
    """Every setting: those that all runs share, then those that differ, by run."""
    shared, others = shared_and_different(runs)
    different = [key for key in others if key not in _IN_THE_TABLE]
    title = "All runs" if len(runs) > 1 else "Configuration"
    tables = [(title, _facts(runs[0], shared))] if shared else []
    if different:
        tables += [(run.name, _facts(run, different)) for run in runs]
    return tuple(tables)


def _facts(run: TrainingRun, keys: Sequence[str]) -> Facts:
    """The settings of a run with their values."""
    facts = []
    for key in keys:
        value = run.config.get(key)
        shown = numbers.MISSING if value in (None, "") else str(value)
        facts.append((key.replace("_", " "), shown))
    return tuple(facts)


def _remarks(study: TrainingAnalysis) -> Facts:
    """What never happened, and how groups, weight sync and time are."""
    facts = {
        "Bad updates": "none" if study.never("bad_over_negative") else "",
        "Blocked": "nothing at any step" if study.never("blocked") else "",
        "No signal": _no_signal(study.together),
        "Weight sync": sync_in_words(run.records for run in study.runs),
        "Rounding": _rounding(study.together),
        "A step takes": _time(study.runs),
    }
    return _filled(facts)


def _no_signal(runs: RunGroup) -> str:
    """The groups without an advantage; empty where they were not counted."""
    right = runs.number("groups_all_right").value
    wrong = runs.number("groups_all_wrong").value
    if right is None or wrong is None:
        return ""
    return (
        f"{numbers.number(100 * right, 2)} % of the groups all right, "
        f"{numbers.number(100 * wrong, 2)} % all wrong"
    )


def _rounding(runs: RunGroup) -> str:
    """What the engine's dtype swallows of the trainer's steps; empty where both have the same
    digits.
    """
    gap = runs.number("rounding_gap").value
    share = runs.number("weights_changed").value
    if not gap or share is None:
        return ""
    return (
        f"{numbers.number(100 * share, 2)} % of the weights change in the engine at a step; it "
        f"lags the trainer by |π − μ| {numbers.number(gap, 2)}"
    )


def _time(runs: Sequence[TrainingRun]) -> str:
    """The seconds of a step, and its long phases; empty where no times were recorded."""
    time = mean_time(runs)
    shares = []
    for phase in time.by_phase:
        share = time.share(phase)
        if share > _LONG:
            shares.append(f"{phase} {100 * share:.0f} %")
    if not shares:
        return ""
    return f"{numbers.number(time.seconds, 2)} s: {', '.join(shares)}"


def _profiles(study: TrainingAnalysis) -> tuple[Profile, ...]:
    """Curves over the steps; a single algorithm has more of them."""
    names = _strongest(study)
    several = len(names) > 1
    keys: dict[str, tuple[str, ...]] = {"reward": ("reward",), "blocked %": ("blocked",)}
    if not several:
        keys |= {"|π − μ|": GAP, "length": ("length",), "entropy": ("entropy",)}
    profiles = []
    for title, key in keys.items():
        curves = study.curves_of_steps(*key)
        for name in filter(curves.__contains__, names):
            head = f"{title} · {name}" if several else title
            factor = 100 if "%" in title else 1
            profiles.append(_profile(head, curves[name], factor, _BARS[several]))
    return tuple(profiles)


def _strongest(study: TrainingAnalysis) -> list[str]:
    """The algorithms whose curves are drawn: the highest at the end, and the lowest."""
    names = study.highest_first or list(study.algorithms)
    most = _DRAWN[len(study.settings) > 1]
    if len(names) <= most:
        return names
    return [*names[: most - 1], names[-1]]


def _profile(title: str, curve: Curve, factor: float, bars: int) -> Profile:
    """A curve as bars, with its first and last step and its range."""
    value_N = factor * curve.value_N
    low = numbers.number(float(np.nanmin(value_N)), 2)
    high = numbers.number(float(np.nanmax(value_N)), 2)
    values = list(map(finite_or_none, value_N.tolist()))
    first, last = f"{curve.step_N[0]:.0f}", f"{curve.step_N[-1]:.0f}"
    bars_B = tuple(numbers.stretches(values, bars))
    return Profile(title, bars_B, first, last, f"{low} to {high}", drawn=True)


def _next(study: TrainingAnalysis) -> Facts:
    """Commands for the same algorithms: what they block, which learns faster, and every number."""
    flags = study.claim_flags
    trace = study.answered.runs[0].last_trace
    lines = []
    if trace is not None:
        answer = "what both block on the same tokens" if flags else "what other trust regions block"
        lines.append((suggest("clipstats", trace, *flags), answer))
    folders = [run.folder for run in study.runs if run.folder is not None]
    if len(folders) < len(study.runs):
        return tuple(lines)
    runs = named_by(folders)
    if study.claims and not flags:
        claim = study.claims[0]
        line = suggest("report", *runs, "-a", claim.own, "-a", claim.rival)
        lines.append((line, "does the first learn faster than the second?"))
    return (*lines, (suggest("report", *runs, *flags, "--full"), "every run and number"))
