"""The screen of training runs: which algorithm ends higher, and what to type next."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.metrics.update_table import TRAINING
from mismatch_cli.report.tables import Col, col, number, percent, plain, table, text
from mismatch_cli.report.view import Facts, Profile, Screen, Status, Table, Verdict
from mismatch_cli.studies.watch_state import WatchState, counted, under_way_first
from mismatch_cli.train.studies.learning_speed import (
    AREA,
    BAD_OF_ALL,
    SECONDS,
    STEPS,
    Measure,
    mean_of,
)
from mismatch_cli.train.studies.run_settings import task_of
from mismatch_cli.train.studies.runs import TrainingRun, named_by, sync_in_words
from mismatch_cli.train.studies.seeds import Difference, over_seeds
from mismatch_cli.train.studies.training import (
    Curve,
    TrainingAnalysis,
    mean_by_phase,
    settings_of,
    steps_of,
    what_was_trained,
)

GAP = ("mismatch", "abs_dp_mean")  # of a step
_NAMED = 3  # algorithms that a sentence names
_ROWS = (10, 6)  # of the table: with one setting, and with several, whose names take room
_DRAWN = (3, 2)  # algorithms with curves on the screen, likewise
_BARS = (24, 20)  # of a curve: with one algorithm, and with several, whose names take room
_LONG = 0.1  # of a step: shorter phases are not named
_BATCH = (("prompts", "step"), ("samples", "prompt"))
_Named = tuple[str, Sequence[TrainingRun]]


def screen(study: TrainingAnalysis, notes: tuple[str, ...]) -> Screen:
    """The final numbers of each algorithm, its curves, and the verdict."""
    return Screen(
        subject=subject(study),
        notes=notes,
        tables=(_ends(study),),
        remarks=_remarks(study.runs),
        profiles=profiles(study),
        verdict=verdict(study) if study.watched is None else watch_verdict(study, study.watched),
        next=_next(study),
    )


def subject(study: TrainingAnalysis) -> tuple[str, str]:
    runs = study.runs
    names = list(dict.fromkeys(run.algorithm for run in runs))
    who = " and ".join(names) if len(names) < _NAMED else f"{len(names)} algorithms"
    dtypes = [settings_of(runs, f"{policy}_dtype") for policy in ("trainer", "rollout")]
    engine = settings_of(runs, "engine")
    facts = (
        numbers.things(len(runs), "run"),
        steps_of(runs),
        " × ".join(filter(None, (settings_of(runs, f"{part}_per_{unit}") for part, unit in _BATCH)))
        + " responses",
        f"trainer {dtypes[0]}" if dtypes[0] else "",
        f"{engine} {dtypes[1]}" if dtypes[1] else "",
    )
    measured = " · ".join(fact for fact in facts if fact.strip() and fact != " responses")
    return f"train  {' · '.join(filter(None, (who, *what_was_trained(runs))))}", measured


def _ends(study: TrainingAnalysis) -> Table:
    """A row per algorithm, or per run of a single algorithm."""
    several = len(study.algorithms) > 1
    rows: list[_Named] = (
        list(study.compared.items()) if several else [(run.name, [run]) for run in study.restricted]
    )
    rows.sort(key=lambda row: -(over_seeds(run.last("reward") for run in row[1]).value or 0.0))
    shown = _ROWS[len(study.settings) > 1]
    left = len(rows) - shown
    bad = study.occurs("bad_over_negative")
    return table(
        "",
        rows[:shown],
        [
            text("algorithm" if several else "run", lambda row: row[0]),
            col(
                reward_title(study),
                lambda row: plain(over_seeds(run.last("reward") for run in row[1])),
                TRAINING["reward"],
            ),
            *[speed_column("area", AREA, study)] * several,
            *[speed_column(f"steps to {half_way(study)}", STEPS, study)] * several,
            _mean("accuracy", lambda run: run.final_accuracy, number),
            _mean("|π − μ|", lambda run: run.last(*GAP), lambda value: numbers.number(value, 2)),
            _mean("blocked %", lambda run: run.mean("blocked"), percent),
            *[_mean("bad %", lambda run: run.mean("bad_over_negative"), percent)] * bad,
            *[speed_column("bad % of all", BAD_OF_ALL, study, percent)] * bad,
            *[speed_column(f"s to {half_way(study)}", SECONDS, study)] * several,
        ],
        note=(f"{left} more: --full. " if left > 0 else "")
        + f"Reward and |π − μ|: {study.window}"
        + (", ± 95 % over seeds." if any(len(runs) > 1 for _, runs in rows) else ".")
        + " Bad: push down a token (A < 0) that already lost 0.5 or more." * bad,
    )


def half_way(study: TrainingAnalysis) -> str:
    """The reward to which steps and seconds are counted."""
    return numbers.number(study.reward_to_reach, 2)


def speed_column(
    title: str,
    measure: Measure,
    study: TrainingAnalysis,
    show: Callable[[float | None], str] = number,
) -> Col[_Named]:
    """The mean over seeds of a measure of speed, or how many runs reach its reward."""

    def cell(row: _Named) -> str:
        mean = mean_of(measure, row[1], study.reward_to_reach)
        return mean.note or "" if mean.value is None else show(mean.value)

    return col(title, cell, TRAINING[measure.key], optional=True)


def reward_title(study: TrainingAnalysis) -> str:
    """`final reward`, if it is that of the end of each run and not of all of it."""
    return "final reward" if study.is_final else "reward"


def _mean(
    title: str, value: Callable[[TrainingRun], float | None], show: Callable[[float | None], str]
) -> Col[_Named]:
    return col(title, lambda row: show(over_seeds(map(value, row[1])).value))


def _remarks(runs: Sequence[TrainingRun]) -> Facts:
    phases = mean_by_phase(runs)
    whole = sum(phases.values())
    long = [
        f"{phase} {100 * part / whole:.0f} %"
        for phase, part in phases.items()
        if part > _LONG * whole
    ]
    signal = [run.mean(key) for key in ("groups_all_right", "groups_all_wrong") for run in runs]
    facts = (
        ("Bad updates", "none" if _never(runs, "bad_over_negative") else ""),
        ("Blocked", "nothing at any step" if _never(runs, "blocked") else ""),
        ("No signal", _no_signal(runs) if all(share is not None for share in signal) else ""),
        ("Weight sync", sync_in_words(run.records for run in runs)),
        ("Rounding", _rounding(runs)),
        ("A step takes", f"{numbers.number(whole, 2)} s: {', '.join(long)}" if whole else ""),
    )
    return tuple((label, words) for label, words in facts if words)


def _rounding(runs: Sequence[TrainingRun]) -> str:
    """What the engine's dtype swallows of the trainer's steps; empty where both have the same
    digits.
    """
    gap = over_seeds(run.last("rounding", "abs_dp_mean") or None for run in runs).value
    share = over_seeds(run.last("rounding", "weights_changed") for run in runs).value
    if gap is None or share is None:
        return ""
    changed, lag = numbers.number(100 * share, 2), numbers.number(gap, 2)
    return (
        f"{changed} % of the weights change in the engine at a step; it lags the trainer by |π − "
        f"μ| {lag}"
    )


def _never(runs: Iterable[TrainingRun], key: str) -> bool:
    """Whether it was measured and is always 0."""
    measured = [run.measured(key) for run in runs]
    return any(len(value_N) for value_N in measured) and not any(
        value_N.any() for value_N in measured
    )


def _no_signal(runs: Sequence[TrainingRun]) -> str:
    means = (
        over_seeds(run.mean(f"groups_all_{how}") for run in runs).value
        for how in ("right", "wrong")
    )
    right, wrong = (None if mean is None else 100 * mean for mean in means)
    return (
        f"{numbers.number(right, 2)} % of the groups all right, {numbers.number(wrong, 2)} % all "
        "wrong"
    )


def profiles(study: TrainingAnalysis) -> tuple[Profile, ...]:
    """Curves over the steps; a single algorithm has more of them."""
    drawn = _strongest(study)
    keys: dict[str, tuple[str, ...]] = {"reward": ("reward",), "blocked %": ("blocked",)}
    if len(drawn) == 1:
        keys |= {"|π − μ|": GAP, "length": ("length",), "entropy": ("entropy",)}
    found = []
    for title, key in keys.items():
        curves = study.curves(*key)
        for name in drawn:
            if name in curves and (_of_steps(curves[name], study, curves[name].value_N) > 0).any():
                shown = f"{title} · {name}" if len(drawn) > 1 else title
                found.append(
                    _profile(
                        shown,
                        curves[name],
                        study,
                        100 if "%" in title else 1,
                        _BARS[len(drawn) > 1],
                    )
                )
    return tuple(found)


def _strongest(study: TrainingAnalysis) -> list[str]:
    """The algorithms whose curves are drawn: the highest at the end, and the lowest."""
    final = study.final_rewards
    names = sorted(final, key=lambda name: -(final[name].value or 0.0)) or list(study.algorithms)
    drawn = _DRAWN[len(study.settings) > 1]
    return names if len(names) <= drawn else [*names[: drawn - 1], names[-1]]


def _of_steps(curve: Curve, study: TrainingAnalysis, value_N: np.ndarray) -> np.ndarray:
    """What belongs to steps: step 0 of `train` is an evaluation, that of a recording is its
    first step.
    """
    return value_N if study.watched is not None else value_N[curve.step_N > 0]


def _profile(
    title: str, curve: Curve, study: TrainingAnalysis, factor: float, bars: int
) -> Profile:
    value_N = factor * _of_steps(curve, study, curve.value_N)
    known_N = value_N[np.isfinite(value_N)]
    values = [float(value) if np.isfinite(value) else None for value in value_N]
    ends = f"{numbers.number(float(known_N.min()), 2)} to {numbers.number(float(known_N.max()), 2)}"
    step_N = _of_steps(curve, study, curve.step_N)
    first, last = (f"{step_N[place]:.0f}" for place in (0, -1))
    return Profile(title, tuple(numbers.stretches(values, bars)), first, last, ends, drawn=True)


def verdict(study: TrainingAnalysis) -> Verdict:
    """How the runs end: of several algorithms, whether one ends above another."""
    final = study.final_rewards
    if not final:
        rewarded = study.has("reward")
        why = "The runs share no step." if rewarded else "No reward was recorded."
        return Verdict("NOT MEASURED", why)
    done = all(run.is_done for run in study.runs)
    fallen = [name for name in final if all(run.has_collapsed for run in study.algorithms[name])]
    status: Status = (
        "bad" if len(fallen) == len(final) else "mixed" if fallen or not done else "good"
    )
    collapsed = f" Reward fell below half of its best: {_list(fallen)}." if fallen else ""
    if len(final) == 1:
        (name,) = final
        if done and not fallen:
            gained = all(run.has_gained for run in study.runs)
            return Verdict("DONE", _single(study, name), "good" if gained else "mixed")
        return Verdict(
            "COLLAPSED" if fallen else "NOT DONE", _single(study, name) + collapsed, status
        )
    above = {name: study.above(name) for name in final}
    leader = max(final, key=lambda name: (len(above[name]), final[name].value or 0.0))
    rivals = len(study.rivals(leader))
    if not above[leader]:
        return Verdict(
            "NO CLEAR DIFFERENCE",
            _undecided(study) + collapsed,
            status if fallen or not done else "",
        )
    below = above[leader][0] if rivals == 1 else f"{len(above[leader])} OF {rivals}"
    return Verdict(f"{leader} ABOVE {below}", _above(study, leader) + collapsed, status)


def watch_verdict(study: TrainingAnalysis, watched: WatchState) -> Verdict:
    """The state of the limits: what the terminal says and the exit code counts."""
    (run,) = study.runs
    alarms = under_way_first(watched.alarms)
    steps, limits = (
        numbers.things(run.num_steps, "step"),
        numbers.things(len(watched.limits), "limit"),
    )
    before, now = (numbers.number(value) for value in run.ends(*GAP))
    gap = f"mean |π − μ| {before} at first, {now} now"
    if alarms:
        named = "; ".join(
            f"{alarm.check.metric} {alarm.when}: {alarm.check.reason}" for alarm in alarms[:_NAMED]
        )
        more = f"; {len(alarms) - _NAMED:,} more" if len(alarms) > _NAMED else ""
        return Verdict(
            counted(alarms).upper(),
            f"{named}{more}. {steps}, {gap}.",
            "bad",
        )
    if watched.unmeasured:
        missing = ", ".join(watched.unmeasured[:_NAMED])
        return Verdict(
            "NOT MEASURED",
            f"Never measured, which counts as exceeded: {missing}. {steps}, {gap}.",
            "bad",
        )
    if not watched.limits:
        return Verdict("NO LIMITS", f"{steps}, {gap}. Limits become alarms with --limits.", "")
    holds = "holds" if len(watched.limits) == 1 else "hold"
    return Verdict("LIMITS HOLD", f"{limits} {holds} at each of {steps}, {gap}.", "good")


def _single(study: TrainingAnalysis, name: str) -> str:
    """`NAME has a final reward of 0.932 ± 0.021 and a final accuracy of 0.961, from 0.512 … (3
    seeds).`
    """
    runs, done = study.compared[name], all(run.is_done for run in study.runs)
    reward = plain(over_seeds(run.last("reward") for run in runs))
    words = f"{name} has a {reward_title(study) if done else 'reward'} of {reward}"
    cut = not all(steps.is_whole for steps in study.common)
    words += f" over {study.window}" if cut or (done and not study.is_final) else ""
    after, before = (
        over_seeds(getattr(run, key) for run in runs)
        for key in ("final_accuracy", "accuracy_before")
    )
    if after.value is not None:
        words += f" and {'a final' if done else 'an'} accuracy of {plain(after)}"
        if done and before.value is not None:
            words += f", from {plain(before)} before training"
    words += f" ({len(runs)} seeds)" if len(runs) > 1 else ""
    return f"{words}." if done else f"{words} so far."


def _undecided(study: TrainingAnalysis) -> str:
    """Rewards that intervals do not separate, and why."""
    final, rewards = study.final_rewards, _kind(study, "rewards")
    by_reward = sorted(final.items(), key=lambda item: -(item[1].value or 0.0))
    tasks = {task_of(runs[0]) for name, runs in study.algorithms.items() if name in final}
    if len(tasks) > 1:
        sentence = (
            f"{rewards} are compared within each of {len(tasks)} models or problems; none is "
            "above another."
        )
    elif len(by_reward) <= _NAMED:
        said = ", ".join(f"{name} {plain(reward)}" for name, reward in by_reward)
        sentence = f"{rewards}: {said}."
    else:
        (best, high), (worst, low) = by_reward[0], by_reward[-1]
        sentence = (
            f"{rewards} of {len(final)} {_lines(study)}: from {plain(low)} ({worst}) to "
            f"{plain(high)} ({best})."
        )
    if all(len(study.compared[name]) == 1 for name in final):
        return f"{sentence} One seed each: repeat with --seeds 3 to see whether that is luck."
    (best, _), *rest = by_reward
    if len(tasks) == 1 and len(rest) == 1:
        apart = study.difference(best, rest[0][0])
        return f"{sentence} Difference: {by_how_much(apart)}{how_paired(apart)}."
    return f"{sentence} No 95 % interval of a difference over seeds is above 0."


def _kind(study: TrainingAnalysis, noun: str) -> str:
    """`Final reward`, `Reward so far`, or `Reward over steps 1 to 7`, of one or several."""
    cut = not all(steps.is_whole for steps in study.common)
    done = all(run.is_done for run in study.runs)
    if done and study.is_final:
        return f"Final {noun}"
    if done or cut:
        return f"{noun.capitalize()} over {study.window}"
    return f"{noun.capitalize()} so far"


def by_how_much(apart: Difference) -> str:
    """`0.154 ± 0.115`, or the difference with the reason for not having an interval."""
    note = apart.estimate.note
    return plain(apart.estimate) + (f" ({note})" if note else "")


def how_paired(apart: Difference) -> str:
    """How the seeds of a difference were used: `, paired over 3 seeds`."""
    return (
        f", paired over {numbers.things(apart.pairs, 'seed')}"
        if apart.pairs
        else ", seeds not paired"
    )


def _lines(study: TrainingAnalysis) -> str:
    """The name of what a line shows."""
    return "algorithms" if len(study.settings) == 1 else "algorithms in their settings"


def _above(study: TrainingAnalysis, leader: str) -> str:
    """Algorithms whose reward is clearly below the leader's, by how much, and the others."""
    final, below = study.final_rewards, study.above(leader)
    apart = [study.difference(leader, name) for name in below[:_NAMED]]
    others = ", ".join(
        f"{plain(final[name])} of {name} (higher by {by_how_much(difference)})"
        for name, difference in zip(below, apart, strict=False)
    )
    more = f" and {len(below) - _NAMED} more below" if len(below) > _NAMED else ""
    how = " and ".join(
        dict.fromkeys(how_paired(difference).removeprefix(", ") for difference in apart)
    )
    sentence = (
        f"{_kind(study, 'reward')}: {plain(final[leader])}, against {others}{more}: 95 % over "
        f"seeds, {how}."
    )
    rivals = study.rivals(leader)
    rest = [name for name in rivals if name not in below]
    sentence += f" Not clearly below it: {_list(rest)}." if rest else ""
    if len(rivals) == 1:
        return sentence
    pairs = len(rivals) * (len(rivals) + 1) // 2
    return (
        f"{sentence} Chance sets 1 pair in 20 of equal algorithms apart; these are {pairs} pairs."
    )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (
        f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    )


def _next(study: TrainingAnalysis) -> Facts:
    runs = study.runs
    folders = [run.folder for run in runs if run.folder is not None]
    traces = [trace for run in runs[:1] if (trace := run.last_trace) is not None]
    found = [(suggest("clipstats", trace), "what other trust regions block") for trace in traces]
    if len(folders) == len(runs):
        for claim in study.claims[:1]:
            line = suggest("report", *named_by(folders), "-a", claim.own, "-a", claim.rival)
            found.append((line, "does the first learn faster than the second?"))
        found.append((suggest("report", *named_by(folders), "--full"), "every run and number"))
    return tuple(found)
